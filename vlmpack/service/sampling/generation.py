"""Sequences that are sampled together: prefill, decode steps with a key-value cache, and the canonical computation.

    prompts ──prefill──▶ Batch ──take──▶ tokens chosen ──step──▶ logits ──take──▶ ...
                           │ join: batches merge       └─ settle: blocks checked, finished sequences leave

The last digits of a sequence's logits depend on the other sequences in the batch. So a choice that rounding could
change is checked by the *canonical computation*: the sequence alone in one packed row, without a cache. One row checks
a block:

    row       p p p p p  a b c d  e f g .      p prompt, blocks of four tokens, here the second; `.` fills it up
    logits                     e  f g h        if they choose another token, the sequence restarts from there

A row always has the length up to the end of its block, however many tokens of the block are known. Tokens after a
position do not change its logits, bit for bit: their attention weights are zero, and matrix products of the same shape
compute each row in the same way. So the canonical logits of a token depend only on the tokens before it and on the
weights, and therefore every sampled token does too. Mixture-of-experts models are an exception, because the number of
tokens per expert is also a shape. For them a block is one token.

B sequences, S cached tokens with padding, N tokens of a prompt, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from pathlib import Path
from secrets import randbits
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from vlmpack.collate.assemble import join_media, media_table
from vlmpack.families.family import Family
from vlmpack.families.registry import family_of
from vlmpack.layout.media import TEXT
from vlmpack.layout.segments import Segments
from vlmpack.model.head import target_logprobs
from vlmpack.model.plain import cache_name, find_model
from vlmpack.service.engine.datums import EncodedSequence, placeholders_of
from vlmpack.service.engine.rows import last_hidden
from vlmpack.service.sampling import caches
from vlmpack.service.sampling.choice import Choice, Draw, choose
from vlmpack.service.wire import messages

Agree = Callable[[list[Choice]], list[Choice]]
"""Maps the choices of this rank to the choices that count."""


def itself(choices: list[Choice]) -> list[Choice]:
    """Return the choices unchanged, for a model that no other rank computes."""
    return choices


HEAD_CHUNK = 2048
"""Maximum number of rows of logits in memory when the tokens of a prompt get their log-probabilities."""


@final
@dataclass(frozen=True, kw_only=True)
class Ending:
    """When a sequence ends."""

    stop_tokens: frozenset[int]
    """Ids that end the sequence."""
    stop_strings: tuple[str, ...]
    """Strings that end the sequence."""
    max_tokens: int
    """Maximum number of tokens."""
    decode: Callable[[Sequence[int]], str] | None = None
    """Converts token ids to text; None: there are no stop strings."""

    def reason(self, tokens: Sequence[int]) -> messages.StopReason | None:
        """Return why a sequence ends after these tokens; None: it continues.

        The sequence must not have ended at an earlier token.
        """
        if tokens[-1] in self.stop_tokens or self._has_stop_string(tokens):
            return "stop"
        return "length" if len(tokens) >= self.max_tokens else None

    def _has_stop_string(self, tokens: Sequence[int]) -> bool:
        if self.decode is None or not self.stop_strings:
            return False
        # A token is at least one byte, so these tokens contain the longest stop string. The extra 8 cover a character
        # that the slice splits.
        longest = max(len(text.encode()) for text in self.stop_strings)
        text = self.decode(tokens[-(longest + 8) :])
        return any(stop in text for stop in self.stop_strings)


@final
@dataclass(kw_only=True, eq=False)
class Job:
    """A sampling request and its sequences."""

    key: str
    """Key of the request."""
    folder: Path | None
    """Folder of the snapshot; None: the base model."""
    prompt: EncodedSequence
    """The prompt that the sequences continue."""
    request: messages.Sample
    """The request."""
    ending: Ending
    """When the sequences end."""
    waiting: deque[Growing] = field(default_factory=deque)
    """Sequences that have not started."""
    sequences: tuple[Growing, ...] = ()
    """All sequences, in the order of their seeds."""
    scores: messages.PromptScores | None = None
    """Scores of the prompt; None: not requested, or not yet computed."""
    is_cached: bool = False
    """Whether the prompt had been computed for another request."""
    unfinished: int = 0
    """Number of unfinished sequences."""
    is_alone: bool = False
    """Whether the request runs by itself, because it failed together with others."""

    @property
    def needs_scores(self) -> bool:
        """Return whether the prompt's log-probabilities still have to be computed."""
        return self.request.wants_scores and self.scores is None

    @property
    def ends_at_once(self) -> bool:
        """Return whether each sequence has only one token."""
        return self.ending.max_tokens == 1

    @property
    def reserved(self) -> int:
        """Maximum number of tokens that a sequence can reach, including the prompt."""
        return self.prompt.length + self.ending.max_tokens

    def begin(self) -> None:
        """Create the sequences anew, none of them started."""
        seed = self.request.params.seed
        first = randbits(63) if seed is None else seed
        self.sequences = tuple(Growing(job=self, seed=first + i) for i in range(self.request.num_samples))
        self.waiting = deque(self.sequences)
        self.unfinished = len(self.sequences)

    def outcome(self) -> messages.SampleResult | messages.Failure:
        """Return the result of the request."""
        if error := next((sequence.error for sequence in self.sequences if sequence.error), None):
            return messages.Failure(message=error, category="server")
        results = tuple(sequence.result() for sequence in self.sequences)
        hits = self.prompt.length if self.is_cached else 0
        return messages.SampleResult(sequences=results, scores=self.scores, prompt_cache_hit_tokens=hits)


