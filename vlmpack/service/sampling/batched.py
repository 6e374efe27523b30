"""The built-in sampling engine: continuous batching on the model that is trained.

    add ──▶ waiting requests of each snapshot ──prefill──▶ running batches ──decode──▶ results
                 └── one slice of work per `step`: some prompts, or a few tokens of one batch ──┘

Snapshots take turns. Within a snapshot, prompts and decoding take turns, so that requests join while others run. A
snapshot is loaded when its turn comes. If too many are loaded, the least recently used one is dropped.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, final

import torch
from torch import nn

from vlmpack.errors import RequestError
from vlmpack.service.engine.datums import EncodedSequence
from vlmpack.service.sampling.generation import (
    Batch,
    Ending,
    Growing,
    Job,
    Prefilled,
    Reader,
    begin,
    groups_by_length,
    itself,
)
from vlmpack.service.wire.messages import Failure, Sample, SampleResult

if TYPE_CHECKING:
    from vlmpack.service.engine.engine import BaseModel, Engine, Weights


def ending_of(prompt: EncodedSequence, request: Sample, base: BaseModel) -> Ending:
    """Return when sequences of a request end.

    Raises:
        RequestError: the model's context has no room for the request, or the request does not fit the prompt.
    """
    if (last := request.prompt_logprobs_last_n) is not None and not last < prompt.length:
        raise RequestError(f"prompt_logprobs_last_n is {last}; the prompt has {prompt.length} tokens, so send 1 less")
    if (ids := request.target_prompt_logprobs) is not None and ids.shape[0] != prompt.length - 1:
        seen = f"{list(ids.shape)}; the prompt has {prompt.length} tokens"
        raise RequestError(f"target_prompt_logprobs has shape {seen}, so send [{prompt.length - 1}, K]")
    params, room = request.params, base.max_context - prompt.length + 1  # the last token is not read again
    if room < 1:
        raise RequestError(f"the prompt has {prompt.length} tokens, but the model reads {base.max_context}; shorten it")
    if params.max_tokens is not None and params.max_tokens > room:
        seen = f"the prompt has {prompt.length} tokens and max_tokens is {params.max_tokens}"
        raise RequestError(f"{seen}, but the model reads {base.max_context}; set max_tokens to {room} at most")
    ids = [token for token in params.stop or () if isinstance(token, int)]
    return Ending(
        stop_tokens=frozenset(() if params.stop == () else (*base.eos, *ids)),
        stop_strings=params.stop_strings,
        max_tokens=params.max_tokens or max(room - 1, 1),
        decode=base.decode,
    )


Finished = tuple[str, SampleResult | Failure]
"""Key of a request, and its outcome."""
CLOSED = "the snapshot was closed before the request was done; sample again"
"""Why a request failed."""


@final
@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Settings of the built-in sampling engine."""

    prefill_tokens: int = 8192
    """Token budget of a slice for prompts and canonical computations; a slice takes at least one prompt."""
    decode_steps: int = 8
    """Number of tokens that a slice decodes for each sequence of a batch."""
    check_tokens: int = 64
    """Number of tokens of a sequence that one canonical computation checks."""
    max_sequences: int = 64
    """Maximum number of running sequences per snapshot."""
    max_cached_tokens: int = 131072
    """Maximum number of tokens in the key-value caches of a snapshot, counting running sequences at their maximum
    length. One request may exceed it to run alone."""
    prompt_tokens: int = 16384
    """Total tokens of prompts whose key-value caches are kept for later requests, over all snapshots; 0: keep none."""
    max_snapshots: int = 16
    """Maximum number of snapshots in memory."""
    rounding: float | None = None
    """Largest error of a logit, as a fraction of the largest absolute logit. Choices that are closer than this are
    checked. 0: check none; infinity: check all. None: 2**-13 for float32, 2**-7 for float32 with rounded products
    (TF32), 2**-8 for float16, 2**-5 for bfloat16."""

    def rounding_of(self, model: nn.Module) -> float:
        """Return the setting, or its default for the model's dtype."""
        if self.rounding is not None:
            return self.rounding
        dtype = next(model.parameters()).dtype
        if dtype.itemsize < 4:
            return 4 * torch.finfo(dtype).eps
        return 2.0**-13 if torch.get_float32_matmul_precision() == "highest" else 2.0**-7


