"""`plan_for`: models divided by its plans have the gradients of plain transformers on samples alone.

As a script: what each of two gloo ranks runs, one packed step of each family, divided by its plan.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import alone_through, check_gradients, limits_of, without_zeros
from ranks import on_ranks, save_cases, whole
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.distributed import DistributedConfig

from vlmpack.context_parallel import plan_for, plans
from vlmpack.errors import ConfigError
from vlmpack.families.registry import FAMILIES
from vlmpack.model import PackedStep, enable_packing
from vlmpack.testing import Sample, mixed_samples, padded, tiny_config, tiny_model

CASES = (
    *("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe_thinker", "gemma4", "llama4_text", "lfm2_vl", "kimi_k25", "gpt_oss"),
    "qwen3_vl_moe of the hub",
)
"""Families, on two tensor ranks. Checkpoints on the hub hold experts transposed: they are divided by expert ranks."""


def samples_of(model: Any) -> list[Sample]:
    kinds = ("image", "text", "images", "text") if FAMILIES[model.config.model_type].has_vision else ("text",) * 4
    return mixed_samples(model.config, seed=4, kinds=kinds, side=(1, 2))


def step(checkpoint: Path) -> dict[str, Any]:
    """Names of parameters that are divided, and all gradients of one step."""
    config = AutoConfig.from_pretrained(checkpoint)
    auto = AutoModelForImageTextToText if FAMILIES[config.model_type].has_vision else AutoModelForCausalLM
    ep_size = 2 if "hub" in checkpoint.name else 1
    mesh = DistributedConfig(tp_size=2, ep_size=ep_size, tp_plan=plan_for(config, tp_size=2))
    model: Any = enable_packing(auto.from_pretrained(checkpoint, distributed_config=mesh))
    PackedStep(model)(padded(samples_of(model))).loss.backward()
    parameters = dict(model.named_parameters())
    divided = [name for name, p in parameters.items() if isinstance(p, DTensor) and p.to_local().shape != p.shape]
    return {
        "divided": divided,
        "gradients": {name: whole(p.grad) for name, p in parameters.items() if p.grad is not None},
    }


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
    on_ranks(Path(__file__), folder)
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
    check_gradients(own, without_zeros(seen["gradients"]), limits_of(model.config.model_type))


@pytest.mark.parametrize(
    ("family", "tp_size", "fault"),
    [
        ("qwen3_vl", 4, "tp_size=4 does not divide the 2 key-value heads of qwen3_vl: use one of 1, 2"),
        ("gemma4", 2, "the 1 key-value heads of gemma4"),
        ("deepseek_v3", 3, "tp_size=3 does not divide the 4 key-value heads of deepseek_v3"),
        ("qwen3", 0, "tp_size"),
    ],
)
def test_what_cannot_be_divided_is_refused(family: str, tp_size: int, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        plan_for(tiny_config(family), tp_size=tp_size)


@pytest.mark.parametrize(
    ("rules", "fault"),
    [({}, "gpt_oss has no tensor-parallel plan for its layers"), ({"lm_head": "odd"}, "needs the rule 'odd'")],
)
def test_a_family_that_transformers_cannot_divide_is_refused(rules: Any, fault: str, monkeypatch: Any) -> None:
    added = {"gpt_oss": rules and {**plans._ADDED["gpt_oss"], **rules}}
    monkeypatch.setattr(plans, "_ADDED", added)
    with pytest.raises(ConfigError, match=fault):
        plan_for(tiny_config("gpt_oss"), tp_size=2)


def test_a_model_whose_norms_of_heads_train_apart_is_refused() -> None:
    model = tiny_model("qwen3_omni_moe_thinker")
    model._tp_size = 2  # as transformers' loading under a mesh leaves it, with its own plan
    with pytest.raises(ConfigError, match=r"gradients of 4 norms of heads.*plan_for"):
        enable_packing(model)
    model.tp_plan = plan_for(model.config, tp_size=2)
    enable_packing(model)


if __name__ == "__main__":
    folder_of_cases = Path(sys.argv[1])
    save_cases(folder_of_cases, {case: partial(step, folder_of_cases / case) for case in CASES})
