"""The engine: a batch equals its datums, gradients add up, failures leave nothing, models do not disturb each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from step_service import (
    ADAM,
    equal,
    gradients,
    largest_difference,
    lora,
    plain_model,
    request,
    run,
    run_one,
    set_adapter,
    some_data,
    tiny_engine,
    weights,
)

from vlmpack.errors import FamilyError, RequestError
from vlmpack.families.registry import FAMILIES
from vlmpack.model import PackedStep
from vlmpack.service.engine import rows
from vlmpack.service.engine.engine import Engine
from vlmpack.service.wire.messages import Datum, Failure, ForwardBackwardResult, SparseMatrix
from vlmpack.testing import tiny_model

RATED = ("weights", "logprobs", "advantages")
INPUTS = {"cross_entropy": ("weights",), "gspo": (*RATED, "sequence_ratio_mask")}


def engine_with(*names: str, family: str = "qwen3_vl", **settings: object) -> Engine:
    engine = tiny_engine(family, **settings)
    for at, name in enumerate(names or ("a",)):
        engine.create(name, lora(family, seed=at, rank=2 + at))
        set_adapter(engine, name, seed=at)
    return engine


@pytest.fixture(name="engine")
def _engine() -> Engine:
    return engine_with()


@pytest.fixture(name="data")
def _data(engine: Engine) -> list[Datum]:
    return some_data(engine)


# ---------------------------------------------------------------------- a batch and its datums


@pytest.mark.parametrize(
    ("family", "loss"),
    [
        *(("qwen3_vl", loss) for loss in ("importance_sampling", "ppo", "cispo", "dro", "gspo")),
        *((name, "cross_entropy") for name in ("qwen3_vl", "qwen3_5_moe")),
    ],
)
def test_a_batch_equals_single_calls(family: str, loss: str) -> None:
    engine = engine_with(family=family)
    data = some_data(engine, inputs=INPUTS.get(loss, RATED))
    config = {"clip_low_threshold": 0.2, "clip_high_threshold": 3.0} if loss == "gspo" else {}
    together = run_one(engine, data, loss_fn=loss, loss_config=config)
    batch = gradients(engine)
    engine.client("a").gradients = None
    alone = [run_one(engine, [datum], loss_fn=loss, loss_config=config) for datum in data]
    for ours, single in zip(together.logprobs, alone, strict=True):
        np.testing.assert_allclose(ours, single.logprobs[0], atol=1e-5)
    total = sum(single.metrics["loss:sum"] for single in alone)
    assert together.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    assert largest_difference(batch, gradients(engine)) < 1e-5


def test_every_token_has_a_logprob_whatever_its_weight(engine: Engine, data: list[Datum]) -> None:
    silent = [replace(datum, inputs={**datum.inputs, "weights": datum.inputs["weights"] * 0}) for datum in data]
    result, weighted = run_one(engine, silent), run_one(engine, data)
    for datum, ours, theirs in zip(data, result.logprobs, weighted.logprobs, strict=True):
        assert ours.dtype == np.float32
        assert ours.shape == datum.inputs["target_tokens"].shape
        assert np.array_equal(ours, theirs)
    assert result.metrics["loss:sum"] == 0


def test_soft_targets_are_the_sum_of_their_targets(engine: Engine, data: list[Datum]) -> None:
    """Of tokens with several targets, dense and sparse; some have no weight; all others give what each gives alone."""
    rng, soft, hard = np.random.default_rng(3), [], [data[0]]
    for number, datum in enumerate(data):
        shape = (len(datum.inputs["weights"]), 3)
        targets, weights = rng.integers(0, 400, shape), rng.normal(size=shape).astype(np.float32)
        weights[rng.random(shape) < 0.4] = 0
        targets[0] = 0
        inputs: dict[str, Any] = {"target_tokens": targets, "weights": weights}
        hard += [
            replace(datum, inputs={name: values[:, k] for name, values in inputs.items()}) for k in range(shape[1])
        ]
        soft.append(replace(datum, inputs=inputs if number % 2 else {n: sparse(v) for n, v in inputs.items()}))
    together = run_one(engine, [data[0], *soft])
    ours = gradients(engine)
    engine.client("a").gradients = None
    alone = run_one(engine, hard)
    assert largest_difference(ours, gradients(engine)) < 1e-5
    assert together.metrics["loss:sum"] == pytest.approx(alone.metrics["loss:sum"], rel=1e-5)
    for at, logprobs in enumerate(together.logprobs[1:]):
        weights = np.stack([each.inputs["weights"] for each in hard[1 + 3 * at :][:3]], 1)
        expected = np.stack(alone.logprobs[1 + 3 * at :][:3], 1) * (weights != 0)
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def sparse(matrix: np.ndarray) -> SparseMatrix:
    keys = np.flatnonzero(matrix)
    return SparseMatrix(keys=keys, values=matrix.reshape(-1)[keys], shape=matrix.shape)


# ---------------------------------------------------------------------- rows


def test_rows_keep_both_budgets_and_their_work_is_counted() -> None:
    engine = engine_with(limits={"row_tokens": 24, "row_patches": 40})
    data = some_data(engine)
    encoded = engine.encode(request(data))
    work = engine.forward_backward([encoded])
    seen = []
    with patch.object(rows, "compute_row", wraps=rows.compute_row) as computed:
        while work.rows_left:
            left = work.rows_left
            work.run_row()
            assert work.rows_left == left - 1
    for call in computed.call_args_list:
        sequences = [item.datum.sequence for item in call.args[0].items]
        assert len(sequences) == 1 or sum(s.length for s in sequences) <= 24
        assert len(sequences) == 1 or sum(s.patches for s in sequences) <= 40
        seen += sequences
    assert len(seen) == len(data)
    tokens = sum(datum.sequence.length for datum in encoded.data)
    patches = sum(datum.sequence.patches for datum in encoded.data)
    assert engine.counts["rows_total"] == computed.call_count
    assert (engine.counts["trained_tokens_total"], engine.counts["patches_total"]) == (tokens, patches)


def test_forward_only_adds_no_gradient_alone_or_beside_training_and_gives_the_same(
    engine: Engine, data: list[Datum]
) -> None:
    forward = run_one(engine, data, forward_only=True)
    assert gradients(engine) == {}
    run(engine, request(data[:2]), request(data[2:], forward_only=True))
    mixed = gradients(engine)
    engine.client("a").gradients = None
    run_one(engine, data[:2])
    assert equal(mixed, gradients(engine))
    full = run_one(engine, data)
    for ours, theirs in zip(forward.logprobs, full.logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert forward.metrics["loss:sum"] == pytest.approx(full.metrics["loss:sum"], rel=1e-6)


def test_routers_add_nothing_to_a_gradient() -> None:
    """Though the model's configuration asks for their load-balancing loss, which a batch would share."""
    model = plain_model("qwen3_5_moe")
    model.config.text_config.output_router_logits = True
    model.config.text_config.router_aux_loss_coef = 100.0
    engine, plain = engine_with(family="qwen3_5_moe", model=model), engine_with(family="qwen3_5_moe")
    for each in (engine, plain):
        run_one(each, some_data(each))
    assert equal(gradients(engine), gradients(plain))


