"""vLLM behind the sampling interface, against a fake of its documented API (it needs a GPU of its own).

The fake refuses arguments that `SamplingParams`, `LLM` and `LoRARequest` do not have, writes placeholders of images
out, and samples from a distribution that depends on the adapter and on the tokens so far.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from step_service import lora, png, text, tiny_engine

from vlmpack.errors import ConfigError
from vlmpack.service.engine.engine import Engine
from vlmpack.service.limits import ServiceLimits
from vlmpack.service.sampling.batched import BatchedSampling, Finished
from vlmpack.service.sampling.samplers import SAMPLERS, open_sampler
from vlmpack.service.sampling.vllm import VllmSampling, open_vllm
from vlmpack.service.wire.messages import Chunk, Failure, ImageChunk, Sample, SampleResult, SamplingParams

VOCABULARY, EOS = 1000, 7


@dataclass
class FakeParams:
    n: int = 1
    seed: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int | None = 16
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None

    def __post_init__(self) -> None:
        assert self.temperature >= 0
        assert self.top_k >= -1
        assert self.max_tokens is None or self.max_tokens > 0
        assert self.detokenize or not self.stop
        assert all(-100 <= bias <= 100 for bias in (self.logit_bias or {}).values())


@dataclass(frozen=True)
class FakeAdapter:
    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass
class FakeLogprob:
    logprob: float


@dataclass
class FakeCompletion:
    token_ids: list[int]
    logprobs: list[dict[int, FakeLogprob]] | None
    finish_reason: str


@dataclass
class FakeOutput:
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, FakeLogprob] | None] | None
    outputs: list[FakeCompletion]
    num_cached_tokens: int | None = None


def distribution(ids: Sequence[int], adapter: int) -> np.ndarray:
    return np.random.default_rng([len(ids), ids[-1], adapter]).normal(size=VOCABULARY)


def logprobs_of(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum())


def letter(token: int) -> str:
    return chr(97 + token % 26)


@dataclass
class FakeLLM:
    """`vllm.LLM`."""

    arguments: dict[str, Any]
    image_token_id: int = 0
    tokens_per_image: int = 0
    cached: int | None = None
    calls: list[int] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)

    def generate(
        self, prompts: Sequence[Mapping[str, Any]], sampling_params: Any = None, *, use_tqdm: bool, lora_request: Any
    ) -> list[FakeOutput]:
        self.calls.append(len(prompts))
        self.threads.add(threading.get_ident())
        return [self._one(*one) for one in zip(prompts, sampling_params, lora_request, strict=True)]

    def _one(self, prompt: Mapping[str, Any], params: FakeParams, adapter: FakeAdapter | None) -> FakeOutput:
        pictures = prompt.get("multi_modal_data", {}).get("image", [])
        assert all(picture.mode == "RGB" for picture in pictures)
        assert prompt["prompt_token_ids"].count(self.image_token_id) == len(pictures)
        ids: list[int] = []
        for token in prompt["prompt_token_ids"]:
            ids += [token] * (self.tokens_per_image if token == self.image_token_id else 1)
        if 13 in ids:
            raise ValueError("this prompt cannot be read")
        number = 0 if adapter is None else adapter.lora_int_id
        of_prompt = None
        if params.prompt_logprobs is not None:
            k = params.prompt_logprobs
            of_prompt = [None] + [self._entry(ids[:i], ids[i], number, k) for i in range(1, len(ids))]
        return FakeOutput(ids, of_prompt, [self._completion(ids, params, number)], self.cached)

    def _completion(self, ids: list[int], params: FakeParams, adapter: int) -> FakeCompletion:
        rng = np.random.default_rng(params.seed)
        tokens: list[int] = []
        entries = []
        assert params.max_tokens is not None
        reason = "length"
        while len(tokens) < params.max_tokens and reason == "length":
            logits = distribution([*ids, *tokens], adapter)
            for token, bias in (params.logit_bias or {}).items():
                logits[token] += bias
            noise = rng.gumbel(size=VOCABULARY) if params.temperature else 0
            token = int((logits / (params.temperature or 1) + noise).argmax())
            entries.append(self._entry([*ids, *tokens], token, adapter))
            tokens.append(token)
            said = "".join(map(letter, tokens))
            if token in (params.stop_token_ids or ()) or any(stop in said for stop in params.stop or ()):
                reason = "stop"
            if token == EOS and not params.ignore_eos:
                reason = "stop"
        return FakeCompletion(tokens, entries if params.logprobs is not None else None, reason)

    @staticmethod
    def _entry(before: Sequence[int], token: int, adapter: int, k: int = 0) -> dict[int, FakeLogprob]:
        logprobs = logprobs_of(distribution(before, adapter))
        if k:
            return {int(each): FakeLogprob(float(logprobs[each])) for each in (token, *np.argsort(logprobs)[-k:])}
        return {int(logprobs.argmax()): FakeLogprob(9.9), token: FakeLogprob(float(logprobs[token]))}


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module, lora_module, request = ModuleType("vllm"), ModuleType("vllm.lora"), ModuleType("vllm.lora.request")
    known = {"model", "max_model_len", "gpu_memory_utilization", "enable_lora", "max_lora_rank", "max_loras"}
    known |= {"max_cpu_loras", "limit_mm_per_prompt", "logprobs_mode"}

    def make(**arguments: Any) -> FakeLLM:
        assert arguments.keys() <= known
        return FakeLLM(arguments)

    module.__dict__.update(LLM=make, SamplingParams=FakeParams, __path__=[], __spec__=None)
    request.__dict__.update(LoRARequest=FakeAdapter)
    for name, fake in (("vllm", module), ("vllm.lora", lora_module), ("vllm.lora.request", request)):
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setattr("vlmpack.errors._is_installed", lambda package: package == "vllm")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine()


def sampler_of(engine: Engine, *, eos: int = EOS) -> VllmSampling:
    llm = open_vllm("model", max_context=200, limits=ServiceLimits())
    config = engine.model.config
    llm.image_token_id, llm.tokens_per_image = config.image_token_id, 6  # 64 x 96 pixels
    engine = copy(engine)
    engine.base = replace(engine.base, max_context=200, eos=(eos,), decode=lambda ids: "".join(map(letter, ids)))
    return VllmSampling(engine, llm)


PROMPT: tuple[Chunk, ...] = (text(20, 21, 22),)
PICTURE: tuple[Chunk, ...] = (text(20), ImageChunk(data=png(64, 96), format="png"), text(22, 23))


def sample(
    chunks: tuple[Chunk, ...] = PROMPT, *, num_samples: int = 1, logprobs: bool = False, top: int = 0, **params: Any
) -> Sample:
    settings = SamplingParams(**{"max_tokens": 6, "seed": 3, "stop": (), **params})
    return Sample(
        sampling_session_id="x",
        seq_id=0,
        prompt=chunks,
        num_samples=num_samples,
        params=settings,
        prompt_logprobs=logprobs,
        topk_prompt_logprobs=top,
    )


def run(
    sampler: VllmSampling, engine: Engine, requests: Mapping[str, Sample], folder: Path | None = None
) -> dict[str, Any]:
    for key, request in requests.items():
        sampler.add(key, folder, engine.encode_chunks(request.prompt), request)
    found: list[Finished] = []
    while not sampler.is_idle:
        found += sampler.step()
    assert len(dict(found)) == len(found)
    return dict(found)


def test_an_engine_samples_as_it_is_told() -> None:
    engine = tiny_engine()
    for kind in SAMPLERS:
        sampler = open_sampler(engine, kind, source="some/model")
        assert isinstance(sampler, VllmSampling) == (kind == "vllm")
    assert isinstance(sampler, VllmSampling)
    assert sampler._llm.arguments["model"] == "some/model"
    assert sampler._forbidden == (engine.model.config.image_token_id, engine.model.config.video_token_id)
    for kind, rounding in (("exact", 2.0**-13), ("fast", 0.0)):
        sampler = open_sampler(engine, kind, source="some/model")
        assert isinstance(sampler, BatchedSampling)
        assert sampler._settings.rounding_of(engine.model) == rounding
    text_model = tiny_engine("qwen3")
    sampler = open_sampler(text_model, "vllm", source="some/model")
    assert isinstance(sampler, VllmSampling)
    assert run(sampler, text_model, {"a": sample()})["a"].sequences[0].tokens.shape == (6,)


def test_without_vllm_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmpack.errors._is_installed", lambda package: False)
    with pytest.raises(ConfigError, match=r"sampling by vLLM needs vllm.*vlmpack\[vllm\]"):
        open_vllm("model", max_context=100, limits=ServiceLimits())


def test_waiting_requests_go_together_in_another_thread(engine: Engine) -> None:
    sampler = sampler_of(engine)
    results = run(sampler, engine, {"a": sample(num_samples=3), "b": sample(PICTURE, seed=9), "c": sample(seed=5)})
    llm = sampler._llm
    assert llm.calls == [5]
    assert threading.get_ident() not in llm.threads
    assert [len(results[key].sequences) for key in "abc"] == [3, 1, 1]
    again = [run(sampler, engine, {"a": sample(seed=3 + i)})["a"].sequences[0].tokens.tolist() for i in range(3)]
    assert [sequence.tokens.tolist() for sequence in results["a"].sequences] == again
    assert results["c"].sequences[0].tokens.tolist() == again[2]
    assert sampler.sampled_tokens == 6 * (5 + 3)
    assert results["a"].prompt_cache_hit_tokens == 0  # vLLM did not say
    llm.cached = 2
    assert run(sampler, engine, {"a": sample()})["a"].prompt_cache_hit_tokens == 2


def test_log_probabilities_are_of_the_tokens_by_the_whole_distribution(engine: Engine) -> None:
    result = run(sampler_of(engine), engine, {"a": sample(PICTURE, logprobs=True, temperature=0.5, top_k=5)})["a"]
    assert isinstance(result, SampleResult)
    ids = engine.encode_chunks(PICTURE).input_ids.tolist()
    (sequence,) = result.sequences
    whole = [*ids, *sequence.tokens.tolist()]
    expected = [logprobs_of(distribution(whole[:i], 0))[whole[i]] for i in range(1, len(whole))]
    assert result.scores is not None
    assert np.isnan(result.scores.logprobs[0])
    seen = np.concatenate((result.scores.logprobs[1:], sequence.logprobs))
    np.testing.assert_allclose(seen, expected, rtol=1e-6)
    top = run(sampler_of(engine), engine, {"a": sample(PICTURE, top=3)})["a"].scores
    for at in range(1, len(ids)):
        logprobs = logprobs_of(distribution(ids[:at], 0))
        np.testing.assert_allclose(top.top.logprobs[at], np.sort(logprobs)[:-4:-1], rtol=1e-6)
        np.testing.assert_allclose(logprobs[top.top.ids[at]], top.top.logprobs[at], rtol=1e-6)
    assert sequence.tokens.dtype == np.int32
    assert sequence.stop_reason == "length"


def test_stop_tokens_and_strings(engine: Engine) -> None:
    sampler = sampler_of(engine)
    free = run(sampler, engine, {"a": sample(max_tokens=50)})["a"].sequences[0].tokens.tolist()
    first = free.index(free[9])
    stopped = run(sampler, engine, {"a": sample(max_tokens=50, stop=(free[9],))})["a"].sequences[0]
    assert (stopped.tokens.tolist(), stopped.stop_reason) == (free[: first + 1], "stop")
    said = "".join(map(letter, free))
    text_stopped = run(sampler, engine, {"a": sample(max_tokens=50, stop=(said[4:7],))})["a"].sequences[0]
    assert (text_stopped.tokens.tolist(), text_stopped.stop_reason) == (free[: said.index(said[4:7]) + 3], "stop")
    whole = run(sampler, engine, {"a": sample(max_tokens=None)})["a"].sequences[0]
    assert len(whole.tokens) == 200 - 3
    with_end = sampler_of(engine, eos=free[9])  # which ends a sequence beside other stops, but not beside none
    for stop, tokens in ((None, first + 1), (("never this",), first + 1), ((10**6,), first + 1), ((), 50)):
        seen = run(with_end, engine, {"a": sample(max_tokens=50, stop=stop)})["a"].sequences[0]
        assert seen.tokens.tolist() == free[:tokens]


@pytest.mark.parametrize(("rank", "expected"), [(1, 8), (48, 64), (300, 320), (512, 512)])
def test_adapters_and_images_have_the_limits_of_the_service(rank: int, expected: int) -> None:
    """vLLM knows some maximum ranks alone."""
    engine = tiny_engine(limits={"rank": rank, "samplers_open": 3, "image_pixels": 10**9})
    sampler = open_sampler(engine, "vllm", source="some/model")
    assert isinstance(sampler, VllmSampling)
    arguments = sampler._llm.arguments
    assert (arguments["max_lora_rank"], arguments["max_loras"], arguments["max_cpu_loras"]) == (expected, 3, 3)
    assert arguments["max_model_len"] > engine.base.max_context
    assert (arguments["enable_lora"], arguments["logprobs_mode"]) == (True, "raw_logprobs")
    assert sampler._image_limits.max_pixels == 10**9


def test_a_rank_beyond_those_of_vllm_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="up to rank 512; the limit is 513"):
        open_sampler(tiny_engine(limits={"rank": 513}), "vllm", source="some/model")


def test_images_are_read_within_these_limits(engine: Engine) -> None:
    sampler = sampler_of(engine)
    sampler._image_limits = replace(sampler._image_limits, max_pixels=64 * 96 - 1)
    result = run(sampler, engine, {"a": sample(PICTURE)})["a"]
    assert isinstance(result, Failure) and "6144 pixels" in result.message


def test_each_snapshot_is_an_adapter_of_its_own_until_it_is_closed(engine: Engine, tmp_path: Path) -> None:
    engine.create("a", lora())
    sampler = sampler_of(engine)
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        engine.save("a", folder, optimizer=False)
    engine.free("a")

    def tokens(folder: Path | None) -> list[int]:
        return run(sampler, engine, {"a": sample()}, folder)["a"].sequences[0].tokens.tolist()

    base, first, second = tokens(None), tokens(one), tokens(two)
    assert len({str(each) for each in (base, first, second)}) == 3
    assert tokens(one) == first
    assert sampler._adapter(two) == FakeAdapter("snapshot_2", 2, str(two))
    sampler.close(one)
    assert sampler._adapters.keys() == {two}
    assert sampler._adapter(one).lora_int_id == 3  # vLLM may still know the numbers before it


def test_what_fails_fails_alone(engine: Engine, tmp_path: Path) -> None:
    sampler = sampler_of(engine)
    whole = run(sampler, engine, {"whole": sample()}, tmp_path)["whole"]
    requests = {
        "good": sample(),
        "unreadable": sample((text(12, 13, 14),)),
        "long": sample(max_tokens=999),
        "other image": sample((text(20), ImageChunk(data=png(64, 64), format="png"), text(22))),
    }
    results = run(sampler, engine, requests)
    assert isinstance(results.pop("good"), SampleResult)
    messages = {key: result.message for key, result in {**results, "whole": whole}.items()}
    assert all(isinstance(result, Failure) for result in results.values())
    assert "vLLM: ValueError: this prompt cannot be read" in messages["unreadable"]
    assert "max_tokens is 999" in messages["long"]
    assert "vLLM makes 8 tokens of the prompt, the model's processor 6" in messages["other image"]
    assert "not an adapter" in messages["whole"]


def test_requests_of_a_closed_snapshot_that_have_not_begun_fail(engine: Engine) -> None:
    sampler = sampler_of(engine)
    sampler.add("a", None, engine.encode_chunks(PROMPT), sample())
    sampler.close(None)
    (result,) = dict(sampler.step()).values()
    assert isinstance(result, Failure) and "was closed" in result.message
    assert sampler.is_idle
