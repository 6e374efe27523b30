"""Images of a step dealt to all ranks: losses and gradients of each sample alone under plain transformers.

As a script, test_balanced.py FOLDER CASE ...: what each gloo rank runs.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from cases import slow
from equality import alone_through, without_zeros
from peft import LoraConfig, get_peft_model
from ranks import on_ranks, save_cases, whole
from shared_rows import relative
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from vlmpack.context_parallel import Parallel
from vlmpack.errors import ConfigError
from vlmpack.families import family_named
from vlmpack.families.media import media_reader
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import SlotRule, pack, share
from vlmpack.layout.batch import IGNORE
from vlmpack.model import PackedStep, enable_packing
from vlmpack.testing import Sample, mixed_samples, padded, tiny_model
from vlmpack.testing.comparison import mean_losses, target_losses
from vlmpack.testing.samples import build_sample, joined, num_targets

pytestmark = pytest.mark.dist
GRIDS = ("image_grid_thw", "video_grid_thw")
TEXT, MANY = ("text", "text"), ("images", "video", "image", "images_and_video")


class Case(NamedTuple):
    """One step."""

    family: str
    rows: tuple[tuple[str, ...], ...] = (TEXT, MANY)
    """The kinds of the samples of each row."""
    context: int = 1
    """Number of ranks that share a row."""
    how: str = "checkpointed"
    """What else is done to the model, or to its rows: the last one has no targets, or samples share a prefix."""

    def __str__(self) -> str:
        return f"{self.family} {' + '.join(map('-'.join, self.rows))} context={self.context} {self.how}"

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.rows) * self.context

    def model(self) -> Any:
        """Two blocks of vision; with `lora`, adapters in both towers."""
        model = tiny_model(self.family, seed=3, vision_depth=2)
        if self.how != "lora":
            return model
        torch.manual_seed(5)
        adapters = LoraConfig(r=4, target_modules=r".*(qkv|linear_fc1|q_proj|v_proj)", init_lora_weights=False)
        return get_peft_model(model, adapters)

    def samples(self) -> list[list[Sample]]:
        """The samples of each row, of a kind that the family takes."""
        family, config, found = family_named(self.family), tiny_model(self.family).config, []
        for seed, kinds in enumerate(self.rows):
            taken = [kind.replace("images_and_", "") if family.videos_as_images else kind for kind in kinds]
            taken = [*taken, "audio", "everything"] if family.has_audio and "image" in kinds else taken
            taken = [kind if family.has_videos or "video" not in kind else "image" for kind in taken]
            samples = mixed_samples(config, seed=seed, kinds=cast(Any, taken))
            if self.how == "short audios":  # shorter than a chunk, whose padding the tower reads
                frames = [2 * config.audio_config.n_window - 3, 2 * config.audio_config.n_window - 9]
                samples = [build_sample(config, stretches=[3] * 3, audio_frames=frames)] if seed else samples
            if self.how == "shared prefix":
                samples = [joined([samples[0], sample]) for sample in samples[1:]]
            found.append(samples)
        if self.how == "no targets":
            for sample in found[-1]:
                sample["labels"].fill_(IGNORE)
        return found


ALIKE = ("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "glm46v", "glm4v_moe", "aya_vision")
"""Families whose images go the way of another family's."""
TOGETHER = [x for x, family in FAMILIES.items() if family.has_vision and not family.not_over_ranks and x not in ALIKE]
QUICK = [
    Case("qwen3_vl"),
    Case("qwen2_5_vl", (MANY, TEXT)),
    Case("gemma3"),
    Case("glm4v"),
    Case("qwen3_vl", (TEXT, TEXT)),
]
OF_TWO = [
    *(Case(name) for name in TOGETHER if name not in {case.family for case in QUICK}),
    Case("qwen3_omni_moe_thinker", how="short audios"),
    *(Case(name, (MANY,), context=2, how="shared prefix") for name in ("qwen3_vl", "gemma3")),
    Case("qwen3", (("text",) * 4,), context=2, how="shared prefix"),
    *(Case("qwen3_vl", how=how) for how in ("ddp", "fsdp2", "lora", "shared prefix", "no targets")),
]
OF_FOUR = [
    Case("qwen3_vl", (("image",), TEXT, MANY, ("video", "images"))),
    Case("qwen3_vl", (("image",), TEXT, ("video",), ("text", "image")), how="fsdp2"),
    *(Case(name, context=2) for name in ("qwen3_vl", "gemma3", "llava_onevision", "qwen3_omni_moe_thinker")),
]
CASES = [*QUICK, *OF_TWO, *OF_FOUR]


def step(case: Case) -> dict[str, Any]:
    """Sample losses, sums of gradients, and for each rank the patches of its tower and the bytes that it sent."""
    mesh = None
    if case.context > 1:
        mesh = init_device_mesh("cpu", (len(case.rows), case.context), mesh_dim_names=("data", "context"))
    parallel = Parallel(mesh, balance_vision=True)
    model = enable_packing(case.model(), parallel=parallel).train()
    core = model.get_base_model() if case.how == "lora" else model
    core.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    patches: list[int] = []
    if (tower := family_named(case.family).vision_path) is not None:
        core.get_submodule(tower).register_forward_pre_hook(
            lambda _, args, kwargs: patches.append(len(args[0] if args else kwargs["pixel_values"])), with_kwargs=True
        )
    rows = case.samples()
    targets = sum(num_targets(sample) for samples in rows for sample in samples)
    is_tree = case.how == "shared prefix"  # what ranks share is not the row, but its tree
    rule = SlotRule(row_multiple=1 if is_tree else case.context)
    row = pack(padded(rows[parallel.data_rank]), rule=rule)
    if is_tree:
        row = share(row, min_shared=1, read_media=media_reader(family_named(case.family), core.config))
        assert (row.tree is None) == (len(rows[parallel.data_rank]) == 1)
    run = PackedStep(wrapped(case, model))  # kept until the backward pass: so are DDP's hooks
    result = run(row, num_items_in_batch=targets)
    (result.loss * (case.ranks if case.how in ("ddp", "fsdp2") else 1)).backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        if case.how not in ("ddp", "fsdp2"):
            dist.all_reduce(grad)
        if parameter.requires_grad:
            gradients[name] = whole(grad)
    of_ranks: list[Any] = [None] * case.ranks
    dist.all_gather_object(of_ranks, (result.sample_losses.detach(), patches, parallel.sent))
    losses, computed, sent = zip(*of_ranks, strict=True)
    return {
        "losses": torch.cat(losses[:: case.context]),
        "gradients": gradients,
        "patches": [sum(counts) for counts in computed],
        "sent": sent,
    }


def wrapped(case: Case, model: Any) -> Any:
    """The model to call."""
    if case.how == "ddp":
        return DistributedDataParallel(model)
    if case.how == "fsdp2":
        mesh = init_device_mesh("cpu", (case.ranks,))
        for part in (*model.model.visual.blocks, *model.model.language_model.layers):
            fully_shard(part, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return model


@pytest.fixture(scope="session")
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run the chosen cases of so many ranks once; returns what rank 0 wrote of a case."""
    folder = tmp_path_factory.mktemp("balanced")
    names = {item.name.partition("[")[2].removesuffix("]") for item in request.session.items}
    for ranks in (2, 4):
        if chosen := [str(case) for case in CASES if case.ranks == ranks and str(case) in names]:
            on_ranks(Path(__file__), folder, *chosen, ranks=ranks)
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


if __name__ == "__main__":
    save_cases(Path(sys.argv[1]), {str(case): partial(step, case) for case in CASES if str(case) in sys.argv[2:]})
