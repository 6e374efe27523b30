"""A client's model: AdamW as torch's, files, memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from step_service import ADAM, gradients, lora, run_one, set_adapter, some_data, tiny_engine, weights

from vlmpack.errors import RequestError
from vlmpack.service.engine import Engine

STEPS = (
    ADAM,
    replace(ADAM, learning_rate=3e-2, beta1=0.8, weight_decay=0.1),
    replace(ADAM, grad_clip_norm=0.5, eps=1e-6),
    replace(ADAM, beta2=0.999, grad_clip_norm=1e9),
)
"""Settings that differ from step to step."""


def engine_with(name: str = "a", **settings: bool) -> Engine:
    engine = tiny_engine(**settings)
    engine.create(name, lora())
    set_adapter(engine, name)
    return engine


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_steps_are_those_of_torch() -> None:
    """With settings that change from step to step, and clipping by the norm of the whole gradient."""
    engine = engine_with()
    mirror = {name: torch.nn.Parameter(tensor) for name, tensor in weights(engine).items()}
    optimizer = torch.optim.AdamW(mirror.values())
    for at, adam in enumerate(STEPS):
        run_one(engine, some_data(engine, seed=at))
        for name, gradient in gradients(engine).items():
            mirror[name].grad = gradient
        norm = torch.cat([p.grad.flatten() for p in mirror.values() if p.grad is not None]).norm()
        if adam.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_(mirror.values(), adam.grad_clip_norm)
        betas = (adam.beta1, adam.beta2)
        settings = {"lr": adam.learning_rate, "betas": betas, "eps": adam.eps, "weight_decay": adam.weight_decay}
        optimizer.param_groups[0].update(settings)
        optimizer.step()
        result = engine.optim_step("a", adam)
        assert result.metrics["grad_norm:mean"] == pytest.approx(norm.item(), rel=1e-5)
        for name, tensor in weights(engine).items():
            torch.testing.assert_close(tensor, mirror[name].detach(), rtol=1e-6, atol=1e-7)


def test_a_step_clears_the_gradient_and_one_without_changes_nothing() -> None:
    engine = engine_with()
    run_one(engine, some_data(engine))
    engine.optim_step("a", ADAM)
    assert gradients(engine) == {}
    before = weights(engine)
    assert engine.optim_step("a", ADAM).metrics == {"grad_norm:mean": 0.0, "no_gradient:sum": 1.0}
    assert equal(weights(engine), before)


def test_a_gradient_that_is_not_finite_is_dropped() -> None:
    engine = engine_with()
    run_one(engine, some_data(engine)[:1])
    before = weights(engine)
    accumulated = engine.client("a").gradients
    assert accumulated is not None
    assert accumulated[0] is not None
    accumulated[0][0, 0] = float("inf")
    with pytest.raises(RequestError, match=r"not finite.*dropped"):
        engine.optim_step("a", ADAM)
    assert equal(weights(engine), before)
    assert gradients(engine) == {}


# ---------------------------------------------------------------------- files


def train(engine: Engine, name: str, seeds: range) -> None:
    for seed in seeds:
        run_one(engine, some_data(engine, seed=seed)[:2], model_id=name)
        engine.optim_step(name, STEPS[seed % len(STEPS)])


@pytest.mark.parametrize("is_adapter", [True, False])
def test_training_goes_on_bit_for_bit_after_it_was_saved(tmp_path: Path, *, is_adapter: bool) -> None:
    """In another engine, from the checkpoint alone: weights, moments and step count."""
    engine, other = tiny_engine(), tiny_engine()
    settings = lora() if is_adapter else None
    engine.create("a", settings)
    train(engine, "a", range(3))
    engine.save("a", tmp_path, optimizer=True)
    assert other.create_from("b", tmp_path, optimizer=True) == settings
    for each, name in ((engine, "a"), (other, "b")):
        train(each, name, range(3, 6))
    assert equal(weights(engine, "a"), weights(other, "b"))


def test_load_goes_back_and_drops_the_gradient(tmp_path: Path) -> None:
    engine = engine_with()
    train(engine, "a", range(2))
    engine.save("a", tmp_path, optimizer=True)
    saved = weights(engine)
    train(engine, "a", range(2, 4))
    forward = weights(engine)
    run_one(engine, some_data(engine))
    engine.load("a", tmp_path, optimizer=True)
    assert equal(weights(engine), saved)
    assert gradients(engine) == {}
    train(engine, "a", range(2, 4))
    assert equal(weights(engine), forward)


def test_without_its_optimiser_training_starts_anew(tmp_path: Path) -> None:
    engine = engine_with()
    train(engine, "a", range(2))
    engine.save("a", tmp_path, optimizer=True)
    engine.load("a", tmp_path, optimizer=False)
    other = tiny_engine()
    other.create("a", lora())
    other.load("a", tmp_path, optimizer=False)
    for each in (engine, other):
        train(each, "a", range(2, 4))
    assert equal(weights(engine), weights(other))


def test_saving_keeps_the_gradient(tmp_path: Path) -> None:
    engine = engine_with()
    run_one(engine, some_data(engine))
    before = gradients(engine)
    engine.save("a", tmp_path, optimizer=True)
    assert equal(gradients(engine), before)


def test_files_hold_tensors_and_json_alone(tmp_path: Path) -> None:
    engine = engine_with()
    train(engine, "a", range(1))
    engine.save("a", tmp_path, optimizer=True)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors", "engine.json"}
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4


@pytest.mark.parametrize("changed", [{"rank": 8}, {"train_mlp": False}, {"train_unembed": False}])
def test_a_checkpoint_of_another_rank_or_other_targets_is_refused(tmp_path: Path, changed: dict) -> None:
    engine = engine_with()
    train(engine, "a", range(1))
    engine.save("a", tmp_path, optimizer=True)
    engine.create("b", lora(**changed))
    before = weights(engine, "b")
    for optimizer in (True, False):
        with pytest.raises(RequestError, match=r"rank|targets"):
            engine.load("b", tmp_path, optimizer=optimizer)
    assert equal(weights(engine, "b"), before)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "optimizer.safetensors", "engine.json"])
@pytest.mark.parametrize("content", [None, b"", b"{}", b"\x80\x04K\x01."])
def test_damaged_checkpoints_are_refused_and_change_nothing(tmp_path: Path, name: str, content: bytes | None) -> None:
    engine = engine_with()
    train(engine, "a", range(1))
    engine.save("a", tmp_path, optimizer=True)
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_bytes(content)
    run_one(engine, some_data(engine)[:1])
    before, gradient = weights(engine), gradients(engine)
    with pytest.raises(RequestError, match="checkpoint"):
        engine.load("a", tmp_path, optimizer=True)
    assert equal(weights(engine), before)
    assert equal(gradients(engine), gradient)
    with pytest.raises(RequestError, match="checkpoint"):
        engine.create_from("b", tmp_path, optimizer=True)
    assert engine.models() == ("a",)


def test_an_adapter_and_a_whole_model_are_not_exchanged(tmp_path: Path) -> None:
    engine = engine_with()
    engine.save("a", tmp_path, optimizer=False)
    engine.create("full", None)
    with pytest.raises(RequestError, match="one of the checkpoint and the model is an adapter"):
        engine.load("full", tmp_path, optimizer=False)


# ---------------------------------------------------------------------- memory


def tensor_bytes(engine: Engine, name: str) -> int:
    """Every tensor that a client's model holds beside the base model."""
    client = engine.client(name)
    state = [t for moments in client.optimizer_state().values() for t in moments.values()]
    return sum(
        t.numel() * t.element_size() for t in (*client.parameters, *(client.gradients or ()), *state) if t is not None
    )


def test_a_further_adapter_takes_three_times_its_parameters() -> None:
    """Weights and two moments; a gradient while it accumulates, and no longer."""
    engine = engine_with()
    size = sum(p.numel() * 4 for p in engine.client("a").parameters)
    steps = 4 * len(engine.client("a").parameters)  # a step count each
    assert tensor_bytes(engine, "a") == size
    run_one(engine, some_data(engine))
    assert tensor_bytes(engine, "a") == 2 * size
    engine.optim_step("a", ADAM)
    assert tensor_bytes(engine, "a") == 3 * size + steps
    assert all(p.grad is None for p in engine.client("a").parameters)