@final
@dataclass(kw_only=True, eq=False)
class Growing:
    """A sequence that is being sampled."""

    job: Job
    """Its request."""
    seed: int
    """Seed of this sequence."""
    tokens: list[int] = field(default_factory=list)
    """Tokens sampled so far."""
    choices: list[Choice] = field(default_factory=list)
    """The choices of these tokens, with their log-probabilities."""
    unsure: list[Draw] = field(default_factory=list)
    """Draws that rounding could change and that have not been checked."""
    stop_reason: messages.StopReason | None = None
    """Why the sequence ended; None: it continues."""
    error: str | None = None
    """Why the sequence failed; None: it did not fail."""

    @property
    def length(self) -> int:
        """Number of tokens, including the prompt."""
        return self.job.prompt.length + len(self.tokens)

    @property
    def context(self) -> EncodedSequence:
        """The prompt followed by the tokens sampled so far."""
        prompt = self.job.prompt
        if not self.tokens:
            return prompt
        return replace(prompt, input_ids=np.concatenate((prompt.input_ids, np.asarray(self.tokens, np.int64))))

    @property
    def draw(self) -> Draw:
        """The draw of the next token."""
        request = self.job.request
        return Draw(params=request.params, seed=self.seed, place=len(self.tokens), top=request.topk_sample_logprobs)

    @property
    def is_done(self) -> bool:
        """Return whether the sequence ended or failed."""
        return self.error is not None or self.stop_reason is not None

    def append(self, choice: Choice) -> None:
        """Append a token."""
        if not np.isfinite(choice.logprob):
            self.error = "the model's logits are not finite: its weights, or the prompt's images, hold NaN or infinity"
        elif not choice.is_sure:
            self.unsure.append(self.draw)
        self.tokens.append(choice.token)
        self.choices.append(choice)
        self.stop_reason = self.job.ending.reason(self.tokens)

    def has_to_be_checked(self, block: int) -> bool:
        """Return whether unsure choices have to be checked now: at the end of the sequence or of a block."""
        return bool(self.unsure) and (self.is_done or len(self.tokens) % block == 0)

    def check(self, choices: Sequence[Choice]) -> None:
        """Replace unsure choices with canonical ones. Discard all tokens after the first choice that differs.

        Args:
            choices: canonical choices for `unsure`, in order.
        """
        draws, self.unsure = self.unsure, []
        for draw, choice in zip(draws, choices, strict=True):
            if choice.token != self.tokens[draw.place]:
                del self.tokens[draw.place :], self.choices[draw.place :]
                self.error = None
                self.append(replace(choice, is_sure=True))
                return
            self.choices[draw.place] = choice

    def result(self) -> messages.SampledSequence:
        """Return the finished sequence."""
        count = self.job.request.topk_sample_logprobs
        top = np.array([choice.top for choice in self.choices]).reshape(len(self.tokens), count, 2)
        tops = messages.TopTokens(ids=top[..., 0].astype(np.int32), logprobs=top[..., 1].astype(np.float32))
        return messages.SampledSequence(
            tokens=np.asarray(self.tokens, np.int32),
            logprobs=np.asarray([choice.logprob for choice in self.choices], np.float32),
            stop_reason=self.stop_reason or "length",
            top=tops if count else None,
        )


