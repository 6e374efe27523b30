"""Datums of a request that begin alike: their beginning is computed once, and every one gets what it gets alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import slow
from step_service import (
    chunks_with_images,
    gradients,
    largest_difference,
    lora,
    plain_model,
    processor_for,
    run_one,
    served,
    set_adapter,
    text,
    tiny_engine,
)

from vlmpack.service.engine import Engine
from vlmpack.service.messages import Datum

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


def plain_logprobs(engine: Engine, model: Any, datum: Datum) -> np.ndarray:
    """Of every target, by plain transformers, the datum alone."""
    sequence = engine.encode_chunks(datum.chunks)
    ids = torch.from_numpy(sequence.input_ids)[None]
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if sequence.images:
        inputs["pixel_values"] = torch.cat([image.pixel_values for image in sequence.images])
        inputs["image_grid_thw"] = torch.tensor([image.grid for image in sequence.images])
    if engine.base.is_vision:
        inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    with torch.no_grad():
        logprobs = model(**inputs).logits[0].double().log_softmax(-1)
    return logprobs[torch.arange(ids.shape[1]), torch.from_numpy(datum.inputs["target_tokens"])].numpy()


@pytest.mark.parametrize("family", served("qwen3_vl"))
def test_each_datum_is_that_of_transformers(family: str) -> None:
    """A new adapter adds nothing, so that the base model alone is the oracle."""
    engine, model = engine_with(family, min_shared=MIN_SHARED), plain_model(family)
    data = rollouts(engine)
    result = run_one(engine, data)
    for datum, logprobs in zip(data, result.logprobs, strict=True):
        np.testing.assert_allclose(logprobs, plain_logprobs(engine, model, datum), atol=1e-5)
    assert engine.counts.tokens == sum(len(logprobs) for logprobs in result.logprobs)
    assert engine.counts.computed < 0.5 * engine.counts.tokens


@pytest.mark.parametrize("family", served("qwen3_vl"))
@pytest.mark.parametrize("recomputes", [False, *slow(True)])
def test_gradients_are_those_of_each_datum_alone(family: str, recomputes: bool) -> None:
    engine = engine_with(family, min_shared=MIN_SHARED, gradient_checkpointing=recomputes)
    set_adapter(engine)
    data = rollouts(engine)
    run_one(engine, data)
    together = gradients(engine)
    assert engine.counts.computed < engine.counts.tokens
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


def test_the_same_request_gives_the_same_bits() -> None:
    first, second = (engine_with(min_shared=MIN_SHARED) for _ in range(2))
    second.create("b", lora(rank=2))
    run_one(second, rollouts(second, seed=5), model_id="b")
    found = []
    for engine in (first, second):
        run_one(engine, rollouts(engine))
        found.append(gradients(engine))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())


def test_it_can_be_switched_off() -> None:
    engine = engine_with(min_shared=None)
    run_one(engine, rollouts(engine))
    assert engine.counts.computed == engine.counts.tokens
