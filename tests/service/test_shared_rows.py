"""Rows shared by adapters: one pass of the base model, every datum through its own adapter, as if it had been alone."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
import pytest
import torch
from step_service import (
    ADAM,
    FAMILY_NAMES,
    gradients,
    largest_difference,
    lora,
    request,
    run_one,
    set_adapter,
    some_data,
    tiny_engine,
    weights,
)

from vlmpack.errors import ConfigError
from vlmpack.families import family_named
from vlmpack.layout import Segments
from vlmpack.model.mechanisms.recurrent_rows import Buckets, Spaced
from vlmpack.service import row_work, rows
from vlmpack.service.adapters import Adapter, Span
from vlmpack.service.engine import Engine
from vlmpack.service.messages import Datum, Failure, ForwardBackwardResult
from vlmpack.service.shared_rows import part_spans

ADAPTERS = {
    "a": {"rank": 3},
    "b": {"rank": 5, "train_mlp": False, "train_unembed": False},
    "c": {"rank": 2, "train_attn": False, "train_mlp": False},
    "d": {"rank": 16, "train_unembed": False},
}
"""Of other ranks and targets; one is on the head alone, two leave it out."""


def shared_engine(family: str = "qwen3_vl", *, share_rows: bool = True, **settings: object) -> Engine:
    engine = tiny_engine(family, share_rows=share_rows, **settings)
    for at, (name, of_adapter) in enumerate(ADAPTERS.items()):
        kept = {**of_adapter, "train_mlp": of_adapter.get("train_mlp", True) and family != "qwen3_vl_moe"}
        engine.create(name, lora(family, seed=at, **kept))
        set_adapter(engine, name, seed=at)
    return engine


def data_of(engine: Engine, name: str, *, inputs: Sequence[str] = ("weights",)) -> list[Datum]:
    return some_data(engine, seed=ord(name), inputs=inputs)


def run_together(engine: Engine, **fields: object) -> tuple[dict[str, ForwardBackwardResult | Failure], list[int]]:
    """A work of each model, whose rows take turns; results by model, and the number of models in each row."""
    works = {}
    for name in ADAPTERS:
        data = data_of(engine, name, inputs=fields.get("inputs", ("weights",)))
        of_request = {key: value for key, value in fields.items() if key != "inputs"}
        works[name] = engine.forward_backward([engine.encode(request(data, model_id=name, **of_request))])
    with patch.object(row_work, "compute_row", wraps=rows.compute_row) as computed:
        while any(work.rows_left for work in works.values()):
            for work in works.values():
                if work.rows_left:
                    work.run_row()
    models = [len({id(item.client) for item in call.args[0]}) for call in computed.call_args_list]
    return {name: work.results()[0] for name, work in works.items()}, models


def alone(
    name: str, family: str = "qwen3_vl", **fields: object
) -> tuple[ForwardBackwardResult, dict[str, torch.Tensor]]:
    """Of an engine that shares no rows."""
    engine = shared_engine(family, share_rows=False)
    inputs = fields.pop("inputs", ("weights",))
    result = run_one(engine, data_of(engine, name, inputs=inputs), model_id=name, **fields)
    return result, gradients(engine, name)


FAMILIES = tuple(name for name in FAMILY_NAMES if name != "qwen4_exp")
GRADIENT = 1e-5
DELTA_GRADIENT = 5e-5
"""Of gated delta layers, whose batches of samples are others in a row that adapters share."""


@pytest.mark.each_value
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_each_adapter_gets_what_it_gets_alone(family: str, *, gradient_checkpointing: bool) -> None:
    """All models' datums go through the base model in one row."""
    engine = shared_engine(family, gradient_checkpointing=gradient_checkpointing)
    results, models = run_together(engine)
    assert models == [len(ADAPTERS)]
    for name, ours in results.items():
        theirs, gradient = alone(name, family)
        assert isinstance(ours, ForwardBackwardResult)
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
        assert ours.metrics["loss:sum"] == pytest.approx(theirs.metrics["loss:sum"], rel=1e-5)
        has_delta = family_named(family).has("gated_delta")
        assert largest_difference(gradients(engine, name), gradient) < (DELTA_GRADIENT if has_delta else GRADIENT)


def test_each_adapter_of_short_convolutions_gets_what_it_gets_alone() -> None:
    engine = shared_engine("lfm2")
    assert any(".conv.in_proj" in name for name in engine.adapters.targets.attention)
    assert any(".feed_forward.w2" in name for name in engine.adapters.targets.mlp)
    test_each_adapter_gets_what_it_gets_alone("lfm2", gradient_checkpointing=False)


def test_a_family_that_computes_samples_one_by_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="share_rows: qwen4_exp"):
        tiny_engine("qwen4_exp", share_rows=True)