# ---------------------------------------------------------------------- failures


def rated(engine: Engine, *, seed: int = 0) -> list[Datum]:
    return some_data(engine, seed=seed, inputs=RATED)


def with_overflow(data: Sequence[Datum], at: int) -> list[Datum]:
    """One datum whose importance ratio is infinite."""
    logprobs = np.full_like(data[at].inputs["logprobs"], -1000.0)
    bad = replace(data[at], inputs={**data[at].inputs, "logprobs": logprobs})
    return [*data[:at], bad, *data[at + 1 :]]


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo"])
@pytest.mark.parametrize("row_tokens", [8192, 24])
def test_a_loss_that_is_not_finite_fails_its_request_alone(loss: str, row_tokens: int) -> None:
    """Also where other requests share its row, and rows of it ran before."""
    engine = engine_with(limits={"row_tokens": row_tokens})
    good, bad = rated(engine), with_overflow(rated(engine, seed=1), 3)
    bad_result, good_result = run(engine, request(bad, loss_fn=loss), request(good, loss_fn=loss))
    if loss == "cispo":  # whose ratio is clipped and fixed
        assert isinstance(bad_result, ForwardBackwardResult)
        return
    assert isinstance(bad_result, Failure)
    assert bad_result.category == "user"
    assert bad_result.message.startswith("datum 3: its loss or gradient is not finite")
    assert isinstance(good_result, ForwardBackwardResult)
    left = gradients(engine)
    engine.client("a").gradients = None
    alone = run_one(engine, good, loss_fn=loss)
    assert equal(left, gradients(engine))
    assert good_result.metrics == alone.metrics


@pytest.mark.parametrize("failing_row", [0, 1])
def test_after_an_error_in_a_row_nothing_has_changed(failing_row: int) -> None:
    """A step of the model raises in the middle, as it does when memory runs out."""
    engine = engine_with(limits={"row_tokens": 24})
    data = some_data(engine)
    run_one(engine, data[:1])
    before = gradients(engine)
    work = engine.forward_backward([engine.encode(request(data))])
    for _ in range(failing_row):
        work.run_row()
    with patch.object(torch.autograd, "backward", side_effect=torch.OutOfMemoryError("out of memory")):
        with pytest.raises(torch.OutOfMemoryError):
            work.run_row()
        work.cancel()
    assert equal(gradients(engine), before)
    assert all(parameter.grad is None for parameter in engine.client("a").parameters)
    run_one(engine, data)


