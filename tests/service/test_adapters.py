"""Adapters: against PEFT on the unmodified model, one datum at a time; targets, seeds, files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from step_service import (
    ALL_ROUTED,
    FAMILY_NAMES,
    gradients,
    largest_difference,
    lora,
    plain_model,
    processor_for,
    random_datum,
    run_one,
    served,
    set_adapter,
    some_data,
    tiny_engine,
    weights,
)

from vlmpack.errors import RequestError
from vlmpack.service.engine import Engine
from vlmpack.service.messages import Datum, LoraConfig


def plain_logprobs(model: torch.nn.Module, engine: Engine, datum: Datum) -> torch.Tensor:
    """float32 [N] of one datum by the unmodified model, in the usual way."""
    sequence = engine.encode_chunks(datum.chunks)
    ids = torch.from_numpy(sequence.input_ids)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if engine.base.is_vision:
        token = processor_for(engine.base.arch).image_token_id
        inputs["mm_token_type_ids"] = (ids == token).long()
    if sequence.images:
        inputs["pixel_values"] = torch.cat([image.pixel_values for image in sequence.images])
        inputs["image_grid_thw"] = torch.tensor([image.grid for image in sequence.images])
    logits = model(**inputs, use_cache=False).logits[0].float()
    targets = torch.from_numpy(datum.inputs["target_tokens"])
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # of PEFT
@pytest.mark.parametrize("family", served("qwen2_5_vl", "qwen3_5", "llama"))
def test_a_batch_equals_peft_on_each_datum(family: str, tmp_path: Path) -> None:
    """Log-probabilities to 1e-5, the summed gradient of every adapter parameter to 1e-5 of its largest entry."""
    engine = tiny_engine(family)
    # PEFT takes the projections of shared experts for those of routed ones, and warns of heads that are tied
    trains_mlp = family not in (*ALL_ROUTED, "qwen3_next", "deepseek_v3", "glm4_moe")
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


def test_the_base_model_computes_what_it_did() -> None:
    engine = tiny_engine()
    engine.create("a", lora())
    set_adapter(engine)
    datum = some_data(engine)[1]
    with engine.open_weights(None).applied() as model:
        ours = plain_logprobs(model, engine, datum)
    torch.testing.assert_close(ours, plain_logprobs(plain_model(), engine, datum), atol=1e-5, rtol=0)


def test_a_snapshot_is_what_the_model_was(tmp_path: Path) -> None:
    """Whatever calls the model computes with it, in a padded batch or without packing at all."""
    engine = tiny_engine()
    engine.create("a", lora())
    set_adapter(engine)
    engine.save("a", tmp_path, optimizer=False)
    datum = random_datum(np.random.default_rng(0), engine, length=8)
    expected = run_one(engine, [datum], forward_only=True).logprobs[0]
    set_adapter(engine, seed=8)
    snapshot = engine.open_weights(tmp_path)
    ids = torch.from_numpy(engine.encode_chunks(datum.chunks).input_ids)[None]
    with snapshot.applied() as model, torch.no_grad():
        logits = model(input_ids=ids, use_cache=True).logits[0]
    targets = torch.from_numpy(datum.inputs["target_tokens"])
    logprobs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    np.testing.assert_allclose(logprobs.numpy(), expected, atol=1e-5)


def test_nothing_of_the_vision_tower_or_the_base_is_trained() -> None:
    engine = tiny_engine()
    engine.create("a", lora())
    assert not any("visual" in name for name in weights(engine))
    run_one(engine, some_data(engine))
    model = engine.client("a").model
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())


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


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_train_mlp_adapts_the_three_projections_of_each_layer(family: str) -> None:
    assert len(adapted(tiny_engine(family), train_mlp=True)) == 2 * 3


def test_train_mlp_adapts_fused_projections() -> None:
    names = adapted(tiny_engine("phi3"), train_mlp=True)
    assert {name.rsplit(".", 1)[1] for name in names} == {"gate_up_proj", "down_proj"}


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen4_exp", "qwen3_next"])
def test_train_mlp_adapts_shared_experts_where_there_are_routed_ones(family: str) -> None:
    names = adapted(tiny_engine(family), train_mlp=True)
    assert len(names) == 2 * 3
    assert all(".mlp.shared_expert." in name for name in names)


def test_train_mlp_is_refused_where_all_experts_are_fused() -> None:
    engine = tiny_engine("qwen3_vl_moe")
    with pytest.raises(RequestError, match=r"train_mlp: .*fused.*send train_mlp=False"):
        engine.create("a", LoraConfig(rank=4, seed=1))
    assert engine.models() == ()


def test_an_adapter_without_targets_is_refused() -> None:
    with pytest.raises(RequestError, match="would train nothing"):
        adapted(tiny_engine())


@pytest.mark.parametrize("rank", [0, 257])
def test_a_rank_that_cannot_be_is_refused(rank: int) -> None:
    with pytest.raises(RequestError, match=r"lora_config: rank is"):
        tiny_engine().create("a", lora(rank=rank))


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


def test_a_new_adapter_changes_nothing_yet() -> None:
    engine = tiny_engine()
    engine.create("a", lora())
    datum = random_datum(np.random.default_rng(0), engine, length=8)
    plain = plain_logprobs(plain_model(), engine, datum).detach().numpy()
    np.testing.assert_allclose(run_one(engine, [datum]).logprobs[0], plain, atol=1e-5)


def test_without_a_seed_adapters_differ() -> None:
    engine = tiny_engine()
    for name in "ab":
        engine.create(name, lora(seed=None))
    ours, others = weights(engine, "a"), weights(engine, "b")
    assert all(not torch.equal(ours[name], others[name]) for name in ours if "lora_A" in name)