@pytest.mark.parametrize("seed", range(3))
def test_spans_of_parts_are_those_of_the_layers_own_cut(seed: int) -> None:
    """Whether it cuts the row into batches of like length, or lays zeros between its samples."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 12, 9).tolist()
    segments = Segments.from_lengths(lengths)
    adapters = [
        Span(adapter=Adapter(lora(rank=1 + at), {}), length=sum(lengths[3 * at : 3 * at + 3])) for at in range(3)
    ]
    of_token = np.repeat(np.arange(3), [span.length for span in adapters])
    row = torch.arange(1, sum(lengths) + 1)[None, :, None]
    for cut in (Buckets.cheapest(segments, call_cost=50.0), Spaced(segments=segments, reach=3)):
        for part, spans in zip(cut.split(row), part_spans(cut, adapters), strict=True):
            ranks = [span.adapter.lora.rank - 1 for span in spans if span.adapter for _ in range(span.length)]
            tokens = part.flatten().tolist()
            assert len(ranks) == len(tokens)
            assert all(of_token[token - 1] == rank for token, rank in zip(tokens, ranks, strict=True) if token)


@pytest.mark.parametrize("limits", [{"row_tokens": 200}, {"row_patches": 160}])
def test_shared_rows_keep_both_budgets(limits: dict[str, int]) -> None:
    engine = shared_engine(limits=limits)
    results, models = run_together(engine)
    assert max(models) > 1
    assert len(models) > 1
    for name, ours in results.items():
        assert isinstance(ours, ForwardBackwardResult)
        assert largest_difference(gradients(engine, name), alone(name)[1]) < 1e-5


def test_rows_without_a_gradient_are_shared_among_themselves() -> None:
    engine = shared_engine()
    results, models = run_together(engine, forward_only=True)
    assert models == [len(ADAPTERS)]
    assert all(gradients(engine, name) == {} for name in ADAPTERS)
    ours = results["b"]
    assert isinstance(ours, ForwardBackwardResult)
    for a, b in zip(ours.logprobs, alone("b", forward_only=True)[0].logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_loss_that_is_not_finite_fails_its_request_and_no_other() -> None:
    inputs = ("weights", "logprobs", "advantages")
    engine = shared_engine()
    works = {}
    for name in ADAPTERS:
        data = data_of(engine, name, inputs=inputs)
        if name == "c":
            data[2].inputs["logprobs"][:] = -1000.0
        encoded = engine.encode(request(data, model_id=name, loss_fn="importance_sampling"))
        works[name] = engine.forward_backward([encoded])
    while any(work.rows_left for work in works.values()):
        next(work for work in works.values() if work.rows_left).run_row()
    failure = works["c"].results()[0]
    assert isinstance(failure, Failure)
    assert failure.message.startswith("datum 2: ")
    assert gradients(engine, "c") == {}
    for name in ("a", "b", "d"):
        expected = alone(name, inputs=inputs, loss_fn="importance_sampling")[1]
        assert largest_difference(gradients(engine, name), expected) < 1e-5


def test_an_error_in_a_shared_row_is_not_the_others() -> None:
    """Each model goes on by itself, from its first row."""
    engine = shared_engine(limits={"row_tokens": 200})
    backward, calls = torch.autograd.backward, []

    def failing(*args: object, **kwargs: object) -> None:
        calls.append(args)
        backward(*args, **kwargs)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("out of memory")

    with patch.object(torch.autograd, "backward", failing):
        results, _ = run_together(engine)
    assert len(calls) > 2
    for name, ours in results.items():
        assert isinstance(ours, ForwardBackwardResult)
        assert largest_difference(gradients(engine, name), alone(name)[1]) < 1e-5


def test_models_of_their_own_share_no_rows() -> None:
    engine = shared_engine()
    engine.create("full", None)
    encoded = [engine.encode(request(data_of(engine, "a"), model_id=name)) for name in ("a", "full")]
    first, second = (engine.forward_backward([one]) for one in encoded)
    first.run_row()
    assert second.rows_left == 1
    second.run_row()
    assert gradients(engine, "full")


def test_steps_of_adapters_that_share_rows_are_their_own() -> None:
    engine = shared_engine()
    run_together(engine)
    for name in ADAPTERS:
        engine.optim_step(name, ADAM)
    other = shared_engine(share_rows=False)
    for name in reversed(ADAPTERS):
        run_one(other, data_of(other, name), model_id=name)
        other.optim_step(name, ADAM)
        ours, theirs = weights(engine, name), weights(other, name)
        # where a gradient is rounding, AdamW divides it by itself
        close = [torch.isclose(ours[key], theirs[key], atol=1e-5).float().mean() for key in ours]
        assert min(close) > 0.98
