"""`plan_for`: models divided by its plans have the gradients of plain transformers on samples alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from context_parallel.plan_ranks import CASES, samples_of
from equality import alone_through, check_gradients, limits_of
from ranks import on_ranks
from safetensors.torch import load_file, save_file

from vlmpack.context_parallel import plan_for
from vlmpack.errors import ConfigError
from vlmpack.model import enable_packing
from vlmpack.testing import tiny_config, tiny_model


def model_of(case: str) -> Any:
    return tiny_model(case.split(" ")[0], seed=3, kv_heads=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first rank left the gradients of every case."""
    folder = tmp_path_factory.mktemp("plans")
    for case in CASES:
        model_of(case).save_pretrained(folder / case)
        if "hub" in case:
            file = folder / case / "model.safetensors"
            save_file({n: _transposed(n, w) for n, w in load_file(file).items()}, file, metadata={"format": "pt"})
    on_ranks(Path(__file__).with_name("plan_ranks.py"), folder)
    return folder


def _transposed(name: str, weight: torch.Tensor) -> torch.Tensor:
    return weight.mT.contiguous() if "experts" in name else weight


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_gradient_is_that_of_samples_alone(folder: Path, case: str) -> None:
    model = model_of(case)
    own = alone_through(model, samples_of(model))
    seen = torch.load(folder / f"{case}.pt")
    assert len(seen["divided"]) >= 10
    found = {name: gradient for name, gradient in seen["gradients"].items() if gradient.any()}
    check_gradients(own, found, limits_of(model.config.model_type))


@pytest.mark.parametrize(
    ("family", "tp_size", "fault"),
    [
        ("qwen3_vl", 4, "tp_size=4 does not divide the 2 key-value heads of qwen3_vl: use one of 1, 2"),
        ("gemma4", 2, "the 1 key-value heads of gemma4"),
        ("lfm2_vl", 2, "lfm2_vl has no tensor-parallel plan for its layers"),
        ("qwen3", 0, "tp_size"),
    ],
)
def test_what_cannot_be_divided_is_refused(family: str, tp_size: int, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        plan_for(tiny_config(family), tp_size=tp_size)


def test_a_model_whose_norms_of_heads_train_apart_is_refused() -> None:
    model = tiny_model("qwen3_omni_moe_thinker")
    model._tp_size = 2  # as transformers' loading under a mesh leaves it, with its own plan
    with pytest.raises(ConfigError, match=r"gradients of 4 norms of heads.*plan_for"):
        enable_packing(model)
    model.tp_plan = plan_for(model.config, tp_size=2)
    enable_packing(model)
