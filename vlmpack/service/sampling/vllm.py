"""Sampling with vLLM, behind the interface of the built-in engine: `LLM.generate` with one `LoRARequest` per snapshot.

    add ──▶ waiting ──all of them──▶ LLM.generate, in its own thread ──▶ step

vLLM is faster, and has its own memory, kernels and image processor. So two guarantees of the built-in engine do not
hold. The tokens of a seed may depend on what runs at the same time, and log-probabilities differ from those of training
because the kernels differ. If vLLM makes another number of tokens from a prompt with images than the model's processor,
the request fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from importlib import import_module
from itertools import count
from pathlib import Path
from secrets import randbits
from typing import TYPE_CHECKING, Any, final

import numpy as np

from vlmpack.data.images import load_image
from vlmpack.errors import ConfigError, RequestError, check_extra
from vlmpack.service.engine.datums import EncodedSequence, image_token_of, placeholders_of
from vlmpack.service.limits import ServiceLimits
from vlmpack.service.sampling.batched import CLOSED, Finished, ending_of
from vlmpack.service.sampling.generation import Job, no_tokens
from vlmpack.service.wire import messages

if TYPE_CHECKING:
    from vlmpack.service.engine.engine import Engine

ADAPTER = "adapter_config.json"
"""File that marks a folder as an adapter."""

PATIENCE = 0.005
"""Seconds that a `step` waits for vLLM."""

NEVER = -100.0
"""Logit bias of tokens that are never sampled: the lowest that vLLM accepts."""

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The maximum ranks of an adapter that vLLM can be started with."""
MEMORY = 0.4
"""Share of the device's memory for vLLM, next to the model that is trained."""
MOST_IMAGES = 16
"""Maximum number of images in a prompt."""
TOGETHER = 4
"""Maximum number of adapters in one batch of vLLM, which reserves room for each at the maximum rank."""


def open_vllm(model: str, *, max_context: int, limits: ServiceLimits) -> Any:
    """Load a model into vLLM.

    Args:
        model: folder or hub name.
        max_context: maximum length of a sequence.
        limits: limits of the service, of which the ranks and the number of open snapshots count.

    Raises:
        ConfigError: vLLM is not installed, or the limits allow a rank that it does not have.
    """
    check_extra("vllm", "vllm", needed_by="sampling by vLLM")
    if limits.rank > RANKS[-1]:
        raise ConfigError(f"vLLM samples from adapters up to rank {RANKS[-1]}; the limit is {limits.rank}: lower it")
    return import_module("vllm").LLM(
        model=model,
        max_model_len=max_context + 1,  # the last sampled token is not read again
        gpu_memory_utilization=MEMORY,
        enable_lora=True,
        max_lora_rank=next(rank for rank in RANKS if rank >= limits.rank),
        max_loras=min(limits.samplers_open, TOGETHER),
        max_cpu_loras=limits.samplers_open,
        limit_mm_per_prompt={"image": MOST_IMAGES},
        logprobs_mode="raw_logprobs",  # of the full distribution, before temperature, top-k and top-p
    )


Adapters = Mapping[Path | None, Any]
"""The `LoRARequest` of each snapshot; None: the base model."""