# ---------------------------------------------------------------------- calls of the model


@final
class Reader:
    """Runs a model with packing enabled, in evaluation mode."""

    def __init__(self, model: nn.Module, *, rounding: float, block: int = 1, agree: Agree = itself) -> None:
        self.core: Any = find_model(model)
        """The model with its head."""
        self.family: Family = family_of(self.core)
        """Family of the model."""
        self.rounding = rounding
        """Largest error of a logit, as a fraction of the largest absolute logit; infinity: every choice is
        canonical."""
        has_own = getattr(self.core.config.get_text_config(), "enable_moe_block", False)  # Gemma 4's experts
        self.block = 1 if has_own or self.family.has("experts") else block
        """Number of tokens that a canonical row checks."""
        self.device = next(self.core.parameters()).device
        """Device of the model."""
        self.placeholders = tuple(placeholders_of(self.family, self.core.config))
        """Ids of image and video placeholders, which are never sampled."""
        self._fill = next(id_ for id_ in range(3) if id_ not in self.placeholders)  # pads ids
        self._agree = agree
        self._cache_name = cache_name(self.core.forward)

    def choose(self, logits_BV: torch.Tensor, draws: Sequence[Draw], *, is_canonical: bool = False) -> list[Choice]:
        """Choose a token for each sequence. Logits of the canonical computation count as exact."""
        rounding = 0.0 if is_canonical else self.rounding
        return self._agree(choose(logits_BV, draws, rounding=rounding, forbidden=self.placeholders))

    def positions(self, prompt: EncodedSequence) -> torch.Tensor:
        """Return the rotary positions of a prompt, [3, 1, N] or [1, N], on the host."""
        table, segments = media_table([prompt.sample]), Segments.from_lengths([prompt.length])
        return self.family.rotary_ids(self.family.positions(table, segments, config=self.core.config))

    def prefill(self, prompts: Sequence[EncodedSequence]) -> tuple[torch.Tensor, Any]:
        """Return the logits [B, V] after each prompt, and a cache of the prompts, padded on the left."""
        inputs = self._padded(prompts)
        width = inputs["input_ids"].shape[1]
        positions = [F.pad(self.positions(prompt), (width - prompt.length, 0)) for prompt in prompts]
        if all(prompt.length == width for prompt in prompts):
            del inputs["attention_mask"]
        output = self.core(
            **inputs, position_ids=torch.cat(positions, -2).to(self.device), use_cache=True, logits_to_keep=1
        )
        cache = output[self._cache_name]
        caches.check_cache(cache)
        return output.logits[:, -1], cache

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], cache: Any, mask_BS: torch.Tensor | None
    ) -> torch.Tensor:
        """Append one token to each sequence in the cache, and return the logits [B, V] after it.

        Args:
            tokens: the tokens.
            positions: rotary positions of the tokens.
            cache: cache of the preceding tokens.
            mask_BS: 1 for cached tokens and for this token, 0 for padding; None: there is no padding.
        """
        place_B1 = torch.tensor(positions, device=self.device)[:, None]
        ids_B1 = torch.tensor(tokens, device=self.device)[:, None]
        output = self.core(
            input_ids=ids_B1,
            position_ids=place_B1.expand(3, -1, -1) if self.family.positions_rule.axes == 3 else place_B1,
            attention_mask=None if mask_BS is None else mask_BS.to(self.device),
            use_cache=True,
            logits_to_keep=1,
            **self.family.expert_types_of(ids_B1, self.core.config),  # marks of images may be sampled
            **{self._cache_name: cache},
        )
        return output.logits[:, -1]

    def score(
        self, prompts: Sequence[EncodedSequence], requests: Sequence[messages.Sample]
    ) -> tuple[list[messages.PromptScores], torch.Tensor]:
        """Run prompts as one packed row, as in training.

        Args:
            prompts: prompts of some requests.
            requests: the requests, which say what scores they need.

        Returns:
            The scores of each prompt, and the logits [B, V] after each prompt.
        """
        lengths = [prompt.length for prompt in prompts]
        hidden_TD = last_hidden(self.core, prompts)
        pieces = zip(hidden_TD.split(lengths), prompts, requests, strict=True)
        found = [self._scores(hidden_ND[:-1], prompt, request) for hidden_ND, prompt, request in pieces]
        return found, self.family.to_logits(self.core)(hidden_TD[[end - 1 for end in accumulate(lengths)]])

    def _scores(
        self, hidden_nD: torch.Tensor, prompt: EncodedSequence, request: messages.Sample
    ) -> messages.PromptScores:
        """Return the scores of a prompt from the n = N - 1 hidden states before its last token.

        Full logits are computed once for all scores that need them.
        """
        head, length, top = self.family.to_logits(self.core), prompt.length, request.topk_prompt_logprobs
        targets = torch.from_numpy(prompt.input_ids[1:]).to(self.device)
        logprobs = target_logprobs(hidden_nD, targets, head, chunk=HEAD_CHUNK).cpu().numpy()
        wanted, k = request.target_prompt_logprobs, request.prompt_alt_tokens_k
        best, drawn = no_tokens(length, top), no_tokens(length - 1, k)
        rows = np.zeros(0, np.int64) if wanted is None else wanted.keys // max(wanted.shape[1], 1)
        values = np.zeros(len(rows), np.float32)
        chunk = HEAD_CHUNK // 8 if k else HEAD_CHUNK  # drawing takes more memory
        for start in range(0, length - 1, chunk) if top or k or wanted is not None else ():
            logits_nV = head(hidden_nD[start : start + chunk]).float()
            logprobs_nV, end = logits_nV.log_softmax(-1).cpu(), start + len(logits_nV)
            likeliest = logprobs_nV.topk(top)
            best.ids[start + 1 : end + 1], best.logprobs[start + 1 : end + 1] = likeliest.indices, likeliest.values
            for number in range(k):
                seed = (request.params.seed or 0) + (number + 1) * 2**32  # no sequence of the request uses this seed
                params = messages.SamplingParams(temperature=request.params.temperature)
                draws = [Draw(params=params, seed=seed, place=at) for at in range(start, end)]
                choices = self.choose(logits_nV, draws, is_canonical=True)
                drawn.ids[start:end, number] = [choice.token for choice in choices]
                drawn.logprobs[start:end, number] = [choice.logprob for choice in choices]
            if wanted is not None:
                here = np.flatnonzero((rows >= start) & (rows < end) & (wanted.values >= 0))
                values[here] = logprobs_nV.numpy()[rows[here] - start, wanted.values[here]]
        found = None if wanted is None else replace(wanted, values=values)
        logprobs = np.concatenate((np.full(1, np.nan, np.float32), logprobs))
        return messages.PromptScores(logprobs=logprobs, top=best, targets=found, drawn=drawn if k else None)

    def canonical_row(self, sequence: Growing) -> tuple[EncodedSequence, int]:
        """Return the row that checks the block of the last token, and the index of the block's first token."""
        start = (len(sequence.tokens) - 1) // self.block * self.block
        longest = self.family.text_config(self.core.config).max_position_embeddings
        length = min(sequence.job.prompt.length + start + self.block - 1, longest)
        ids = np.full(length, self._fill, np.int64)
        known = sequence.context.input_ids[:length]
        ids[: len(known)] = known
        return replace(sequence.job.prompt, input_ids=ids), start

    def canonical(self, row: EncodedSequence, *, before: int) -> torch.Tensor:
        """Return the logits [block, V] of a canonical row, from its token number `before` on."""
        hidden_TD = last_hidden(self.core, [row])
        return self.family.to_logits(self.core)(hidden_TD[before - 1 :])

    def _padded(self, prompts: Sequence[EncodedSequence]) -> dict[str, torch.Tensor]:
        """Return prompts as a batch [B, S], padded on the left, on the model's device."""
        width, samples = max(prompt.length for prompt in prompts), [prompt.sample for prompt in prompts]

        def padded(rows: Sequence[np.ndarray], fill: int) -> torch.Tensor:
            return torch.stack([F.pad(torch.from_numpy(row), (width - len(row), 0), value=fill) for row in rows])

        ids = padded([sample.input_ids for sample in samples], self._fill)
        tensors = {"input_ids": ids, "attention_mask": padded([np.ones_like(s.input_ids) for s in samples], 0)}
        if self.family.has_vision:
            if self.family.token_types is not None:
                tensors[self.family.token_types] = padded([sample.types for sample in samples], TEXT)
            tensors |= self.family.expert_types_of(ids, self.core.config)
            tensors |= join_media(samples, self.family, self.core.dtype).to_hf()
        return {name: tensor.to(self.device) for name, tensor in tensors.items()}