def test_there_are_no_more_models_than_the_limit() -> None:
    engine = engine_with("a", "b", limits={"models": 2})
    with pytest.raises(RequestError, match="there are 2 models"):
        engine.create("c", lora())
    engine.free("a")
    engine.create("c", lora())
    assert engine.models() == ("b", "c")


# ---------------------------------------------------------------------- several models


def test_models_interleaved_row_by_row_are_bit_for_bit_as_alone() -> None:
    """Two adapters of other ranks and one model of its own, whose rows and steps take turns."""
    names = ("a", "b", "full")

    def prepared() -> Engine:
        engine = engine_with("a", "b", limits={"row_tokens": 24})
        engine.create("full", None)
        return engine

    together = prepared()
    for step in range(3):
        works = {
            name: together.forward_backward(
                [together.encode(request(some_data(together, seed=10 * at + step), model_id=name))]
            )
            for at, name in enumerate(names)
        }
        while any(work.rows_left for work in works.values()):
            for work in works.values():
                if work.rows_left:
                    work.run_row()
        for name in reversed(names):
            together.optim_step(name, ADAM)
    for at, name in enumerate(names):
        alone = prepared()
        for step in range(3):
            run_one(alone, some_data(alone, seed=10 * at + step), model_id=name)
            alone.optim_step(name, ADAM)
        assert equal(weights(together, name), weights(alone, name))


# ---------------------------------------------------------------------- all weights


def test_all_weights_are_trained_on_a_copy_as_the_plain_model_would_be(engine: Engine) -> None:
    """Vision tower included; the base model and adapters over it stay as they were."""
    base = {name: p.clone() for name, p in engine.model.named_parameters()}
    engine.create("full", None)
    data = some_data(engine)
    run_one(engine, data, model_id="full")
    ours = gradients(engine, "full")
    plain = plain_model()
    loss = torch.zeros(())
    for datum in engine.encode(request(data)).data:
        row = rows.row_of([datum.sequence], engine.model)
        labeled = replace(row, shift_labels=torch.from_numpy(datum.targets)[None], metadata=None)
        logprobs = PackedStep(plain)(labeled).target_logprobs
        loss = loss - (torch.from_numpy(datum.inputs.arrays["weights"]) * logprobs).sum()
    loss.backward()
    theirs = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert any("visual" in name for name in ours)
    # the largest entries of some gradients are rounding: a bias before softmax has none
    scale = max(float(g.abs().max()) for g in theirs.values())
    assert all((ours[name] - theirs[name]).abs().max() < 1e-5 * scale for name in theirs)
    engine.optim_step("full", ADAM)
    assert equal({name: p.detach() for name, p in engine.model.named_parameters()}, base)
    assert any(not torch.equal(base[name], tensor) for name, tensor in weights(engine, "full").items())


def test_weights_that_are_tied_stay_tied(tmp_path: Path) -> None:
    model = plain_model()
    model.lm_head.weight = model.model.language_model.embed_tokens.weight
    engine = tiny_engine(model=model)
    engine.create("full", None)
    data = some_data(engine)
    run_one(engine, data, model_id="full")
    engine.optim_step("full", ADAM)
    engine.save("full", tmp_path, optimizer=True)
    engine.create_from("again", tmp_path, optimizer=True)
    first, second = (run_one(engine, data, model_id=name, forward_only=True) for name in ("full", "again"))
    assert all(np.array_equal(a, b) for a, b in zip(first.logprobs, second.logprobs, strict=True))
    copied: Any = engine.client("again").model
    assert copied.lm_head.weight is copied.model.language_model.embed_tokens.weight


def test_adapters_over_16_bit_weights_are_float32_and_a_batch_equals_its_datums() -> None:
    """To the rounding of the low-rank products, which are in float32."""
    engine = engine_with(model=plain_model(dtype=torch.bfloat16))
    assert {p.dtype for p in engine.client("a").parameters} == {torch.float32}
    data = some_data(engine)
    together = run_one(engine, data)
    batch = gradients(engine)
    engine.client("a").gradients = None
    for datum, ours in zip(data, together.logprobs, strict=True):
        np.testing.assert_allclose(ours, run_one(engine, [datum]).logprobs[0], atol=0.05)
    assert largest_difference(batch, gradients(engine)) < 0.05


def test_full_fine_tuning_can_be_switched_off() -> None:
    with pytest.raises(RequestError, match="trains LoRA adapters only"):
        engine_with(lora_only=True).create("full", None)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("paligemma", "paligemma: its prompts attend in both directions"),
        ("llama4_text", "llama4_text: it scales queries by places"),
    ],
)
def test_families_that_cannot_be_served_are_refused_by_name(family: str, message: str) -> None:
    if family == "llama4_text" and "llama4" not in FAMILIES:
        pytest.skip("vlmpack packs Llama 4 from transformers 5.23 on")
    with pytest.raises(FamilyError, match=message):
        Engine(tiny_model(family), None, name="m", tokenizer_id="t")