@final
class PrefilledPrompts:
    """Least recently used (LRU) cache of prefilled prompts, by snapshot and digest.

    Args:
        tokens: maximum total number of tokens.
    """

    def __init__(self, tokens: int) -> None:
        self._most, self._tokens = tokens, 0
        self._kept: OrderedDict[tuple[Path | None, bytes], Prefilled] = OrderedDict()

    def __contains__(self, key: tuple[Path | None, bytes]) -> bool:
        return key in self._kept

    def take(self, key: tuple[Path | None, bytes]) -> Prefilled:
        """Return a cached prompt, which stays in the cache."""
        self._kept.move_to_end(key)
        return self._kept[key]

    def put(self, key: tuple[Path | None, bytes], prompt: Prefilled) -> None:
        """Add a prompt, unless it alone exceeds the maximum. Drops the least recently used prompts to make room."""
        if prompt.length <= self._most:
            self._kept[key] = prompt
            self._tokens += prompt.length
        while self._tokens > self._most:
            self._remove(next(iter(self._kept)))

    def drop(self, folder: Path | None) -> None:
        """Drop the prompts of a snapshot."""
        for key in [key for key in self._kept if key[0] == folder]:
            self._remove(key)

    def _remove(self, key: tuple[Path | None, bytes]) -> None:
        self._tokens -= self._kept.pop(key).length


# ---------------------------------------------------------------------- the built-in engine


@final
@dataclass(kw_only=True, eq=False)
class _Lane:
    """The requests of one snapshot."""

    folder: Path | None
    """Folder of the snapshot; None: the base model."""
    waiting: deque[Job] = field(default_factory=deque)
    """Requests with sequences that have not started, in order of arrival."""
    batches: deque[Batch] = field(default_factory=deque)
    """Batches of running sequences."""
    decodes_next: bool = False
    """Whether the next slice decodes running sequences."""

    @property
    def is_idle(self) -> bool:
        """Return whether there is nothing to do."""
        return not self.waiting and not self.batches


