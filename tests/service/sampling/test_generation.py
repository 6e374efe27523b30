"""Decoding with a cache, against the unmodified model: `generate` alone, and one full forward pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sampled import (
    model_of,
    plain_distribution,
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
from step_service import (
    FAMILY_NAMES,
    TILED,
    gradients,
    largest_difference,
    plain_model,
    processor_for,
    served,
    some_data,
    tiny_engine,
)
from step_service import plain_logprobs as logprobs_of_datum
from step_service import run_one as train_on
from transformers import DynamicCache, StaticCache

from vlmpack.errors import FamilyError
from vlmpack.families import family_named
from vlmpack.service.engine.datums import placeholders_of
from vlmpack.service.engine.engine import Engine
from vlmpack.service.sampling import caches
from vlmpack.service.sampling.generation import Ending, Growing, Job, Reader
from vlmpack.service.wire.messages import LoraConfig, SampleResult, SparseMatrix

DENSE = [name for name in FAMILY_NAMES if not family_named(name).has("experts") and name != "gemma4_text"]
"""Families without experts."""
FAMILIES = served("qwen3_vl", "qwen3_5", "qwen4_exp")


@pytest.fixture(name="engine")
def _engine() -> Engine:
    return tiny_engine()


@pytest.mark.parametrize("family", served("qwen3_vl", "qwen3_5", "qwen4_exp", "gemma2"))  # the last with a window
def test_a_batch_of_prompts_gives_each_what_generate_gives_it_alone(family: str) -> None:
    """Prompts of different lengths and images, greedily; then the log-probabilities of a full forward pass."""
    engine, plain = tiny_engine(family), plain_model(family)
    prompts = prompts_of(engine, count=6)
    # Joins and leavings at every length: each has its own number of tokens.
    requests = {str(i): (prompt, sample(temperature=0.0, max_tokens=3 + 4 * i)) for i, prompt in enumerate(prompts)}
    results = run(sampler_of(engine, prefill_tokens=60, decode_steps=2), requests)
    placeholders = tuple(placeholders_of(engine.family, plain.config))
    for i, prompt in enumerate(prompts):
        (tokens,) = tokens_of(results[str(i)])
        assert tokens == plain_greedy(plain, prompt, count=3 + 4 * i, suppressed=placeholders)
        result = results[str(i)]
        assert isinstance(result, SampleResult)
        expected = plain_logprobs(plain, prompt, result.sequences[0])[prompt.length - 1 :]
        np.testing.assert_allclose(result.sequences[0].logprobs, expected, atol=2e-5)


@pytest.mark.parametrize("family", served("llava_next", "gemma3", among=TILED))
def test_images_of_every_family_are_trained_on_and_sampled_from_as_by_the_unmodified_model(family: str) -> None:
    engine, plain = tiny_engine(family), plain_model(family)
    engine.create("a", LoraConfig(rank=2, seed=1))
    data = some_data(engine)
    together = train_on(engine, data)
    batch = gradients(engine)
    engine.client("a").gradients = None
    for datum, logprobs in zip(data, together.logprobs, strict=True):
        np.testing.assert_allclose(logprobs, train_on(engine, [datum]).logprobs[0], atol=1e-5)
        np.testing.assert_allclose(logprobs, logprobs_of_datum(plain, engine, datum).detach(), atol=1e-5)
    assert largest_difference(batch, gradients(engine)) < 1e-5
    prompts = [engine.encode_chunks(datum.chunks) for datum in data]
    assert [prompt.patches > 0 for prompt in prompts] == [False, True, False, True, False]
    wanted = {str(i): (p, sample(max_tokens=3 + 2 * i, prompt_logprobs=True)) for i, p in enumerate(prompts)}
    results = run(sampler_of(engine), wanted)
    for i, prompt in enumerate(prompts):
        result = results[str(i)]
        assert isinstance(result, SampleResult) and result.scores is not None
        found = np.concatenate((result.scores.logprobs[1:], result.sequences[0].logprobs))
        np.testing.assert_allclose(found, plain_logprobs(plain, prompt, result.sequences[0]), atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_of_prompts_are_the_unmodified_models(family: str) -> None:
    engine, plain = tiny_engine(family), plain_model(family)
    prompts = prompts_of(engine, count=5)
    wanted = {str(i): (p, sample(max_tokens=1 + i % 2, prompt_logprobs=True, top=i)) for i, p in enumerate(prompts)}
    results = run(sampler_of(engine), wanted)
    for i, prompt in enumerate(prompts):
        result = results[str(i)]
        assert isinstance(result, SampleResult)
        assert result.scores is not None
        assert result.scores.logprobs.dtype == np.float32
        assert np.isnan(result.scores.logprobs[0])
        np.testing.assert_allclose(result.scores.logprobs[1:], plain_logprobs(plain, prompt), atol=2e-5)
        assert result.scores.top.ids.shape == result.scores.top.logprobs.shape == (prompt.length, i)
        likeliest = plain_distribution(plain, prompt).topk(max(i, 1))
        np.testing.assert_allclose(result.scores.top.logprobs[1:], likeliest.values[:, :i], atol=2e-5)
        assert np.isnan(result.scores.top.logprobs[0]).all()


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])  # transformers runs not every family in float64
def test_sampled_log_probabilities_are_the_recomputed_ones_and_differ_by_rounding_alone(family: str) -> None:
    """In float64 the results still are float32. In float32, a step of a log-probability of 8 is 1e-6 by itself."""
    engine = tiny_engine(family, model=plain_model(family).double())
    prompts = prompts_of(engine, count=5)
    results = run(sampler_of(engine), {str(i): (prompt, sample(max_tokens=20)) for i, prompt in enumerate(prompts)})
    for i, prompt in enumerate(prompts):
        (tokens,), result = tokens_of(results[str(i)]), results[str(i)]
        whole = replace(prompt, input_ids=np.array([*prompt.input_ids, *tokens]))
        again = run_one(sampler_of(engine), whole, sample(max_tokens=1, prompt_logprobs=True))
        assert isinstance(result, SampleResult) and again.scores is not None
        np.testing.assert_allclose(result.sequences[0].logprobs, again.scores.logprobs[-20:], rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_that_are_not_sampled_have_the_unmodified_models_log_probabilities(family: str) -> None:
    engine, plain = tiny_engine(family), plain_model(family)
    prompts, rng = prompts_of(engine, count=4), np.random.default_rng(5)
    wanted = {}
    for i, prompt in enumerate(prompts):
        keys = np.arange(2 * (prompt.length - 1))
        targets = SparseMatrix(keys=keys, values=rng.integers(-1, 500, len(keys)), shape=(prompt.length - 1, 2))
        wants = {"topk_sample_logprobs": 3, "target_prompt_logprobs": targets, "prompt_alt_tokens_k": i and 400 // i}
        wanted[str(i)] = (prompt, sample(max_tokens=4, wants=wants, temperature=0.5))
    together = run(sampler_of(engine), wanted)
    for i, prompt in enumerate(prompts):
        result, (_, request) = together[str(i)], wanted[str(i)]
        assert isinstance(result, SampleResult)
        (sequence,), scores, targets = result.sequences, result.scores, request.target_prompt_logprobs
        assert sequence.top is not None and scores is not None and scores.targets is not None and targets is not None
        whole = plain_distribution(plain, prompt, sequence.tokens.tolist())
        likeliest = whole[prompt.length - 1 :].topk(3)
        np.testing.assert_allclose(sequence.top.logprobs, likeliest.values, atol=2e-5)
        assert sequence.top.ids.tolist() == likeliest.indices.tolist()
        expected = np.where(targets.values < 0, 0, whole[targets.keys // 2, targets.values])
        np.testing.assert_allclose(scores.targets.values, expected, atol=2e-5)
        if not i:
            assert scores.drawn is None
            continue
        drawn = scores.drawn
        assert drawn is not None and drawn.ids.shape == (prompt.length - 1, 400 // i)
        of_drawn = whole[: prompt.length - 1].gather(1, torch.from_numpy(drawn.ids).long())
        np.testing.assert_allclose(drawn.logprobs, of_drawn, atol=2e-5)
        chances, first = (whole[0] / 0.5).softmax(0), int((whole[0]).argmax())
        spread = 5 * float(chances[first] * (1 - chances[first]) / drawn.ids.shape[1]) ** 0.5
        assert abs((drawn.ids[0] == first).mean() - float(chances[first])) < spread + 1e-3
        alone = run_one(sampler_of(engine), prompt, request)
        assert alone.scores is not None and alone.scores.drawn is not None
        assert alone.scores.drawn.ids.tolist() == drawn.ids.tolist()


# ---------------------------------------------------------------------- blocks that are checked together


@pytest.mark.parametrize("family", served("qwen3_vl", "qwen3_5", among=DENSE))
def test_canonical_logits_depend_on_no_later_token_bit_for_bit(family: str) -> None:
    """Rows of two sequences that part in the middle of a block, in float32 and in bfloat16."""
    for dtype in (torch.float32, torch.bfloat16):
        engine = tiny_engine(family, model=plain_model(family).to(dtype))
        reader = Reader(model_of(engine), rounding=0, block=8)
        for prompt in prompts_of(engine, count=4):
            logits = []
            for tokens in ([30, 31, 32, 33], [30, 31, 32, 400, 401, 402], [30, 31, 32]):
                grown = growing(prompt, tokens)
                row, start = reader.canonical_row(grown)
                with torch.no_grad():
                    logits.append(reader.canonical(row, before=prompt.length + start))
            assert {len(found) for found in logits} == {reader.block}
            known = 4  # logits before and after the three tokens that all have
            assert all(torch.equal(found[:known], logits[0][:known]) for found in logits), dtype
            assert not torch.equal(logits[0][known], logits[1][known])


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "gpt_oss", "gemma4_text"])
def test_experts_check_one_token_at_a_time(family: str) -> None:
    """The number of tokens of an expert is a shape of its products, and depends on later tokens of a row."""
    engine = tiny_engine(family)
    reader = Reader(model_of(engine), rounding=0, block=8)
    sequence = growing(prompt_of(engine, np.random.default_rng(0), length=5), [30, 31, 32, 33])
    row, start = reader.canonical_row(sequence)
    assert (reader.block, start) == (1, 3)
    assert row.input_ids.tolist() == [*sequence.job.prompt.input_ids.tolist(), 30, 31, 32]


def growing(prompt, tokens: list[int]) -> Growing:
    """A sequence of which these tokens are sampled."""
    job = Job(key="a", folder=None, prompt=prompt, request=sample(), ending=ending(max_tokens=99))
    sequence = Growing(job=job, seed=1)
    sequence.tokens = tokens
    return sequence


def test_a_prompt_of_one_token(engine: Engine) -> None:
    prompt = prompt_of(engine, np.random.default_rng(0), length=1)
    result = run_one(sampler_of(engine), prompt, sample(prompt_logprobs=True, temperature=0.0))
    assert result.scores is not None
    assert np.isnan(result.scores.logprobs).all()
    assert result.scores.logprobs.shape == (1,)
    assert tokens_of(result) == [
        plain_greedy(plain_model(), prompt, count=12, suppressed=Reader(model_of(engine), rounding=0).placeholders)
    ]


def test_placeholders_are_never_sampled(engine: Engine) -> None:
    """The head is turned so that they are the likeliest tokens by far."""
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


# ---------------------------------------------------------------------- endings


def ending(**settings) -> Ending:
    return Ending(**{"stop_tokens": frozenset(), "stop_strings": (), "max_tokens": 9, **settings})


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


def test_a_cache_that_sequences_cannot_leave_is_refused_by_name() -> None:
    config = plain_model().config
    caches.check_cache(DynamicCache(config=config))
    with pytest.raises(FamilyError, match="caches in StaticLayer"):
        caches.check_cache(StaticCache(config=config, max_cache_len=8))
    with pytest.raises(FamilyError, match="caches in NoneType"):
        caches.check_cache(None)
