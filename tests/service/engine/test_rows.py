"""Rows: which datums share one, and what they begin with is computed once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import slow_cases
from step_service import (
    DISTINCT_NAMES,
    chunks_with_images,
    gradients,
    largest_difference,
    lora,
    plain_logprobs,
    plain_model,
    processor_for,
    run_one,
    served,
    set_adapter,
    text,
    tiny_engine,
)

from vlmpack.service.engine.datums import EncodedSequence
from vlmpack.service.engine.engine import Engine
from vlmpack.service.engine.rows import plan_rows
from vlmpack.service.wire.messages import Datum


def texts_of(*lengths: int) -> list[EncodedSequence]:
    """Texts that share nothing."""
    return [EncodedSequence(input_ids=np.arange(length) + 1000 * at) for at, length in enumerate(lengths)]


def sizes(rows: list[list[int]], lengths: tuple[int, ...]) -> list[int]:
    return sorted(sum(lengths[at] for at in row) for row in rows)


def test_rows_are_as_few_as_the_budget_allows_and_of_like_size() -> None:
    lengths = (60, 60, 8, 7, 9, 8, 10)
    rows = plan_rows(texts_of(*lengths), tokens=130, patches=1)
    assert sorted(at for row in rows for at in row) == list(range(7))
    assert len(rows) == 2
    assert max(sizes(rows, lengths)) <= 90


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_has_rows(ranks: int) -> None:
    lengths = (20, 21, 22, 20, 21, 22)
    rows = plan_rows(texts_of(*lengths), tokens=200, patches=1, ranks=ranks)
    assert len(rows) == ranks
    assert max(sizes(rows, lengths)) <= 1.05 * sum(lengths) / ranks


def test_a_text_beyond_the_budget_has_a_row_of_its_own() -> None:
    assert plan_rows(texts_of(10, 50, 10), tokens=30, patches=1) in ([[0, 2], [1]], [[1], [0, 2]])


# ---------------------------------------------------------------------- prefixes


def sequences(*lengths: int, prefix: int) -> list[EncodedSequence]:
    """Texts that share their first tokens."""
    beginning = np.arange(prefix)
    return [
        EncodedSequence(input_ids=np.concatenate([beginning, np.arange(length - prefix) + 1000 * at]))
        for at, length in enumerate(lengths, 1)
    ]


def test_a_row_is_full_of_computed_tokens() -> None:
    texts = sequences(*[30] * 6, prefix=20)  # 20 + 6 * 10 computed tokens
    assert plan_rows(texts, tokens=80, patches=1, min_shared=8) == [[0, 1, 2, 3, 4, 5]]
    assert len(plan_rows(texts, tokens=80, patches=1)) == 3


def test_prefixes_lie_in_prefixes() -> None:
    """Two prompts behind one system prompt."""
    system, prompts = np.arange(30), (np.arange(40) + 100, np.arange(40) + 200)
    texts = [
        EncodedSequence(input_ids=np.concatenate([system, prompts[at % 2], np.arange(10) + 1000 * at]))
        for at in range(1, 5)
    ]
    assert len(plan_rows(texts, tokens=150, patches=1, min_shared=8)) == 1  # 30 + 2 * 40 + 4 * 10
    assert plan_rows(texts, tokens=149, patches=1, min_shared=8) == [[0, 2], [1, 3]]


def test_patches_of_a_shared_image_count_once() -> None:
    engine = tiny_engine()
    prompt = chunks_with_images(np.random.default_rng(0), processor_for("qwen3_vl"), length=20, images=[(64, 96)])
    texts = [engine.encode_chunks((*prompt, text(*answer))) for answer in ((31,), (32, 33), (34,))]
    patches = texts[0].patches
    assert len(plan_rows(texts, tokens=1000, patches=patches, min_shared=8, family=engine.family)) == 1
    assert len(plan_rows(texts, tokens=1000, patches=patches)) == 3


def test_a_group_larger_than_a_row_shares_its_prefix_in_pieces() -> None:
    texts = sequences(*[30] * 12, prefix=20)
    rows = [plan_rows(texts, tokens=60, patches=1, min_shared=8, has_pieces=has) for has in (True, False)]
    assert [len(each) for each in rows] == [1, 3]


MIN_SHARED = 8
PROMPT, ANSWERS = 20, ((31, 32, 33), (31, 32, 40, 41), (50,), (31, 32, 33), ())
"""Tokens of the prompt beside its image; the fourth answer is the first one again, the last datum the prompt alone."""


def rollouts(engine: Engine, *, seed: int = 0) -> list[Datum]:
    """One prompt, with an image where the family takes them, and several answers; and a datum of its own."""
    rng = np.random.default_rng(seed)
    images = [(64, 96)] if engine.base.is_vision else []
    processor = processor_for(engine.base.arch)
    prompt = chunks_with_images(rng, processor, length=PROMPT, images=images)
    other = chunks_with_images(rng, processor, length=9, images=[])
    data = []
    for chunks in (*((*prompt, text(*answer)) if answer else prompt for answer in ANSWERS), other):
        ids = engine.encode_chunks(chunks).input_ids
        targets = np.append(ids[1:], 7)  # as clients shift them
        if engine.base.is_vision:
            targets[targets == engine.model.config.image_token_id] = 0
        weights = rng.normal(size=len(ids)).astype(np.float32)
        data.append(Datum(chunks=chunks, inputs={"target_tokens": targets, "weights": weights}))
    return data


def engine_with(family: str = "qwen3_vl", **settings: Any) -> Engine:
    engine = tiny_engine(family, **settings)
    engine.create("a", lora(family))
    return engine


@pytest.mark.parametrize("family", served("qwen3_vl", "gemma3", among=(*DISTINCT_NAMES, "llava_next")))
def test_each_datum_is_that_of_transformers(family: str) -> None:
    """A new adapter adds nothing, so that the base model alone is the oracle."""
    engine, model = engine_with(family, min_shared=MIN_SHARED), plain_model(family)
    data = rollouts(engine)
    result = run_one(engine, data)
    for datum, logprobs in zip(data, result.logprobs, strict=True):
        with torch.no_grad():
            np.testing.assert_allclose(logprobs, plain_logprobs(model, engine, datum), atol=1e-5)
    assert engine.counts["trained_tokens_total"] == sum(len(logprobs) for logprobs in result.logprobs)
    assert engine.counts["computed_tokens_total"] < 0.5 * engine.counts["trained_tokens_total"]


@pytest.mark.parametrize("family", served("qwen3_vl", among=(*DISTINCT_NAMES, "gemma3")))
@pytest.mark.parametrize(("recomputes", "row_tokens"), [(False, 8192), (False, 24), *slow_cases((True, 24))])
def test_gradients_are_those_of_each_datum_alone(family: str, recomputes: bool, row_tokens: int) -> None:
    limits = {"row_tokens": row_tokens}
    engine = engine_with(family, min_shared=MIN_SHARED, gradient_checkpointing=recomputes, limits=limits)
    set_adapter(engine)
    data = rollouts(engine)
    run_one(engine, data)
    together = gradients(engine)
    assert engine.counts["computed_tokens_total"] < engine.counts["trained_tokens_total"]
    assert engine.counts["rows_total"] <= 2, "a group that is larger than a row goes in pieces"
    engine.client("a").gradients = None
    for datum in data:
        run_one(engine, [datum])
    assert largest_difference(together, gradients(engine)) < 1e-5


def test_targets_may_differ_where_tokens_are_shared() -> None:
    """Each datum has targets and weights of its own, on the prompt too."""
    engine = engine_with(min_shared=MIN_SHARED)
    set_adapter(engine)
    rng = np.random.default_rng(1)
    data = [
        replace(datum, inputs={**datum.inputs, "target_tokens": rng.integers(0, 500, len(datum.inputs["weights"]))})
        for datum in rollouts(engine)
    ]
    result = run_one(engine, data)
    together = gradients(engine)
    engine.client("a").gradients = None
    for datum, logprobs in zip(data, result.logprobs, strict=True):
        np.testing.assert_allclose(run_one(engine, [datum]).logprobs[0], logprobs, atol=1e-5)
    assert largest_difference(together, gradients(engine)) < 1e-5
