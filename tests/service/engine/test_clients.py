"""A client's model: AdamW as torch's, files, memory; adapters against PEFT on the unmodified model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from step_service import (
    ADAM,
    FAMILY_NAMES,
    equal,
    gradients,
    largest_difference,
    lora,
    plain_logprobs,
    plain_model,
    run_one,
    served,
    set_adapter,
    some_data,
    tiny_engine,
    weights,
)

from vlmpack.errors import RequestError
from vlmpack.service.engine.engine import Engine
from vlmpack.service.wire.messages import LoraConfig

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


@pytest.fixture(name="engine")
def _engine() -> Engine:
    return engine_with()


def test_steps_are_those_of_torch(engine: Engine) -> None:
    """With settings that change from step to step, and clipping by the norm of the whole gradient."""
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
        assert result["grad_norm:mean"] == pytest.approx(norm.item(), rel=1e-5)
        for name, tensor in weights(engine).items():
            torch.testing.assert_close(tensor, mirror[name].detach(), rtol=1e-6, atol=1e-7)


def test_a_step_clears_the_gradient_and_one_without_changes_nothing(engine: Engine) -> None:
    run_one(engine, some_data(engine))
    engine.optim_step("a", ADAM)
    assert gradients(engine) == {}
    before = weights(engine)
    assert engine.optim_step("a", ADAM) == {"grad_norm:mean": 0.0, "no_gradient:sum": 1.0}
    assert equal(weights(engine), before)


def test_a_gradient_that_is_not_finite_is_dropped(engine: Engine) -> None:
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


def test_load_goes_back_and_drops_the_gradient(tmp_path: Path, engine: Engine) -> None:
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


def test_without_its_optimizer_training_starts_anew(tmp_path: Path, engine: Engine) -> None:
    train(engine, "a", range(2))
    engine.save("a", tmp_path, optimizer=True)
    engine.load("a", tmp_path, optimizer=False)
    other = tiny_engine()
    other.create("a", lora())
    other.load("a", tmp_path, optimizer=False)
    for each in (engine, other):
        train(each, "a", range(2, 4))
    assert equal(weights(engine), weights(other))


def test_saving_keeps_the_gradient(tmp_path: Path, engine: Engine) -> None:
    run_one(engine, some_data(engine))
    before = gradients(engine)
    engine.save("a", tmp_path, optimizer=True)
    assert equal(gradients(engine), before)


@pytest.mark.parametrize("changed", [{"rank": 8}, {"train_mlp": False}, {"train_unembed": False}])
def test_a_checkpoint_of_another_rank_or_other_targets_is_refused(
    tmp_path: Path, changed: dict, engine: Engine
) -> None:
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
def test_damaged_checkpoints_are_refused_and_change_nothing(
    tmp_path: Path, name: str, content: bytes | None, engine: Engine
) -> None:
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


def test_an_adapter_and_a_whole_model_are_not_exchanged(tmp_path: Path, engine: Engine) -> None:
    engine.save("a", tmp_path, optimizer=False)
    engine.create("full", None)
    with pytest.raises(RequestError, match="one of the checkpoint and the model is an adapter"):
        engine.load("full", tmp_path, optimizer=False)


# ---------------------------------------------------------------------- memory


def tensor_bytes(engine: Engine, name: str) -> int:
    """Every tensor that a client's model holds beside the base model."""
    client = engine.client(name)
    state = [t for moments in client.optimizer.state.values() for t in moments.values()]
    return sum(
        t.numel() * t.element_size() for t in (*client.parameters, *(client.gradients or ()), *state) if t is not None
    )


def test_a_further_adapter_takes_three_times_its_parameters(engine: Engine) -> None:
    """Weights and two moments; a gradient while it accumulates, and no longer."""
    size = sum(p.numel() * 4 for p in engine.client("a").parameters)
    steps = 4 * len(engine.client("a").parameters)  # a step count each
    assert tensor_bytes(engine, "a") == size
    run_one(engine, some_data(engine))
    assert tensor_bytes(engine, "a") == 2 * size
    engine.optim_step("a", ADAM)
    assert tensor_bytes(engine, "a") == 3 * size + steps
    assert all(p.grad is None for p in engine.client("a").parameters)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # of PEFT