@final
class BatchedSampling:
    """The built-in sampling engine: continuous batching on the model that is trained."""

    def __init__(self, engine: Engine, settings: SamplingSettings | None = None) -> None:
        """Sample from the models of an engine; `settings` None: the defaults."""
        self._engine = engine
        self._settings = settings or SamplingSettings()
        self._lanes: OrderedDict[Path | None, _Lane] = OrderedDict()  # the first one has the next turn
        self._loaded: OrderedDict[Path | None, Weights] = OrderedDict()  # the first one is dropped first
        self._jobs: dict[str, Job] = {}
        self._finished: list[Finished] = []
        self._prompts = PrefilledPrompts(self._settings.prompt_tokens)
        self.sampled_tokens = 0
        """Number of tokens sampled so far, including tokens that checks discarded."""
        self.canonical_tokens = 0
        """Number of tokens that canonical computations have read so far."""
        self.begun_again = 0
        """Number of requests that failed together with others and were restarted alone."""

    @property
    def is_idle(self) -> bool:
        """Return whether there is nothing to do and nothing to return."""
        return not self._jobs and not self._finished

    def close(self, folder: Path | None) -> None:
        """Free the weights of a snapshot; None: of the base model. Its unfinished requests fail."""
        self._fail([job for job in self._jobs.values() if job.folder == folder], RequestError(CLOSED))
        self._loaded.pop(folder, None)
        self._prompts.drop(folder)

    def add(self, key: str, folder: Path | None, prompt: EncodedSequence, request: Sample) -> None:
        """Add a request.

        Args:
            key: name of the request in `step`.
            folder: folder of the snapshot, which is loaded when its turn comes; None: the base model.
            prompt: the encoded prompt.
            request: the request.
        """
        try:
            ending = ending_of(prompt, request, self._engine.base)
        except RequestError as error:
            self._finished.append((key, Failure.of(error)))
            return
        job = Job(key=key, folder=folder, prompt=prompt, request=request, ending=ending)
        job.begin()
        self._jobs[key] = job
        self._lanes.setdefault(folder, _Lane(folder=folder)).waiting.append(job)

    @torch.no_grad()
    def step(self) -> list[Finished]:
        """Do one slice of work, and return finished requests.

        A slice is some prompts of one snapshot, or a few tokens of one of its batches.
        """
        for folder in [folder for folder, lane in self._lanes.items() if lane.is_idle]:
            del self._lanes[folder]
        if self._lanes:
            lane = next(iter(self._lanes.values()))
            self._lanes.move_to_end(lane.folder)
            self._slice(lane)
        finished, self._finished = self._finished, []
        return finished

    # ------------------------------------------------------------------ one slice

    def _slice(self, lane: _Lane) -> None:
        taken = [] if lane.decodes_next and lane.batches else self._admitted(lane)
        lane.decodes_next = bool(taken)
        batch = None if taken else lane.batches[0]
        involved = {job for job, _ in taken} if batch is None else batch.jobs
        try:
            with self._weights(lane.folder) as reader:
                if batch is None:
                    self._prefill(lane, taken, reader)
                else:
                    self._decode(lane, batch, reader)
        except Exception as error:  # whatever the error, other requests continue
            involved |= set() if batch is None else batch.jobs  # other batches may have joined
            jobs = [job for job in self._jobs.values() if job in involved]
            if len(jobs) > 1:
                self._again(lane, jobs)
            else:
                self._fail(jobs, error)

    def _admitted(self, lane: _Lane) -> list[tuple[Job, list[Growing]]]:
        """Take waiting sequences, in order of arrival, as long as there is room."""
        settings, taken, tokens = self._settings, [], 0
        decoding = [sequence for batch in lane.batches for sequence in batch.sequences]
        running, cached = len(decoding), sum(sequence.job.reserved for sequence in decoding)
        while lane.waiting:
            job = lane.waiting[0]
            reserved = job.reserved
            room = min(settings.max_sequences - running, (settings.max_cached_tokens - cached) // reserved)
            room = room if running else max(room, 1)
            is_next = not taken or not (job.is_alone or tokens + job.prompt.length > settings.prefill_tokens)
            if room < 1 or not is_next:
                break
            group = [job.waiting.popleft() for _ in range(min(room, len(job.waiting)))]
            taken.append((job, group))
            tokens += job.prompt.length
            running += len(group)
            cached += reserved * len(group)
            if job.waiting:
                break
            lane.waiting.popleft()
            if job.is_alone:
                break
        return taken

    def _prefill(self, lane: _Lane, taken: Sequence[tuple[Job, list[Growing]]], reader: Reader) -> None:
        """Compute prompts.

        Prompts that need scores, or whose sequences have only one token, go into a packed row. Prompts of longer
        sequences are prefilled into a cache. A prompt may need both.
        """
        scored = [(job, group) for job, group in taken if job.needs_scores or job.ends_at_once]
        drawing = [[(job, group)] for job, group in scored if job.request.prompt_alt_tokens_k]
        together = [(job, group) for job, group in scored if not job.request.prompt_alt_tokens_k]
        for jobs in [together, *drawing]:  # drawn tokens must not depend on other prompts in a row
            if jobs:
                self._score(lane, jobs, reader)
        going_on: dict[bytes, list[Growing]] = {}
        for job, group in taken:
            if not job.ends_at_once:
                digest = job.prompt.digest
                if group[0] is job.sequences[0] and not job.request.wants_scores:
                    job.is_cached = digest in going_on or (lane.folder, digest) in self._prompts
                going_on.setdefault(digest, []).extend(group)
        for digest in [digest for digest in going_on if (lane.folder, digest) in self._prompts]:
            self._started(lane, self._prompts.take((lane.folder, digest)).begin(going_on.pop(digest), reader), reader)
        groups = list(going_on.values())

        def keep(prompt: EncodedSequence, prefilled: Prefilled) -> None:
            self._prompts.put((lane.folder, prompt.digest), prefilled)

        for indices in groups_by_length([group[0].job.prompt for group in groups]):
            batch = begin([sequence for index in indices for sequence in groups[index]], reader, keep=keep)
            self._started(lane, batch, reader)

    def _score(self, lane: _Lane, scored: Sequence[tuple[Job, list[Growing]]], reader: Reader) -> None:
        """Compute prompts as one packed row."""
        found, logits_BV = reader.score([job.prompt for job, _ in scored], [job.request for job, _ in scored])
        for (job, _), scores in zip(scored, found, strict=True):
            request = job.request
            job.scores = scores.of_last(request.prompt_logprobs_last_n) if request.wants_scores else None
        rows = [row for row, (job, group) in enumerate(scored) if job.ends_at_once for _ in group]
        if rows:
            sequences = [sequence for job, group in scored if job.ends_at_once for sequence in group]
            batch = Batch(sequences, None, offsets=[0] * len(rows))
            batch.take(logits_BV[rows], reader)
            self._started(lane, batch, reader)

    def _started(self, lane: _Lane, batch: Batch, reader: Reader) -> None:
        lane.batches.append(batch)
        self.sampled_tokens += len(batch.sequences)
        if not batch.open:
            self._settle(lane, batch, reader)

    def _decode(self, lane: _Lane, batch: Batch, reader: Reader) -> None:
        """Decode a few tokens of a batch, or check its open choices."""
        lane.batches.rotate(-1)
        used, budget = 0, self._settings.prefill_tokens
        for _ in range(self._settings.decode_steps):
            if not batch.open:
                self._join(lane, batch)
                batch.take(batch.step(reader), reader)
                self.sampled_tokens += len(batch.sequences)
            used += self._settle(lane, batch, reader, tokens=budget - used)
            if not batch.sequences or batch.open or used >= budget:
                return

    @staticmethod
    def _join(lane: _Lane, batch: Batch) -> None:
        """Merge other batches of the snapshot into this one."""
        for other in [other for other in lane.batches if other is not batch]:
            if batch.can_join(other):
                batch.join(other)
                lane.batches.remove(other)

    def _settle(self, lane: _Lane, batch: Batch, reader: Reader, *, tokens: int = 0) -> int:
        """Check open choices, up to about `tokens` tokens, and return the number of tokens computed.

        Then finished sequences leave the batch, and sequences with discarded tokens restart.
        """
        used = batch.settle(reader, tokens=tokens)
        self.canonical_tokens += used
        if batch.open:
            return used
        for sequence in batch.leave():
            job = sequence.job
            job.unfinished -= 1
            if not job.unfinished:
                del self._jobs[job.key]
                self._finished.append((job.key, job.outcome()))
        behind = batch.fall_behind()
        if not batch.sequences:
            lane.batches.remove(batch)
        for indices in groups_by_length([sequence.context for sequence in behind]):
            self._started(lane, begin([behind[index] for index in indices], reader), reader)
        return used + sum(sequence.length for sequence in behind)

    # ------------------------------------------------------------------ failures and weights

    def _fail(self, jobs: Sequence[Job], error: Exception) -> None:
        """Report requests as failed."""
        self._withdraw(jobs)
        for job in jobs:
            del self._jobs[job.key]
            self._finished.append((job.key, Failure.of(error)))

    def _again(self, lane: _Lane, jobs: Sequence[Job]) -> None:
        """Restart requests that failed together, each alone, so that only the request at fault fails."""
        self._withdraw(jobs)
        self.begun_again += len(jobs)
        for job in reversed(jobs):
            job.is_alone = True
            job.begin()
            lane.waiting.appendleft(job)

    def _withdraw(self, jobs: Sequence[Job]) -> None:
        """Remove requests from the waiting lists and from all batches."""
        for lane in self._lanes.values():
            lane.waiting = deque(job for job in lane.waiting if job not in jobs)
            for batch in list(lane.batches):
                batch.drop([row for row, sequence in enumerate(batch.sequences) if sequence.job in jobs])
                if not batch.sequences:
                    lane.batches.remove(batch)

    @contextmanager
    def _weights(self, folder: Path | None) -> Iterator[Reader]:
        """Yield a reader of the model with a snapshot's weights."""
        settings, ranks = self._settings, self._engine.ranks
        # every rank of a sharded model makes the same calls, and rounding must not lead ranks to different choices
        agree = itself if self._engine.sharding is None or ranks is None else ranks.spread
        with self._weights_of(folder).applied() as model:
            yield Reader(model, rounding=settings.rounding_of(model), block=settings.check_tokens, agree=agree)

    def _weights_of(self, folder: Path | None) -> Weights:
        """Return the weights of a snapshot; load them if they are not in memory."""
        if folder not in self._loaded:
            while len(self._loaded) >= self._settings.max_snapshots:
                self._prompts.drop(self._loaded.popitem(last=False)[0])
            self._loaded[folder] = self._engine.open_weights(folder)
        self._loaded.move_to_end(folder)
        return self._loaded[folder]
