"""Decoding with a cache, against the unmodified model: `generate` alone, and one full forward pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampled import (
    finish,
    model_of,
    plain_greedy,
    plain_logprobs,
    prompt_of,
    prompts_of,
    run,
    run_one,
    sample,
    sampler_of,
    tokens_of,
)
from step_service import FAMILY_NAMES, TEXT_FAMILIES, plain_model, processor_for, tiny_engine
from tiers import tiers
from transformers import DynamicCache, StaticCache

from vlmpack.errors import FamilyError
from vlmpack.service import caches
from vlmpack.service.generation import Ending, Reader, groups_by_length
from vlmpack.service.messages import Failure, SampleResult

WINDOWED = ("mistral", "gemma2", "gemma3_text", "phi3", "olmo3", "cohere2", "gpt_oss")
"""Families that cache a window of tokens, of which sequences cannot leave one by one."""
FAMILIES = tiers([name for name in FAMILY_NAMES if name not in WINDOWED], ("qwen3_vl", "qwen3_5", "qwen4_exp"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_prompts_gives_each_what_generate_gives_it_alone(family: str) -> None:
    """Prompts of different lengths and images, greedily; then the log-probabilities of a full forward pass."""
    engine, plain = tiny_engine(family), plain_model(family)
    prompts = prompts_of(engine, count=6)
    # Joins and leavings at every length: each has its own number of tokens.
    requests = {str(i): (prompt, sample(temperature=0.0, max_tokens=3 + 4 * i)) for i, prompt in enumerate(prompts)}
    results = run(sampler_of(engine, prefill_tokens=60, decode_steps=2), requests)
    placeholders = () if family in TEXT_FAMILIES else (plain.config.image_token_id, plain.config.video_token_id)
    for i, prompt in enumerate(prompts):
        (tokens,) = tokens_of(results[str(i)])
        assert tokens == plain_greedy(plain, prompt, count=3 + 4 * i, suppressed=placeholders)
        result = results[str(i)]
        assert isinstance(result, SampleResult)
        expected = plain_logprobs(plain, prompt, result.sequences[0])[prompt.length - 1 :]
        np.testing.assert_allclose(result.sequences[0].logprobs, expected, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_of_prompts_are_the_unmodified_models(family: str) -> None:
    engine, plain = tiny_engine(family), plain_model(family)
    prompts = prompts_of(engine, count=5)
    wanted = {str(i): (p, sample(max_tokens=1 + i % 2, prompt_logprobs=True)) for i, p in enumerate(prompts)}
    results = run(sampler_of(engine), wanted)
    for i, prompt in enumerate(prompts):
        result = results[str(i)]
        assert isinstance(result, SampleResult)
        assert result.prompt_logprobs is not None
        assert result.prompt_logprobs.dtype == np.float32
        assert np.isnan(result.prompt_logprobs[0])
        np.testing.assert_allclose(result.prompt_logprobs[1:], plain_logprobs(plain, prompt), atol=2e-5)


@pytest.mark.parametrize("family", tiers(WINDOWED, ("gemma2",)))
def test_models_that_cache_a_window_are_refused_by_name(family: str) -> None:
    engine = tiny_engine(family)
    sampler, prompt = sampler_of(engine), prompts_of(engine, count=1)[0]
    failure = run(sampler, {"only": (prompt, sample(max_tokens=2))})["only"]
    assert isinstance(failure, Failure)
    assert "cannot leave one by one; sample from it with vLLM" in failure.message


def test_a_prompt_of_one_token() -> None:
    engine = tiny_engine()
    prompt = prompt_of(engine, np.random.default_rng(0), length=1)
    result = run_one(sampler_of(engine), prompt, sample(prompt_logprobs=True, temperature=0.0))
    assert result.prompt_logprobs is not None
    assert np.isnan(result.prompt_logprobs).all()
    assert result.prompt_logprobs.shape == (1,)
    assert tokens_of(result) == [
        plain_greedy(plain_model(), prompt, count=12, suppressed=Reader(model_of(engine), rounding=0).placeholders)
    ]


def test_placeholders_are_never_sampled() -> None:
    """The head is turned so that they are the likeliest tokens by far."""
    engine = tiny_engine()
    model = model_of(engine)
    ids = [model.config.image_token_id, model.config.video_token_id]
    prompts = prompts_of(engine, count=4)
    with torch.no_grad():
        model.lm_head.weight[ids] = model.lm_head.weight.mean(0) + 50
        model.lm_head.weight[ids[1]] *= -1  # one of the two is the largest, whatever the hidden state
    for temperature in (0.0, 1.0):
        for prompt in prompts:
            (tokens,) = tokens_of(run_one(sampler_of(engine), prompt, sample(temperature=temperature)))
            assert not set(tokens) & {*ids}


def test_prompts_of_like_length_are_prefilled_together() -> None:
    engine = tiny_engine()
    rng = np.random.default_rng(0)
    prompts = [prompt_of(engine, rng, length=n) for n in (40, 9, 10, 38, 10, 2)]
    assert groups_by_length(prompts) == [[0, 3], [2, 4, 1], [5]]


# ---------------------------------------------------------------------- endings


def ending(**settings) -> Ending:
    return Ending(**{"stop_tokens": frozenset(), "stop_strings": (), "max_tokens": 9, **settings})


def test_a_sequence_ends_at_a_stop_token_or_after_the_most_tokens() -> None:
    assert ending(stop_tokens=frozenset({7})).reason([1, 2]) is None
    assert ending(stop_tokens=frozenset({7})).reason([1, 7]) == "stop"
    assert ending(max_tokens=2).reason([1, 7]) == "length"
    assert ending(stop_tokens=frozenset({7}), max_tokens=2).reason([1, 7]) == "stop"


def test_a_sequence_ends_at_the_token_that_completes_a_stop_string() -> None:
    """In whatever pieces the tokenizer has it, after any text, also where a character takes several tokens."""
    tokenizer = processor_for("qwen3_vl").tokenizer
    for stop in ("total", "\n\n", "}", "né€", "<|im_end|>"):
        ids = tokenizer.encode(f"the price 15,000 of the menu: a {stop} b", add_special_tokens=False)
        found = ending(stop_strings=("no such text", stop), max_tokens=999, decode=tokenizer.decode)
        end = next(n for n in range(1, len(ids) + 1) if stop in tokenizer.decode(ids[:n]))
        assert 1 < end < len(ids)
        assert [found.reason(ids[:n]) for n in range(1, end + 1)] == [None] * (end - 1) + ["stop"]


# ---------------------------------------------------------------------- caches


def filled(length: int, *, family: str = "qwen3_5", seed: int = 0):
    engine = tiny_engine(family)
    reader = Reader(model_of(engine), rounding=0)
    rng = np.random.default_rng(seed)
    prompts = [prompt_of(engine, rng, length=length) for _ in range(2)]
    with torch.no_grad():
        return reader.prefill(prompts)[1]


def tensors(cache) -> list[torch.Tensor]:
    found = []
    for layer in cache.layers:
        for value in vars(layer).values():
            values = value.values() if isinstance(value, dict) else [value]
            found += [tensor.clone() for tensor in values if isinstance(tensor, torch.Tensor)]
    assert found
    return found


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "qwen4_exp"])
def test_sequences_that_join_and_leave_keep_their_cache(family: str) -> None:
    first, second = filled(5, family=family), filled(8, family=family, seed=1)
    before, joined = tensors(first), tensors(second)
    caches.pad_left(first, 3)
    caches.join(first, second)
    caches.select(first, torch.tensor([3, 0, 1]))
    caches.select(first, torch.tensor([1, 2]))
    caches.trim_left(first, 3)
    for tensor, expected in zip(tensors(first), before, strict=True):
        assert torch.equal(tensor, expected)
    assert all(torch.equal(a, b) for a, b in zip(tensors(second), joined, strict=True))


def test_a_cache_that_sequences_cannot_leave_is_refused_by_name() -> None:
    config = plain_model().config
    caches.check_cache(DynamicCache(config=config))
    with pytest.raises(FamilyError, match="caches in StaticLayer"):
        caches.check_cache(StaticCache(config=config, max_cache_len=8))
    with pytest.raises(FamilyError, match="caches in NoneType"):
        caches.check_cache(None)
    config.text_config.layer_types, config.text_config.sliding_window = ["sliding_attention"] * 2, 4
    with pytest.raises(FamilyError, match="DynamicSlidingWindowLayer"):
        caches.check_cache(DynamicCache(config=config))


def test_nothing_is_left_of_finished_sequences() -> None:
    sampler = sampler_of(tiny_engine())
    for i, prompt in enumerate(prompts_of(tiny_engine(), count=3)):
        sampler.add(str(i), "session", prompt, sample())
    assert len(finish(sampler)) == 3
    assert sampler.step() == []
    assert not sampler._lanes
    assert not sampler._jobs