@pytest.mark.parametrize("family", served("qwen2_5_vl", "qwen3_vl_moe", "qwen3_5", "gpt_oss"))
def test_a_batch_equals_peft_on_each_datum(family: str, tmp_path: Path) -> None:
    """Log-probabilities to 1e-5, the summed gradient of every adapter parameter to 1e-5 of its largest entry."""
    engine = tiny_engine(family)
    # PEFT takes the projections of shared experts for those of routed ones, and warns of heads that are tied
    trains_mlp = family not in ("qwen3_next", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "glm4v_moe")
    is_tied = engine.family.head(engine.model).weight is engine.model.get_input_embeddings().weight
    engine.create("a", lora(family, train_mlp=trains_mlp, train_unembed=not is_tied))
    set_adapter(engine)
    engine.save("a", tmp_path, optimizer=False)
    data = some_data(engine)
    result = run_one(engine, data)

    peft = PeftModel.from_pretrained(plain_model(family), tmp_path, is_trainable=True).eval()
    loss = torch.zeros(())
    for datum, ours in zip(data, result.logprobs, strict=True):
        theirs = plain_logprobs(peft, engine, datum)
        np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=1e-5)
        loss = loss - (torch.from_numpy(datum.inputs["weights"]) * theirs).sum()
    loss.backward()
    named = {name.replace(".default", ""): p.grad for name, p in peft.named_parameters() if p.grad is not None}
    assert largest_difference(gradients(engine), named) < 1e-5
    assert result.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5)


# ---------------------------------------------------------------------- targets

LAYERS = {"gated": ("linear_attn.in_proj", "linear_attn.out_proj"), "attention": ("self_attn.q_proj",)}


def adapted(engine: Engine, **settings: bool) -> set[str]:
    """The last two parts of the names of what an adapter adapts."""
    off = {"train_attn": False, "train_mlp": False, "train_unembed": False}
    engine.create("t", LoraConfig(rank=2, seed=0, **{**off, **settings}))
    return {name.split(".lora_")[0].removeprefix("base_model.model.") for name in weights(engine, "t")}


@pytest.mark.parametrize("family", [name for name in FAMILY_NAMES if name.startswith("qwen")])
def test_targets_are_linear_layers_of_the_text_part(family: str) -> None:
    engine = tiny_engine(family)
    attention = adapted(engine, train_attn=True)
    layers = {name.rsplit(".", 1)[0] for name in attention}
    assert len(layers) == 2  # each layer has attention, or a gated delta layer
    assert all(".self_attn." in name or ".linear_attn." in name for name in attention)
    for layer in layers:
        kind = "gated" if layer.endswith("linear_attn") else "attention"
        assert all(any(f"{part}" in name for name in attention) for part in LAYERS[kind])
    assert adapted(engine, train_unembed=True) == {"lm_head"}


MLP = ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("family", "layer", "parts"),
    [
        *((name, ".mlp.", MLP) for name in ("qwen3_vl", "qwen3_5")),
        ("phi3", ".mlp.", ("gate_up_proj", "down_proj")),
    ],
)
def test_train_mlp_adapts_the_projections_of_each_layer(family: str, layer: str, parts: tuple[str, ...]) -> None:
    names = adapted(tiny_engine(family), train_mlp=True)
    assert len(names) == 2 * len(parts)
    assert all(layer in name for name in names)
    assert {name.rsplit(".", 1)[1] for name in names} == {*parts}


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_vl_moe"])
def test_train_mlp_adapts_shared_experts_and_routed_ones_with_the_rank_of_each_active_expert(family: str) -> None:
    engine = tiny_engine(family)
    engine.create("t", LoraConfig(rank=6, seed=0, train_attn=False, train_unembed=False))
    text = engine.model.config.text_config
    sizes: dict[str, list[int]] = {}
    for name, weight in weights(engine, "t").items():
        if name.endswith("lora_A.weight"):
            sizes.setdefault("shared" if ".shared_expert." in name else "routed", []).append(len(weight))
    assert sizes.get("shared", []) == [6] * (2 * 3 if family == "qwen3_5_moe" else 0)
    assert sizes["routed"] == [6 // text.num_experts_per_tok * text.num_experts] * 2 * 2


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("qwen3_vl", {"rank": 0}, "lora_config: rank is"),
        ("qwen3_vl", {"rank": 257}, "lora_config: rank is"),
        ("qwen3_vl", {"train_attn": False, "train_mlp": False, "train_unembed": False}, "would train nothing"),
    ],
)
def test_an_adapter_that_cannot_be_is_refused(family: str, settings: dict, message: str) -> None:
    engine = tiny_engine(family)
    with pytest.raises(RequestError, match=message):
        engine.create("a", lora(family, **settings))
    assert engine.models() == ()


# ---------------------------------------------------------------------- seeds


def test_the_same_seed_gives_the_same_adapter_whatever_else_exists() -> None:
    first, second = tiny_engine(), tiny_engine()
    first.create("a", lora(seed=5))
    second.create("other", lora(seed=9))
    torch.manual_seed(123)
    before = torch.get_rng_state()
    second.create("a", lora(seed=5))
    assert torch.equal(torch.get_rng_state(), before)
    second.create("c", lora(seed=6))
    ours, theirs, others = weights(first), weights(second), weights(second, "c")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert any(not torch.equal(ours[name], others[name]) for name in ours)
    for name in "de":
        second.create(name, lora(seed=None))
    assert not equal(weights(second, "d"), weights(second, "e"))
