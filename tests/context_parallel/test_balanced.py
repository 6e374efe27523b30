"""Images of a step dealt to all ranks: losses and gradients of each sample alone under plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import slow
from context_parallel.balanced_ranks import CASES, OF_FOUR, OF_TWO, QUICK, Case
from equality import alone_through, without_zeros
from ranks import on_ranks
from shared_rows import relative

from vlmpack.context_parallel import Parallel
from vlmpack.errors import ConfigError
from vlmpack.families.registry import FAMILIES
from vlmpack.model import enable_packing
from vlmpack.testing import tiny_model
from vlmpack.testing.comparison import mean_losses, target_losses

pytestmark = pytest.mark.dist

GRIDS = ("image_grid_thw", "video_grid_thw")


@pytest.fixture(scope="session")
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run the chosen cases of so many ranks once; returns what rank 0 wrote of a case."""
    folder = tmp_path_factory.mktemp("balanced")
    names = {item.name.partition("[")[2].removesuffix("]") for item in request.session.items}
    for ranks in (2, 4):
        if chosen := [str(case) for case in CASES if case.ranks == ranks and str(case) in names]:
            on_ranks(Path(__file__).with_name("balanced_ranks.py"), folder, *chosen, ranks=ranks)
    return lambda case: torch.load(folder / f"{case}.pt")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT reads it
@pytest.mark.parametrize("case", [*QUICK, *slow(*OF_TWO, *OF_FOUR)], ids=str)
def test_losses_and_gradients_are_those_of_each_sample_alone(case: Case, seen: Any) -> None:
    samples, found = [sample for row in case.samples() for sample in row], seen(case)
    truth = alone_through(case.model(), samples)
    pairs = zip(truth.logits, samples, strict=True)
    losses = mean_losses([target_losses(logits, sample["labels"]) for logits, sample in pairs])
    torch.testing.assert_close(found["losses"], losses, rtol=1e-6, atol=1e-6)
    gradients = without_zeros(found["gradients"])
    assert gradients.keys() == truth.gradients.keys()
    for name, gradient in gradients.items():
        assert relative(gradient, truth.gradients[name]) <= 1e-5, name


def test_a_rank_without_images_computes_half_of_them_and_every_byte_is_counted(seen: Any) -> None:
    found, config = seen(QUICK[0]), QUICK[0].model().config
    grids = [sample[name] for row in QUICK[0].samples() for sample in row for name in GRIDS if name in sample]
    total, vision = int(torch.cat(grids).prod(1).sum()), config.vision_config
    home, moved = found["patches"][1], found["patches"][0]
    assert home + moved == total
    assert max(home, moved) <= 0.55 * total
    patch = FAMILIES["qwen3_vl"].patch_channels(config)
    levels = 1 + len(vision.deepstack_visual_indexes)
    features = moved // vision.spatial_merge_size**2 * config.text_config.hidden_size * levels
    assert [sent["pixels"] for sent in found["sent"]] == [0, 4 * moved * patch]
    assert [sent["images"] for sent in found["sent"]] == [4 * features] * 2  # features to their row, gradients back


def test_without_images_every_rank_computes_a_blank_one_and_nothing_is_sent(seen: Any) -> None:
    found = seen(QUICK[-1])
    assert found["patches"] == [4, 4]
    assert [sent.keys() for sent in found["sent"]] == [{"sizes"}] * 2


def test_balancing_needs_the_ranks_of_a_job() -> None:
    with pytest.raises(ConfigError, match="call init_process_group before"):
        enable_packing(tiny_model("qwen3_vl"), parallel=Parallel(balance_vision=True))
