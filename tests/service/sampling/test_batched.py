"""The built-in sampling engine: the same tokens whatever else runs, bounded slices, snapshots, failures alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sampled import finish, model_of, prompt_of, prompts_of, run, run_one, sample, sampler_of, tokens_of
from step_service import (
    ADAM,
    FAMILY_NAMES,
    equal,
    lora,
    plain_model,
    served,
    set_adapter,
    some_data,
    tiny_engine,
    weights,
)
from step_service import run_one as train

from vlmpack.service.engine.datums import EncodedSequence
from vlmpack.service.engine.engine import Engine
from vlmpack.service.sampling import batched
from vlmpack.service.sampling.generation import Reader
from vlmpack.service.wire.messages import Failure, Sample, SampleResult

Requests = dict[str, tuple[EncodedSequence, Sample]]

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.8, "num_samples": 3},
)


def requests_of(engine: Engine, *, count: int = 16) -> Requests:
    """Requests of every kind: lengths, images, settings, numbers of samples."""
    prompts = prompts_of(engine, count=count)
    return {
        f"request {i}": (p, sample(seed=100 * i, max_tokens=4 + i % 7 * 3, prompt_logprobs=i % 4 == 0, **KINDS[i % 5]))
        for i, p in enumerate(prompts)
    }


def all_tokens(results: dict[str, SampleResult | Failure]) -> dict[str, list[list[int]]]:
    return {key: tokens_of(result) for key, result in sorted(results.items())}


ALIKE = ("qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_next", "qwen3_5_moe")
CACHES = served("qwen3_vl", "qwen3_5", among=[name for name in FAMILY_NAMES if name not in ALIKE])
"""Families that differ in what they cache; `ALIKE` cache as these do."""
KINDS_OF_CACHE = served("qwen3_vl", "qwen3_5", among=["gemma3_text", "gpt_oss", "deepseek_v3", "lfm2", "qwen4_exp"])
"""One of each kind: keys and values, with windows, sinks, latent ones, taps of convolutions, chosen blocks, states."""


@pytest.fixture
def base() -> Engine:
    """An engine without models."""
    return tiny_engine()


# ---------------------------------------------------------------------- the same tokens whatever else runs


@pytest.mark.parametrize("family", CACHES)
def test_a_request_has_the_same_tokens_alone_among_others_and_in_another_order(family: str) -> None:
    engine = tiny_engine(family)
    requests = requests_of(engine, count=10)
    together = all_tokens(run(sampler_of(engine), requests))
    backwards = dict(reversed(requests.items()))
    assert all_tokens(run(sampler_of(engine, decode_steps=1, prefill_tokens=50), backwards)) == together
    assert all_tokens(run(sampler_of(engine, max_sequences=3), requests)) == together
    for key, request in list(requests.items())[1:4]:
        assert all_tokens(run(sampler_of(engine), {key: request})) == {key: together[key]}


def noisy(monkeypatch: pytest.MonkeyPatch, *, size: float) -> None:
    """Let logits of batches be off by up to `size` of the largest one's, and differently in each call."""
    generator = torch.Generator().manual_seed(5)

    def shaken(logits_BV: torch.Tensor) -> torch.Tensor:
        errors = torch.rand(logits_BV.shape, generator=generator) * 2 - 1
        return logits_BV + errors * size * 0.99 * logits_BV.abs().amax(1, keepdim=True)

    prefill, decode, score = Reader.prefill, Reader.decode, Reader.score

    def noisy_prefill(self: Reader, prompts: Any) -> Any:
        logits, cache = prefill(self, prompts)
        return shaken(logits), cache

    def noisy_score(self: Reader, prompts: Any, tops: Any) -> Any:
        logprobs, logits = score(self, prompts, tops)
        return logprobs, shaken(logits)

    monkeypatch.setattr(Reader, "prefill", noisy_prefill)
    monkeypatch.setattr(Reader, "decode", lambda self, *args: shaken(decode(self, *args)))
    monkeypatch.setattr(Reader, "score", noisy_score)