@final
class VllmSampling:
    """A sampling engine that passes all requests to vLLM."""

    def __init__(self, engine: Engine, llm: Any) -> None:
        """Sample from snapshots of an engine's models with an LLM that `open_vllm` loaded."""
        self._llm = llm
        self._base = engine.base
        config = engine.model.config
        self._image_token_id = image_token_of(engine.family, config)  # vLLM repeats it as often as it needs
        self._image_limits = engine.config.limits.image_limits
        self._forbidden = tuple(placeholders_of(engine.family, config))
        self._adapters: dict[Path, Any] = {}
        self._numbers = count(1)
        self._waiting: list[Job] = []
        self._running: Future[list[Finished]] | None = None
        self._finished: list[Finished] = []
        self.sampled_tokens = 0
        """Number of tokens sampled so far."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm")

    @property
    def is_idle(self) -> bool:
        """Return whether there is nothing to do and nothing to return."""
        return not (self._waiting or self._running or self._finished)

    def close(self, folder: Path | None) -> None:
        """Forget a snapshot; None: the base model. Its requests that have not started fail."""
        if folder is not None:
            self._adapters.pop(folder, None)
        for job in [job for job in self._waiting if job.folder == folder]:
            self._waiting.remove(job)
            self._finished.append((job.key, messages.Failure(message=CLOSED, category="user")))

    def add(self, key: str, folder: Path | None, prompt: EncodedSequence, request: messages.Sample) -> None:
        """Add a request for a snapshot; None: for the base model."""
        try:
            for name in ("target_prompt_logprobs", "prompt_alt_tokens_k"):
                if getattr(request, name):
                    raise RequestError(f"{name}: vLLM does not compute it; start the server with another --sampler")
            ending = ending_of(prompt, request, self._base)
            if folder is not None and not (folder / ADAPTER).is_file():
                known = "vLLM samples from adapters and from the base model"
                raise RequestError(f"the snapshot {folder.name!r} is not there, or is not an adapter; {known}")
        except RequestError as error:
            self._finished.append((key, messages.Failure.of(error)))
            return
        self._waiting.append(Job(key=key, folder=folder, prompt=prompt, request=request, ending=ending))

    def step(self) -> list[Finished]:
        """Pass waiting requests to vLLM if it is free, and return what is finished."""
        if self._running is None and self._waiting:
            adapters = {job.folder: self._adapter(job.folder) for job in self._waiting}
            self._running = self._thread.submit(self._generate, self._waiting, adapters)
            self._waiting = []
        if self._running is not None and not self._finished:
            wait([self._running], PATIENCE)
        if self._running is not None and self._running.done():
            found, self._running = self._running.result(), None
            self._finished += found
            results = (result for _, result in found if isinstance(result, messages.SampleResult))
            self.sampled_tokens += sum(len(one.tokens) for result in results for one in result.sequences)
        finished, self._finished = self._finished, []
        return finished

    # ------------------------------------------------------------------ in the thread

    def _generate(self, jobs: Sequence[Job], adapters: Adapters) -> list[Finished]:
        """Run requests together. If vLLM fails, run each alone, so that only the request at fault fails."""
        try:
            return self._together(jobs, adapters)
        except Exception as error:  # whatever vLLM raises
            if len(jobs) > 1:
                return [finished for job in jobs for finished in self._generate([job], adapters)]
            return [(jobs[0].key, messages.Failure.of(error, place="vLLM: "))]

    def _together(self, jobs: Sequence[Job], adapters: Adapters) -> list[Finished]:
        prompts, params, chosen = [], [], []
        for job in jobs:
            prompt, samples = self._prompt(job), job.request.num_samples
            prompts += [prompt] * samples
            params += [self._params(job, index) for index in range(samples)]
            chosen += [adapters[job.folder]] * samples
        outputs = iter(self._llm.generate(prompts, params, lora_request=chosen, use_tqdm=False))
        return [(job.key, self._result(job, [next(outputs) for _ in range(job.request.num_samples)])) for job in jobs]

    def _prompt(self, job: Job) -> dict[str, Any]:
        """Return the prompt in vLLM's format: one placeholder per image, and the decoded images."""
        ids: list[int] = []
        pictures = []
        for chunk in job.request.prompt:
            if isinstance(chunk, messages.ImageChunk) and self._image_token_id is not None:
                ids.append(self._image_token_id)
                pictures.append(load_image(chunk.data, limits=self._image_limits))
            elif isinstance(chunk, messages.TextChunk):
                ids += chunk.tokens.tolist()
        return {"prompt_token_ids": ids} | ({"multi_modal_data": {"image": pictures}} if pictures else {})

    def _params(self, job: Job, index: int) -> Any:
        """Return the settings of sequence `index` of a request."""
        params, first = job.request.params, index == 0
        seed = None if params.seed is None else (params.seed + index) % 2**63
        return import_module("vllm").SamplingParams(
            seed=randbits(63) if seed is None else seed,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            max_tokens=job.ending.max_tokens,
            stop=list(params.stop_strings) or None,
            stop_token_ids=sorted(job.ending.stop_tokens),
            ignore_eos=True,  # stop_token_ids has all ids that end a sequence
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            detokenize=bool(params.stop_strings),
            logprobs=job.request.topk_sample_logprobs,  # and of the sampled token
            prompt_logprobs=job.request.topk_prompt_logprobs if first and job.request.wants_scores else None,
            logit_bias=dict.fromkeys(self._forbidden, NEVER) or None,
        )

    def _adapter(self, folder: Path | None) -> Any:
        """Return the adapter of a snapshot. vLLM tells adapters apart by their numbers, so none is used twice."""
        if folder is None:
            return None
        if folder not in self._adapters:
            number, request = next(self._numbers), import_module("vllm.lora.request").LoRARequest
            self._adapters[folder] = request(f"snapshot_{number}", number, str(folder))
        return self._adapters[folder]

    @staticmethod
    def _result(job: Job, outputs: Sequence[Any]) -> messages.SampleResult | messages.Failure:
        read = len(outputs[0].prompt_token_ids)
        if read != job.prompt.length:
            seen = f"vLLM makes {read} tokens of the prompt, the model's processor {job.prompt.length}"
            remedy = "give vLLM the processor's own image settings (mm_processor_kwargs)"
            return messages.Failure(message=f"{seen}: {remedy}", category="server")
        scores = _scores(outputs[0], job.request) if job.request.wants_scores else None
        sequences = tuple(_sequence(output.outputs[0], job.request.topk_sample_logprobs) for output in outputs)
        hits = outputs[0].num_cached_tokens or 0
        return messages.SampleResult(sequences=sequences, scores=scores, prompt_cache_hit_tokens=hits)