def no_tokens(places: int, count: int) -> messages.TopTokens:
    """Return an empty table of tokens for some positions, with unknown log-probabilities."""
    ids, logprobs = np.zeros((places, count), np.int32), np.full((places, count), np.nan, np.float32)
    return messages.TopTokens(ids=ids, logprobs=logprobs)


# ---------------------------------------------------------------------- a running batch


@final
class Batch:
    """Sequences that are decoded together.

    At the end of a block, some choices may be open. The batch continues when all of them are checked.
    """

    def __init__(self, sequences: Sequence[Growing], cache: Any, *, offsets: Sequence[int]) -> None:
        self.sequences = list(sequences)
        """Sequences, in the order of the cache's rows."""
        self.cache = cache
        """The key-value cache of the sequences; None: they end at their first token."""
        self.lengths = [sequence.length for sequence in sequences]
        """Number of cached tokens of each sequence."""
        self.offsets = list(offsets)
        """For each sequence, the difference between a token's rotary position and its index."""
        self.open: list[int] = []
        """Rows of sequences with choices to check."""

    @property
    def jobs(self) -> set[Job]:
        """Return the requests of the sequences."""
        return {sequence.job for sequence in self.sequences}

    def take(self, logits_BV: torch.Tensor, reader: Reader) -> None:
        """Choose the next token of each sequence."""
        choices = reader.choose(logits_BV, [sequence.draw for sequence in self.sequences])
        for sequence, choice in zip(self.sequences, choices, strict=True):
            sequence.append(choice)
        rows = enumerate(self.sequences)
        self.open = [row for row, sequence in rows if sequence.has_to_be_checked(reader.block)]

    def settle(self, reader: Reader, *, tokens: int) -> int:
        """Check open choices with the canonical computation.

        Args:
            reader: the model.
            tokens: start no further computation once this many tokens have been computed.

        Returns:
            The number of tokens computed.
        """
        used, known = 0, {}
        while self.open and used < tokens:
            sequence = self.sequences[self.open.pop()]
            row, start = reader.canonical_row(sequence)
            prompt = sequence.job.prompt
            key = (id(prompt), row.input_ids.tobytes())  # samples of a prompt may share a prefix
            if key not in known:
                known = {key: reader.canonical(row, before=prompt.length + start)}
                used += row.length
            draws = sequence.unsure
            logits = known[key][[draw.place - start for draw in draws]]
            sequence.check(reader.choose(logits, draws, is_canonical=True))
        return used

    def leave(self) -> list[Growing]:
        """Remove finished sequences and return them."""
        done = [row for row, sequence in enumerate(self.sequences) if sequence.is_done]
        sequences = [self.sequences[row] for row in done]
        self.drop(done)
        return sequences

    def fall_behind(self) -> list[Growing]:
        """Remove and return the sequences whose cache holds discarded tokens. They have to be prefilled again."""
        rows = [row for row, sequence in enumerate(self.sequences) if sequence.length <= self.lengths[row]]
        behind = [self.sequences[row] for row in rows]
        self.drop(rows)
        return behind

    def drop(self, rows: Sequence[int]) -> None:
        """Remove the sequences of some rows, even while choices are open."""
        if rows:
            kept = [row for row in range(len(self.sequences)) if row not in rows]
            self.open = [place for place, row in enumerate(kept) if row in self.open]
            self.keep(kept)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only the sequences of these rows, and trim padding that all of them share."""
        before = max(self.lengths, default=0)
        self.sequences = [self.sequences[row] for row in rows]
        self.offsets = [self.offsets[row] for row in rows]
        self.lengths = [self.lengths[row] for row in rows]
        if not rows:
            self.cache = None
        elif self.cache is not None:
            caches.select(self.cache, torch.tensor(rows))
            caches.shift(self.cache, max(self.lengths) - before)

    def step(self, reader: Reader) -> torch.Tensor:
        """Run each sequence's last token through the model and return logits [B, V]."""
        positions = [length + offset for length, offset in zip(self.lengths, self.offsets, strict=True)]
        width, mask = max(self.lengths), None
        if min(self.lengths) < width:
            starts = torch.tensor([width - length for length in self.lengths])
            mask = (torch.arange(width + 1) >= starts[:, None]).long()
        logits_BV = reader.decode([s.tokens[-1] for s in self.sequences], positions, self.cache, mask)
        self.lengths = [length + 1 for length in self.lengths]
        return logits_BV

    def can_join(self, other: Batch) -> bool:
        """Return whether neither batch has open choices, and padding would be at most half of the joint cache."""
        if self.cache is None or other.cache is None or self.open or other.open:
            return False
        if any(job.is_alone for job in self.jobs | other.jobs):
            return False
        lengths = (*self.lengths, *other.lengths)
        return len(lengths) * max(lengths) <= 2 * sum(lengths)

    def join(self, other: Batch) -> None:
        """Append the sequences of another batch. The other batch must not be used afterwards."""
        mine, its = max(self.lengths), max(other.lengths)
        caches.shift(self.cache, max(its - mine, 0))
        caches.shift(other.cache, max(mine - its, 0))
        caches.join(self.cache, other.cache)
        self.sequences += other.sequences
        self.lengths += other.lengths
        self.offsets += other.offsets


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Prefilled:
    """A prompt that went through the model."""

    length: int
    """Number of tokens."""
    logits_V: torch.Tensor
    """Logits after the last token."""
    cache: Any
    """Cache of this one sequence."""
    offset: int
    """Difference between rotary position and index of the tokens that follow."""

    def begin(self, sequences: Sequence[Growing], reader: Reader) -> Batch:
        """Start sequences after the prompt, and choose their next tokens."""
        cache = caches.selected(self.cache, [0] * len(sequences))
        batch = Batch(sequences, cache, offsets=[self.offset] * len(sequences))
        batch.take(self.logits_V.expand(len(sequences), -1), reader)
        return batch