@pytest.mark.parametrize("family", KINDS_OF_CACHE)
def test_rounding_a_thousand_times_as_large_changes_no_token(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(family)
    requests = requests_of(engine, count=5)
    canonical = all_tokens(run(sampler_of(engine, rounding=float("inf")), requests))
    assert all_tokens(run(sampler_of(engine), requests)) == canonical
    noisy(monkeypatch, size=2.0**-7)
    sampler = sampler_of(engine, rounding=2.0**-7, decode_steps=5)
    assert all_tokens(run(sampler, requests)) == canonical
    assert sampler.canonical_tokens > 0


def test_a_canonical_row_checks_a_block_and_what_differs_begins_again_there(
    monkeypatch: pytest.MonkeyPatch, base: Engine
) -> None:
    """With noise many choices are wrong: the tokens are those of a sampler that takes each one canonically."""
    requests = requests_of(base, count=6)
    expected = all_tokens(run(sampler_of(base, rounding=float("inf"), check_tokens=8), requests))
    noisy(monkeypatch, size=2.0**-5)
    sampler = sampler_of(base, rounding=2.0**-5, check_tokens=8, prefill_tokens=60)
    assert all_tokens(run(sampler, requests)) == expected
    kept = sum(len(tokens) for sequences in expected.values() for tokens in sequences)
    assert sampler.sampled_tokens > kept, "no token was discarded"


def test_the_noise_of_these_tests_does_change_tokens(monkeypatch: pytest.MonkeyPatch, base: Engine) -> None:
    requests = requests_of(base, count=8)
    canonical = all_tokens(run(sampler_of(base), requests))
    noisy(monkeypatch, size=2.0**-7)
    assert all_tokens(run(sampler_of(base, rounding=0.0), requests)) != canonical


def test_products_in_low_precision_have_a_larger_rounding() -> None:
    settings, model = batched.SamplingSettings(), plain_model()
    assert settings.rounding_of(model) == 2.0**-13
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert settings.rounding_of(model) == 2.0**-7
    finally:
        torch.set_float32_matmul_precision(before)
    assert settings.rounding_of(model.half()) == 2.0**-8
    assert settings.rounding_of(model.bfloat16()) == 2.0**-5
    assert batched.SamplingSettings(rounding=0.5).rounding_of(model) == 0.5


def test_rounding_of_this_machine_is_far_within_the_default() -> None:
    """Logits of batches against the canonical ones, in float32 and in bfloat16."""
    for dtype, least in ((torch.float32, 8.0), (torch.bfloat16, 1.5)):
        engine = tiny_engine(model=plain_model().to(dtype))
        seen: list[float] = []
        default = batched.SamplingSettings().rounding_of(model_of(engine))
        reader = Reader(model_of(engine), rounding=default)
        with torch.no_grad():
            prompts = prompts_of(engine, count=12)
            together = reader.prefill(prompts)[0].float()
            for prompt, logits in zip(prompts, together, strict=True):
                alone = reader.score([prompt], [sample()])[1][0].float()
                seen.append(float((alone - logits).abs().max() / logits.abs().max()))
        assert max(seen) * least < default, (dtype, max(seen))


# ---------------------------------------------------------------------- samples of a request


def test_sample_i_is_that_of_seed_plus_i_and_they_share_the_prompts_computation(
    monkeypatch: pytest.MonkeyPatch, base: Engine
) -> None:
    prompt = prompts_of(base, count=2)[1]
    calls = prefilled_prompts(monkeypatch)
    together = tokens_of(run_one(sampler_of(base), prompt, sample(num_samples=5, seed=40)))
    assert calls == [1]
    alone = [tokens_of(run_one(sampler_of(base), prompt, sample(seed=40 + i)))[0] for i in range(5)]
    assert together == alone
    assert len({tuple(tokens) for tokens in together}) == 5


@pytest.mark.parametrize("family", KINDS_OF_CACHE)
def test_requests_of_one_prompt_share_its_computation_also_later_ones(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal prompts as every request brings them, objects of their own; tokens are those of samplers of their own."""
    engine = tiny_engine(family)
    rng = np.random.default_rng(0)
    first, second = (prompt_of(engine, rng, length=n, images=((4, 6),)) for n in (30, 33))  # one is padded
    requests = {
        f"{i} {name}": (prompt, sample(seed=7 * i)) for i in range(3) for name, prompt in (("a", first), ("b", second))
    }
    expected = {key: all_tokens(run(sampler_of(engine), {key: one}))[key] for key, one in requests.items()}
    calls = prefilled_prompts(monkeypatch)
    sampler = sampler_of(engine, decode_steps=3)
    copies = {key: (replace(prompt), request) for key, (prompt, request) in requests.items()}
    now = {key: copies[key] for key in list(copies)[:4]}
    found = {
        **all_tokens(run(sampler, now)),
        **all_tokens(run(sampler, {k: v for k, v in copies.items() if k not in now})),
    }
    assert found == expected
    assert sum(calls) == 2


def prefilled_prompts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of prompts of each prefill from here on."""
    calls: list[int] = []
    unchanged = Reader.prefill

    def counting(self: Reader, prompts: Sequence[EncodedSequence]) -> Any:
        calls.append(len(prompts))
        return unchanged(self, prompts)

    monkeypatch.setattr(Reader, "prefill", counting)
    return calls


def test_prompts_are_kept_as_long_as_there_is_room_and_their_weights_are_open(
    monkeypatch: pytest.MonkeyPatch, base: Engine
) -> None:
    prompts = [prompt_of(base, np.random.default_rng(i), length=10) for i in range(3)]
    sampler, calls = sampler_of(base, prompt_tokens=25), prefilled_prompts(monkeypatch)
    for number in (0, 1, 0, 2, 0, 1):  # the third goes in where the second was
        run_one(sampler, prompts[number], sample(max_tokens=2))
    assert len(calls) == 4
    sampler.close(None)
    run_one(sampler, prompts[1], sample(max_tokens=2))
    assert len(calls) == 5


def test_prompts_that_differ_in_a_token_or_a_pixel_are_others(base: Engine) -> None:
    prompt = prompt_of(base, np.random.default_rng(0), length=10, images=((4, 6),))
    (image,) = prompt.images
    pixels = image.values[0].clone()
    pixels[3, 3] += 1
    ids = prompt.input_ids.copy()
    ids[2] += 1
    others = (
        replace(prompt, images=(replace(image, pixels=pixels),)),
        replace(prompt, images=(replace(image, grid=(1, 6, 4)),)),
        replace(prompt, images=()),
        replace(prompt, input_ids=ids),
    )
    assert replace(prompt).digest == prompt.digest
    assert len({prompt.digest, *(other.digest for other in others)}) == 5


# ---------------------------------------------------------------------- endings


@pytest.mark.parametrize("stop", [None, ("never this",), (10**6,), "a token", ()], ids=str)
def test_stop_tokens_and_end_of_sequence_ids_end_each_sample_and_are_part_of_it(stop: Any, base: Engine) -> None:
    """End-of-sequence ids do so beside other stops; no stops at all is an empty tuple."""
    prompt = prompts_of(base, count=1)[0]
    free = tokens_of(run_one(sampler_of(base), prompt, sample(num_samples=3, max_tokens=20)))
    base.base = replace(base.base, eos=(free[0][7], free[1][3]))
    ends = {*base.base.eos} if stop != () else set()
    if stop == "a token":
        stop = (free[2][5],)
        ends |= {*stop}
    result = run_one(sampler_of(base), prompt, sample(num_samples=3, max_tokens=20, stop=stop))
    for sequence, tokens in zip(result.sequences, free, strict=True):
        end = next((n for n, token in enumerate(tokens) if token in ends), None)
        assert sequence.tokens.tolist() == (tokens if end is None else tokens[: end + 1])
        assert sequence.stop_reason == ("length" if end is None else "stop")
        assert len(sequence.logprobs) == len(sequence.tokens)


def test_without_max_tokens_a_sequence_goes_on_to_the_end_of_the_context(base: Engine) -> None:
    prompt = prompt_of(base, np.random.default_rng(0), length=20)
    result = run_one(sampler_of(base, context=50), prompt, sample(max_tokens=None))
    assert len(result.sequences[0].tokens) == 30
    assert result.sequences[0].stop_reason == "length"
    full = run_one(sampler_of(base, context=20), prompt, sample(max_tokens=None, prompt_logprobs=True))
    assert len(full.sequences[0].tokens) == 1  # the log-probabilities of a prompt that fills the context


# ---------------------------------------------------------------------- failures


def test_a_request_that_cannot_be_served_fails_alone_by_name(base: Engine) -> None:
    prompt = prompt_of(base, np.random.default_rng(0), length=30)
    sampler = sampler_of(base)
    requests: Requests = {"max_tokens is 500, but the model reads 512": (prompt, sample(max_tokens=500))}
    long = prompt_of(base, np.random.default_rng(0), length=513)
    requests["513 tokens, but the model reads 512"] = (long, sample())
    requests["good"] = (prompt, sample())
    results = run(sampler, requests)
    good = results.pop("good")
    assert tokens_of(good) == tokens_of(run_one(sampler_of(base), prompt, sample()))
    for message, result in results.items():
        assert isinstance(result, Failure), message
        assert message in result.message
        assert result.category == "user"


def test_requests_of_a_snapshot_that_is_closed_fail(engine: Engine, tmp_path: Path) -> None:
    (folder,) = snapshots(engine, tmp_path, count=1)
    sampler, prompt = sampler_of(engine), prompts_of(engine, count=1)[0]
    sampler.add("stays", None, prompt, sample(max_tokens=30))
    sampler.add("goes", folder, prompt, sample(max_tokens=30, num_samples=2))
    sampler.step()
    sampler.step()  # both run
    sampler.add("comes", folder, prompt, sample())
    sampler.close(folder)
    results = finish(sampler)
    assert tokens_of(results.pop("stays")) == tokens_of(run_one(sampler_of(engine), prompt, sample(max_tokens=30)))
    messages = {key: result.message for key, result in results.items() if isinstance(result, Failure)}
    assert messages.keys() == {"goes", "comes"}
    assert "was closed" in messages["goes"]


def test_a_prompt_that_the_model_cannot_read_fails_alone(base: Engine) -> None:
    """Pixels for more tokens than it has placeholders: what a mistake in the encoding would look like."""
    prompts = prompts_of(base, count=4)
    broken = replace(prompts[1], input_ids=prompts[1].input_ids[:-8])
    requests = {str(i): (p, sample()) for i, p in enumerate((prompts[0], broken, *prompts[2:]))}
    results = run(sampler_of(base), requests, begins_again=True)
    failure = results.pop("1")
    assert isinstance(failure, Failure)
    assert failure.category == "server"
    alone = run(sampler_of(base), {key: requests[key] for key in results})
    assert all_tokens(results) == all_tokens(alone)


def test_requests_that_fail_while_they_run_together_begin_again_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a batch does not fit into memory; and one sequence never does."""
    engine, decode = tiny_engine(), Reader.decode
    requests = {key: one for key, one in requests_of(engine, count=6).items() if one[1].params.max_tokens != 1}
    expected = all_tokens(run(sampler_of(engine), requests))

    def failing(self: Reader, tokens: Sequence[int], positions: Sequence[int], cache: Any, mask: Any) -> torch.Tensor:
        if len(tokens) > 3 or max(positions) > 300:
            raise MemoryError(f"{len(tokens)} sequences")
        return decode(self, tokens, positions, cache, mask)

    monkeypatch.setattr(Reader, "decode", failing)
    long = prompt_of(engine, np.random.default_rng(0), length=320)
    results = run(sampler_of(engine, context=1000), {**requests, "long": (long, sample())}, begins_again=True)
    failure = results.pop("long")
    assert isinstance(failure, Failure)
    assert failure.message == "the server failed: MemoryError: 1 sequences"
    assert all_tokens(results) == expected


def test_logits_that_are_not_finite_are_a_failure(base: Engine) -> None:
    with torch.no_grad():
        model_of(base).lm_head.weight[3, 3] = torch.nan
    (result,) = run(sampler_of(base), {"a": (prompts_of(base, count=1)[0], sample())}).values()
    assert isinstance(result, Failure)
    assert "not finite" in result.message


# ---------------------------------------------------------------------- cached prompts


def test_a_result_says_how_many_tokens_of_its_prompt_were_cached(base: Engine) -> None:
    sampler, (prompt, other, third) = sampler_of(base), prompts_of(base, count=3)

    def hits(**requests: tuple[EncodedSequence, Sample]) -> list[int]:
        results = run(sampler, requests)
        return [result.prompt_cache_hit_tokens for result in results.values() if isinstance(result, SampleResult)]

    assert hits(first=(prompt, sample(num_samples=3))) == [0]
    assert hits(again=(prompt, sample(seed=9)), other=(other, sample())) == [prompt.length, 0]
    assert hits(one=(third, sample()), two=(third, sample(seed=2))) == [0, third.length]
    assert hits(scored=(prompt, sample(prompt_logprobs=True)), short=(prompt, sample(max_tokens=1))) == [0, 0]


# ---------------------------------------------------------------------- slices


@contextmanager
def counted(engine: Engine) -> Iterator[list[int]]:
    """Tokens that each forward pass of the text model computes."""
    found: list[int] = []

    def count(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        found.append(kwargs["inputs_embeds"].shape[:2].numel())

    handle = model_of(engine).model.language_model.register_forward_pre_hook(count, with_kwargs=True)
    yield found
    handle.remove()


@pytest.mark.parametrize("rounding", [None, float("inf")], ids=["cached", "canonical"])
def test_one_slice_of_work_is_bounded(rounding: float | None, base: Engine) -> None:
    sampler = sampler_of(base, rounding=rounding, prefill_tokens=40, decode_steps=2, max_sequences=16)
    requests = requests_of(base, count=10)
    longest = max(prompt.length for prompt, _ in requests.values()) + 30
    for key, (prompt, request) in requests.items():
        sampler.add(key, None, prompt, request)
    slices: list[int] = []
    while not sampler.is_idle:
        with counted(base) as tokens:
            sampler.step()
        slices.append(sum(tokens))
    # A prompt is read twice if its log-probabilities are wanted; a fifth may be padding.
    assert max(slices) <= 2.25 * (40 + longest) + 2 * 16
    assert len(slices) > 10


def test_prompts_and_running_sequences_take_turns(base: Engine) -> None:
    """A long answer does not keep a short one waiting, nor does a stream of requests stop one that runs."""
    sampler = sampler_of(base, decode_steps=2)
    prompt = prompts_of(base, count=1)[0]
    sampler.add("long", None, prompt, sample(max_tokens=60))
    done: list[str] = []
    for i in range(200):
        if "long" in done:
            break
        sampler.add(f"short {i}", None, prompt, sample(max_tokens=4, seed=i))
        done += [key for key, _ in sampler.step()]
    assert 20 < done.index("long") < 150
    assert done[0] == "short 0"


def test_more_sequences_than_run_at_once_and_than_the_cache_holds_wait(base: Engine) -> None:
    requests = requests_of(base)
    expected = all_tokens(run(sampler_of(base), requests))
    many = {"many": (requests["request 0"][0], sample(num_samples=11))}
    assert all_tokens(run(sampler_of(base, max_cached_tokens=70), requests)) == expected
    together = tokens_of(run(sampler_of(base, max_sequences=3), many)["many"])
    assert together == tokens_of(run(sampler_of(base), many)["many"])
    assert len(together) == 11


# ---------------------------------------------------------------------- snapshots


def snapshots(engine: Engine, folder: Path, *, count: int) -> list[Path]:
    """Snapshots of one model as it is trained."""
    folders = [folder / f"step {i}" for i in range(count)]
    for path in folders:
        train(engine, some_data(engine))
        engine.optim_step("a", ADAM)
        path.mkdir(parents=True)
        engine.save("a", path, optimizer=False)
    return folders


@pytest.fixture
def engine() -> Engine:
    engine = tiny_engine()
    engine.create("a", lora())
    set_adapter(engine)
    return engine


def test_many_snapshots_and_the_base_are_sampled_from_at_once_each_as_if_alone(engine: Engine, tmp_path: Path) -> None:
    folders = [None, *snapshots(engine, tmp_path, count=4)]
    prompts = prompts_of(engine, count=3)
    sampler = sampler_of(engine, max_snapshots=2, decode_steps=2)
    for i, folder in enumerate(folders):
        for j, prompt in enumerate(prompts):
            sampler.add(f"{i} {j}", folder, prompt, sample(prompt_logprobs=True))
    together = finish(sampler)
    assert len(sampler._loaded) == 2
    for i, folder in enumerate(folders):
        alone = run(sampler_of(engine), {f"{i} {j}": (p, sample()) for j, p in enumerate(prompts)}, folder)
        assert all_tokens(alone) == {key: tokens_of(together[key]) for key in alone}
    assert len({str(tokens_of(together[f"{i} 0"])) for i in range(len(folders))}) == len(folders)


def test_snapshots_take_turns(engine: Engine, tmp_path: Path) -> None:
    (folder,) = snapshots(engine, tmp_path, count=1)
    sampler = sampler_of(engine, decode_steps=2)
    prompt = prompts_of(engine, count=1)[0]
    sampler.add("long", None, prompt, sample(max_tokens=40))
    sampler.add("short", folder, prompt, sample(max_tokens=4))
    assert list(finish(sampler)) == ["short", "long"]


def test_training_on_does_not_change_a_snapshot_and_sampling_does_not_change_training(
    engine: Engine, tmp_path: Path
) -> None:
    (folder,) = snapshots(engine, tmp_path, count=1)
    prompt, request = prompts_of(engine, count=2)[1], sample(prompt_logprobs=True, max_tokens=40)
    sampler = sampler_of(engine, decode_steps=1)
    before = run_one(sampler, prompt, request, folder)
    undisturbed = tiny_engine()
    undisturbed.create("a", lora())
    set_adapter(undisturbed)
    snapshots(undisturbed, tmp_path / "other", count=1)
    sampler.add("during", folder, prompt, request)
    for _ in range(5):
        sampler.step()
        for one in (engine, undisturbed):
            train(one, some_data(one))
            one.optim_step("a", ADAM)
        sampler.step()
    assert equal(weights(engine), weights(undisturbed))
    during = finish(sampler)["during"]
    assert tokens_of(during) == tokens_of(before)
    assert isinstance(during, SampleResult)
    assert during.scores is not None and before.scores is not None
    np.testing.assert_array_equal(during.scores.logprobs, before.scores.logprobs)


def test_snapshots_are_read_when_needed_and_the_least_recently_used_goes(engine: Engine, tmp_path: Path) -> None:
    folders = snapshots(engine, tmp_path, count=3)
    prompt = prompts_of(engine, count=1)[0]
    read: list[Path | None] = []
    open_weights = engine.open_weights
    engine.open_weights = lambda folder: (read.append(folder), open_weights(folder))[1]  # pyright: ignore
    sampler = sampler_of(engine, max_snapshots=2)
    assert read == []
    for i in (0, 1, 0, 2, 0, 1):
        sampler.add("one", folders[i], prompt, sample(max_tokens=2))
        finish(sampler)
    assert read == [folders[0], folders[1], folders[2], folders[1]]
    sampler.close(folders[1])
    assert len(sampler._loaded) == 1


def test_a_snapshot_that_was_deleted_fails_its_own_requests(engine: Engine, tmp_path: Path) -> None:
    folders = snapshots(engine, tmp_path, count=2)
    sampler = sampler_of(engine)
    shutil.rmtree(folders[0])
    prompt = prompts_of(engine, count=1)[0]
    for i in range(4):
        sampler.add(str(i), folders[i % 2], prompt, sample())
    results = finish(sampler, begins_again=True)
    for i in (0, 2):
        failure = results[str(i)]
        assert isinstance(failure, Failure)
        assert failure.message == "the snapshot 'step 0' was deleted; sample from another one"
    assert len({str(tokens_of(results[str(i)])) for i in (1, 3)}) == 1


def test_layers_that_are_recomputed_in_training_cache_in_sampling() -> None:
    engine = tiny_engine(gradient_checkpointing=True)
    engine.create("a", lora())
    train(engine, some_data(engine))
    prompt = prompts_of(engine, count=1)[0]
    assert tokens_of(run_one(sampler_of(engine), prompt, sample())) == tokens_of(
        run_one(sampler_of(tiny_engine()), prompt, sample())
    )