def _scores(output: Any, request: messages.Sample) -> messages.PromptScores:
    """Return the scores of the prompt tokens from vLLM's output."""
    ids, tables = output.prompt_token_ids, [{}, *output.prompt_logprobs[1:]]
    logprobs = np.array([np.nan, *_of_tokens(ids[1:], tables[1:])], np.float32)
    scores = messages.PromptScores(logprobs=logprobs, top=_likeliest(tables, request.topk_prompt_logprobs))
    return scores.of_last(request.prompt_logprobs_last_n)


def _likeliest(tables: Sequence[Mapping[int, Any]], count: int) -> messages.TopTokens:
    """Return the most likely tokens at each position. vLLM's tables also contain the position's actual token."""
    found = no_tokens(len(tables), count)
    for at, table in enumerate(tables):
        best = sorted(table.items(), key=lambda entry: -entry[1].logprob)[:count]
        found.ids[at, : len(best)] = [token for token, _ in best]
        found.logprobs[at, : len(best)] = [entry.logprob for _, entry in best]
    return found


def _sequence(completion: Any, top: int) -> messages.SampledSequence:
    """Convert one sequence from vLLM's output."""
    ids = list(completion.token_ids)
    return messages.SampledSequence(
        tokens=np.asarray(ids, np.int32),
        logprobs=np.asarray(_of_tokens(ids, completion.logprobs), np.float32),
        stop_reason="stop" if completion.finish_reason == "stop" else "length",
        top=_likeliest(completion.logprobs, top) if top else None,
    )


def _of_tokens(ids: Sequence[int], tables: Sequence[Mapping[int, Any]]) -> list[float]:
    """Return the log-probability of each token from vLLM's tables, one per position."""
    return [table[token].logprob for token, table in zip(ids, tables, strict=True)]