def begin(
    sequences: Sequence[Growing], reader: Reader, *, keep: Callable[[EncodedSequence, Prefilled], None] | None = None
) -> Batch:
    """Prefill the contexts of sequences, each distinct context once, and choose the next tokens.

    Args:
        sequences: sequences to start; equal contexts must be adjacent.
        reader: the model.
        keep: called with each prefilled prompt; None: keep none.
    """
    groups = [list(group) for _, group in groupby(sequences, key=lambda s: (s.job.prompt.digest, *s.tokens))]
    contexts = [group[0].context for group in groups]
    logits_BV, cache = reader.prefill(contexts)
    longest = max(context.length for context in contexts)
    offsets = [int(reader.positions(context).max()) + 1 - context.length for context in contexts]
    if keep is not None:
        for row, context in enumerate(contexts):
            of_row = caches.selected(cache, [row])
            caches.shift(of_row, context.length - longest)
            keep(context, Prefilled(length=context.length, logits_V=logits_BV[row], cache=of_row, offset=offsets[row]))
    rows = torch.tensor([index for index, group in enumerate(groups) for _ in group])
    if len(rows) > len(groups):
        caches.select(cache, rows)
    batch = Batch(sequences, cache, offsets=[offsets[row] for row in rows])
    batch.take(logits_BV[rows.to(logits_BV.device)], reader)
    return batch


def groups_by_length(prompts: Sequence[EncodedSequence]) -> list[list[int]]:
    """Return groups of indices of prompts to prefill together, with at most a fifth of padding."""
    groups: list[list[int]] = []
    for index in sorted(range(len(prompts)), key=lambda index: -prompts[index].length):
        length, group = prompts[index].length, groups[-1] if groups else []
        longest = prompts[group[0]].length if group else 0
        real = sum(prompts[other].length for other in group) + length
        if group and 5 * real >= 4 * longest * (len(group) + 1):
            group.append(index)
        else:
            groups.append([index])
    return groups
