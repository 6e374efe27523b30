"""After a probe the model is what it was, bit for bit, and so is everything around it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import vlmpack
from vlmpack.context_parallel import Parallel
from vlmpack.model import StepConfig, engine, is_packing
from vlmpack.model.engine import packing_state
from vlmpack.probing.run import preserved_state
from vlmpack.testing import tiny_model


def used() -> Any:
    """A model in the middle of something: some modules in eval mode, some gradients, some weights frozen."""
    model = tiny_model("qwen3_vl")
    model.model.language_model.layers[0].eval()
    for i, p in enumerate(model.parameters()):
        p.requires_grad_(i % 5 != 0)
        if i % 3 == 0 and p.requires_grad:
            p.grad = torch.full_like(p, float(i))
    return model


def state_of(model: Any) -> dict[str, Any]:
    return {
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "buffers": {name: value.clone() for name, value in model.named_buffers()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "classes": {name: type(module) for name, module in model.named_modules()},
        "frozen": {name: p.requires_grad for name, p in model.named_parameters()},
        "configuration": copy.deepcopy(model.config.to_dict()),
        "implementations": [
            module.config._attn_implementation for module in model.modules() if "config" in vars(module)
        ],
        "random": torch.get_rng_state(),
    }


def same(before: Any, after: Any) -> bool:
    if isinstance(before, torch.Tensor):
        return torch.equal(before, after)
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(same(before[key], after[key]) for key in before)
    return before == after


def check_same(model: Any, before: dict[str, Any], gradients: dict[str, Any]) -> None:
    after = state_of(model)
    assert [name for name in before if not same(before[name], after[name])] == []
    assert gradients, "nothing compared"
    for name, p in model.named_parameters():
        tensor, value = gradients[name]
        assert p.grad is tensor, name
        assert tensor is None or torch.equal(tensor, value)


def gradients_of(model: Any) -> dict[str, Any]:
    return {name: (p.grad, None if p.grad is None else p.grad.clone()) for name, p in model.named_parameters()}


@pytest.mark.slow
def test_a_probe_leaves_nothing_behind() -> None:
    model = used()
    settings = StepConfig(attention="eager_mask", head_chunk=7)
    vlmpack.enable_packing(model, settings)
    before, gradients = state_of(model), gradients_of(model)
    assert vlmpack.probe(model).verdict == "exact"
    check_same(model, before, gradients)
    assert is_packing(model)
    assert packing_state(model).config == settings


def test_what_modules_count_in_train_mode_is_put_back() -> None:
    model = tiny_model("qwen3")
    norm = model.model.norm
    norm.register_buffer("calls", torch.zeros(1))
    counter = norm.calls
    norm.register_forward_hook(lambda module, args, output: counter.add_(1) and None)
    vlmpack.probe(model, plain=False, share_prefixes=False)
    assert norm.calls is counter
    assert counter.item() == 0


def test_ranks_go_on_working_together_afterwards() -> None:
    model = tiny_model("qwen3")
    together = Parallel()
    vlmpack.enable_packing(model, parallel=together)
    vlmpack.probe(model, plain=False, share_prefixes=False)
    assert packing_state(model).parallel is together


@pytest.mark.parametrize("enabled", [False, True])
def test_nor_does_one_in_which_everything_raises(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**metadata: Any) -> None:
        raise TypeError("broken")

    model = used()
    if enabled:
        vlmpack.enable_packing(model)
    before, gradients = state_of(model), gradients_of(model)
    monkeypatch.setattr(engine, "RowContext", broken)
    assert vlmpack.probe(model).verdict == "fails"
    check_same(model, before, gradients)
    assert is_packing(model) == enabled


def test_the_comparison_above_can_fail() -> None:
    model = used()
    before = state_of(model)
    model.lm_head.weight.data[0, 0] += 1
    model.model.visual.eval()
    torch.rand(1)
    after = state_of(model)
    assert [name for name in before if not same(before[name], after[name])] == ["weights", "modes", "random"]


def test_arithmetic_is_exact_inside_with_one_thread_for_a_small_model_and_as_before_afterwards() -> None:
    model, threads = tiny_model("qwen3"), torch.get_num_threads()
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(2)
    try:
        with preserved_state(model):
            assert (torch.get_float32_matmul_precision(), torch.get_num_threads()) == ("highest", 1)
            assert not model.training
        assert (torch.get_float32_matmul_precision(), torch.get_num_threads()) == ("high", 2)
        assert model.training
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.set_num_threads(threads)
