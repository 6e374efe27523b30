"""Sequences that grow together: prefill, decode steps with a key-value cache, and the canonical computation.

    prompts ──prefill──▶ Batch ──take──▶ tokens chosen ──step──▶ logits ──take──▶ ...
                           │ join: batches merge       └─ settle: blocks checked, finished sequences leave

A sequence's logits depend in the last digits on what shares its batch. So a choice that rounding could change is
checked by the *canonical computation*: the sequence alone in one packed row, without a cache. One row checks a block:

    row       p p p p p  a b c d  e f g .      p prompt, blocks of four tokens, here the second; `.` fills it up
    logits                     e  f g h        where they differ from what was chosen, the sequence begins again there

A row is as long as its block, however many tokens are known. What comes after a token has no part in its logits, bit
for bit: its weights are zeros of attention, and rows of a product of one shape are computed alike. So the canonical
logits of a token depend on the tokens before it and on the weights alone, and so then does every token. Experts are the
exception, as how many tokens each one has is a shape too: there a block is one token.

B sequences, S cached tokens with padding, N tokens of a prompt, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from vlmpack.families.family import Family
from vlmpack.families.registry import family_of
from vlmpack.model.head import target_logprobs
from vlmpack.model.plain import cache_name, find_model
from vlmpack.service import caches
from vlmpack.service.choice import Choice, Draw, choose
from vlmpack.service.datums import EncodedSequence
from vlmpack.service.messages import PromptScores, Sample, SampledSequence, SamplingParams, StopReason, TopTokens
from vlmpack.service.rows import last_hidden, tokens_row

Agree = Callable[[list[Choice]], list[Choice]]
"""Choices of this rank to those that count."""


def itself(choices: list[Choice]) -> list[Choice]:
    """The choices of a model that no other rank computes."""
    return choices


HEAD_CHUNK = 2048
"""Rows of logits alive at a time where each token of a prompt gets its log-probability."""


@final
@dataclass(frozen=True, kw_only=True)
class Ending:
    """When a sequence ends."""

    stop_tokens: frozenset[int]
    """Ids that end it."""
    stop_strings: tuple[str, ...]
    """Texts that end it."""
    max_tokens: int
    """Most tokens."""
    decode: Callable[[Sequence[int]], str] | None = None
    """Token ids to text; None: there are no stop strings."""

    def reason(self, tokens: Sequence[int]) -> StopReason | None:
        """Return why a sequence ends after these tokens; None: it goes on. It did not end at an earlier one."""
        if tokens[-1] in self.stop_tokens or self._has_stop_string(tokens):
            return "stop"
        return "length" if len(tokens) >= self.max_tokens else None

    def _has_stop_string(self, tokens: Sequence[int]) -> bool:
        if self.decode is None or not self.stop_strings:
            return False
        # A token is a byte at least; a few more, for a character that the cut splits.
        longest = max(len(text.encode()) for text in self.stop_strings)
        text = self.decode(tokens[-(longest + 8) :])
        return any(stop in text for stop in self.stop_strings)


@final
@dataclass(kw_only=True, eq=False)
class Growing:
    """One sequence that is being sampled."""

    prompt: EncodedSequence
    """Its prompt."""
    params: SamplingParams
    """Its settings."""
    ending: Ending
    """When it ends."""
    seed: int
    """Its own seed."""
    key: str = ""
    """Of its request."""
    is_alone: bool = False
    """True if it runs with sequences of its own request only."""
    top: int = 0
    """Most likely tokens that are wanted beside each."""
    tokens: list[int] = field(default_factory=list)
    """Tokens sampled so far."""
    choices: list[Choice] = field(default_factory=list)
    """The same with their log-probabilities."""
    unsure: list[Draw] = field(default_factory=list)
    """Draws that rounding could change, and that are not checked."""
    stop_reason: StopReason | None = None
    """Why it ended; None: it goes on."""
    error: str | None = None
    """Why it failed; None: it did not."""

    @property
    def reserved(self) -> int:
        """Tokens that it may grow to."""
        return self.prompt.length + self.ending.max_tokens

    @property
    def context(self) -> EncodedSequence:
        """Its prompt with the tokens sampled so far."""
        if not self.tokens:
            return self.prompt
        ids = np.concatenate((self.prompt.input_ids, np.asarray(self.tokens, np.int64)))
        return replace(self.prompt, input_ids=ids)

    @property
    def draw(self) -> Draw:
        """The next token."""
        return Draw(params=self.params, seed=self.seed, place=len(self.tokens), top=self.top)

    @property
    def is_done(self) -> bool:
        """Return whether it ended or failed."""
        return self.error is not None or self.stop_reason is not None

    def append(self, choice: Choice) -> None:
        """Add a token."""
        if not np.isfinite(choice.logprob):
            self.error = "the model's logits are not finite: its weights, or the prompt's images, hold NaN or infinity"
        elif not choice.is_sure:
            self.unsure.append(self.draw)
        self.tokens.append(choice.token)
        self.choices.append(choice)
        self.stop_reason = self.ending.reason(self.tokens)

    def has_to_be_checked(self, block: int) -> bool:
        """Return whether choices that rounding could change are checked now: at the end, or where a block ends."""
        return bool(self.unsure) and (self.is_done or len(self.tokens) % block == 0)

    def check(self, choices: Sequence[Choice]) -> int:
        """Put canonical choices in the place of those that were not sure; from the first that differs, forget the rest.

        Args:
            choices: of `unsure`, in order.

        Returns:
            Tokens forgotten: those behind the first that differs.
        """
        draws, self.unsure = self.unsure, []
        for draw, choice in zip(draws, choices, strict=True):
            if choice.token != self.tokens[draw.place]:
                behind = len(self.tokens) - draw.place - 1
                del self.tokens[draw.place :], self.choices[draw.place :]
                self.error = None
                self.append(replace(choice, is_sure=True))
                return behind
            self.choices[draw.place] = choice
        return 0

    def result(self) -> SampledSequence:
        """The finished sequence."""
        top = np.array([choice.top for choice in self.choices]).reshape(len(self.tokens), self.top, 2)
        tops = TopTokens(ids=top[..., 0].astype(np.int32), logprobs=top[..., 1].astype(np.float32))
        return SampledSequence(
            tokens=np.asarray(self.tokens, np.int32),
            logprobs=np.asarray([choice.logprob for choice in self.choices], np.float32),
            stop_reason=self.stop_reason or "length",
            top=tops if self.top else None,
        )


# ---------------------------------------------------------------------- calls of the model


@final
class Reader:
    """Calls of one model with packing enabled, in evaluation mode."""

    def __init__(self, model: nn.Module, *, rounding: float, block: int = 1, agree: Agree = itself) -> None:
        self.core: Any = find_model(model)
        """The model with its head."""
        self.family: Family = family_of(self.core)
        """Its family."""
        self.rounding = rounding
        """Largest error of a logit as a part of the largest one's size; infinity: every choice is canonical."""
        self.block = 1 if self.family.has("experts") else block
        """Tokens that a canonical row checks."""
        self.device = next(self.core.parameters()).device
        """Where it lies."""
        self._agree = agree
        self._cache_name = cache_name(self.core.forward)

    @property
    def placeholders(self) -> tuple[int, ...]:
        """Ids that stand for images and videos, which are never sampled."""
        config = self.core.config
        return (config.image_token_id, config.video_token_id) if self.family.has_vision else ()

    def choose(self, logits_BV: torch.Tensor, draws: Sequence[Draw], *, is_canonical: bool = False) -> list[Choice]:
        """Choose a token for each sequence; logits of the canonical computation count as exact."""
        rounding = 0.0 if is_canonical else self.rounding
        return self._agree(choose(logits_BV, draws, rounding=rounding, forbidden=self.placeholders))

    def positions(self, prompt: EncodedSequence) -> torch.Tensor:
        """Rotary positions of a prompt, [3, 1, N] or [1, N], on the host."""
        config = self.core.config
        row = tokens_row([prompt], config.image_token_id if self.family.has_vision else None)
        table = row.known_metadata.media
        assert table is not None, "the row has it"
        return self.family.rotary_ids(self.family.positions(table, row.segments, config=config))

    def prefill(self, prompts: Sequence[EncodedSequence]) -> tuple[torch.Tensor, Any]:
        """Return the logits [B, V] after each prompt, and a cache that holds the prompts, padded on the left."""
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
        """Return logits [B, V] after one more token of each sequence, which the cache then holds.

        Args:
            tokens: the tokens.
            positions: their rotary positions.
            cache: what came before.
            mask_BS: 1 on cached tokens and on this one, 0 on padding; None: there is no padding.
        """
        place_B1 = torch.tensor(positions, device=self.device)[:, None]
        output = self.core(
            input_ids=torch.tensor(tokens, device=self.device)[:, None],
            position_ids=place_B1.expand(3, -1, -1) if self.family.has_vision else place_B1,
            attention_mask=None if mask_BS is None else mask_BS.to(self.device),
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_name: cache},
        )
        return output.logits[:, -1]

    def score(
        self, prompts: Sequence[EncodedSequence], requests: Sequence[Sample]
    ) -> tuple[list[PromptScores], torch.Tensor]:
        """Run prompts as one packed row, as in training.

        Args:
            prompts: of some requests.
            requests: what is wanted of each.

        Returns:
            The scores of each prompt; and the logits [B, V] after each prompt.
        """
        lengths = [prompt.length for prompt in prompts]
        hidden_TD = last_hidden(self.core, prompts)
        pieces = zip(hidden_TD.split(lengths), prompts, requests, strict=True)
        found = [self._scores(hidden_ND[:-1], prompt, request) for hidden_ND, prompt, request in pieces]
        return found, self.family.to_logits(self.core)(hidden_TD[[end - 1 for end in accumulate(lengths)]])

    def _scores(self, hidden_nD: torch.Tensor, prompt: EncodedSequence, request: Sample) -> PromptScores:
        """Scores of the n = N - 1 tokens after the first; logits are computed once for all that needs whole ones."""
        head, length, top = self.family.to_logits(self.core), prompt.length, request.topk_prompt_logprobs
        targets = torch.from_numpy(prompt.input_ids[1:]).to(self.device)
        logprobs = target_logprobs(hidden_nD, targets, head, chunk=HEAD_CHUNK).cpu().numpy()
        wanted, k = request.target_prompt_logprobs, request.prompt_alt_tokens_k
        best, drawn = no_tokens(length, top), no_tokens(length - 1, k)
        rows = np.zeros(0, np.int64) if wanted is None else wanted.keys // max(wanted.shape[1], 1)
        values = np.zeros(len(rows), np.float32)
        chunk = HEAD_CHUNK // 8 if k else HEAD_CHUNK  # draws take more memory
        for start in range(0, length - 1, chunk) if top or k or wanted is not None else ():
            logits_nV = head(hidden_nD[start : start + chunk]).float()
            logprobs_nV, end = logits_nV.log_softmax(-1).cpu(), start + len(logits_nV)
            likeliest = logprobs_nV.topk(top)
            best.ids[start + 1 : end + 1], best.logprobs[start + 1 : end + 1] = likeliest.indices, likeliest.values
            for number in range(k):
                seed = (request.params.seed or 0) + (number + 1) * 2**32  # of no sequence of the request
                params = SamplingParams(temperature=request.params.temperature)
                draws = [Draw(params=params, seed=seed, place=at) for at in range(start, end)]
                choices = self.choose(logits_nV, draws, is_canonical=True)
                drawn.ids[start:end, number] = [choice.token for choice in choices]
                drawn.logprobs[start:end, number] = [choice.logprob for choice in choices]
            if wanted is not None:
                here = np.flatnonzero((rows >= start) & (rows < end) & (wanted.values >= 0))
                values[here] = logprobs_nV.numpy()[rows[here] - start, wanted.values[here]]
        found = None if wanted is None else replace(wanted, values=values)
        logprobs = np.concatenate((np.full(1, np.nan, np.float32), logprobs))
        return PromptScores(logprobs=logprobs, top=best, targets=found, drawn=drawn if k else None)

    def canonical_row(self, sequence: Growing) -> tuple[EncodedSequence, int]:
        """Return the row that checks the block of the last token, and the first place of this block."""
        start = (len(sequence.tokens) - 1) // self.block * self.block
        longest = self.family.text_config(self.core.config).max_position_embeddings
        length = min(sequence.prompt.length + start + self.block - 1, longest)
        ids = np.full(length, self._fill, np.int64)
        known = sequence.context.input_ids[:length]
        ids[: len(known)] = known
        return replace(sequence.prompt, input_ids=ids), start

    def canonical(self, row: EncodedSequence, *, before: int) -> torch.Tensor:
        """Return the logits [block, V] of a canonical row from after its first `before` tokens on."""
        hidden_TD = last_hidden(self.core, [row])
        return self.family.to_logits(self.core)(hidden_TD[before - 1 :])

    @property
    def _fill(self) -> int:
        """An id that stands for nothing."""
        return next(id_ for id_ in range(3) if id_ not in self.placeholders)

    def _padded(self, prompts: Sequence[EncodedSequence]) -> dict[str, torch.Tensor]:
        """Prompts as a batch [B, S], padded on the left, on the model's device."""
        width = max(prompt.length for prompt in prompts)
        rows = [torch.from_numpy(prompt.input_ids) for prompt in prompts]
        ids = torch.stack([F.pad(row, (width - len(row), 0), value=self._fill) for row in rows])
        mask = torch.stack([F.pad(torch.ones_like(row), (width - len(row), 0)) for row in rows])
        tensors = {"input_ids": ids, "attention_mask": mask}
        if self.family.has_vision:
            tensors["mm_token_type_ids"] = self.family.media_types(ids, self.core.config)
        if images := [image for prompt in prompts for image in prompt.images]:
            tensors["pixel_values"] = torch.cat([image.pixel_values for image in images])
            tensors["image_grid_thw"] = torch.tensor([image.grid for image in images])
        return {name: tensor.to(self.device) for name, tensor in tensors.items()}


def no_tokens(places: int, count: int) -> TopTokens:
    """Return a table of tokens for some places, to be filled; none is known."""
    ids, logprobs = np.zeros((places, count), np.int32), np.full((places, count), np.nan, np.float32)
    return TopTokens(ids=ids, logprobs=logprobs)


# ---------------------------------------------------------------------- a running batch


@final
class Batch:
    """Sequences that are decoded together.

    Where a block ends, the choices of some may be open. The batch goes on when all are settled.
    """

    def __init__(self, sequences: Sequence[Growing], cache: Any, *, offsets: Sequence[int]) -> None:
        self.sequences = list(sequences)
        """In the order of the cache's rows."""
        self.cache = cache
        """The cache of what they begin with; None: they end at their first token."""
        self.lengths = [sequence.prompt.length + len(sequence.tokens) for sequence in sequences]
        """Cached tokens of each."""
        self.offsets = list(offsets)
        """The difference between the rotary position of a token and its place in the sequence."""
        self.open: list[int] = []
        """Sequences whose choices are to be checked, by row."""
        self.forgotten = 0
        """Tokens that checks have taken back."""

    def take(self, logits_BV: torch.Tensor, reader: Reader) -> None:
        """Choose the next token of each sequence."""
        choices = reader.choose(logits_BV, [sequence.draw for sequence in self.sequences])
        for sequence, choice in zip(self.sequences, choices, strict=True):
            sequence.append(choice)
        rows = enumerate(self.sequences)
        self.open = [row for row, sequence in rows if sequence.has_to_be_checked(reader.block)]

    def settle(self, reader: Reader, *, tokens: int) -> int:
        """Check open choices by the canonical computation.

        Args:
            reader: the model.
            tokens: stop before the next computation once so many have been computed.

        Returns:
            Tokens computed.
        """
        used, known = 0, {}
        while self.open and used < tokens:
            sequence = self.sequences[self.open.pop()]
            row, start = reader.canonical_row(sequence)
            key = (id(sequence.prompt), row.input_ids.tobytes())  # samples of one prompt may begin alike
            if key not in known:
                known = {key: reader.canonical(row, before=sequence.prompt.length + start)}
                used += row.length
            draws = sequence.unsure
            logits = known[key][[draw.place - start for draw in draws]]
            self.forgotten += sequence.check(reader.choose(logits, draws, is_canonical=True))
        return used

    def leave(self) -> list[Growing]:
        """Take finished sequences out."""
        kept = [row for row, sequence in enumerate(self.sequences) if not sequence.is_done]
        done = [sequence for sequence in self.sequences if sequence.is_done]
        if done:
            self.keep(kept)
        return done

    def fall_behind(self) -> list[Growing]:
        """Take out sequences of which the cache holds tokens that a check took back; they begin again."""
        held = zip(self.sequences, self.lengths, strict=True)
        is_behind = [sequence.prompt.length + len(sequence.tokens) <= length for sequence, length in held]
        behind = [sequence for sequence, is_late in zip(self.sequences, is_behind, strict=True) if is_late]
        if behind:
            self.keep([row for row, is_late in enumerate(is_behind) if not is_late])
        return behind

    def drop(self, rows: Sequence[int]) -> None:
        """Take sequences out wherever they are, also while choices are open."""
        if rows:
            kept = [row for row in range(len(self.sequences)) if row not in rows]
            self.open = [place for place, row in enumerate(kept) if row in self.open]
            self.keep(kept)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep the sequences of these rows alone, and no padding that all of them have."""
        before = max(self.lengths, default=0)
        self.sequences = [self.sequences[row] for row in rows]
        self.offsets = [self.offsets[row] for row in rows]
        self.lengths = [self.lengths[row] for row in rows]
        if not rows:
            self.cache = None
        elif self.cache is not None:
            caches.select(self.cache, torch.tensor(rows))
            caches.trim_left(self.cache, before - max(self.lengths))

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
        """Return whether both are settled, and padding would be at most half of what they cache together."""
        if self.cache is None or other.cache is None or self.open or other.open:
            return False
        if any(sequence.is_alone for sequence in (*self.sequences, *other.sequences)):
            return False
        lengths = (*self.lengths, *other.lengths)
        return len(lengths) * max(lengths) <= 2 * sum(lengths)

    def join(self, other: Batch) -> None:
        """Take in the sequences of another batch, which is used up."""
        mine, its = max(self.lengths), max(other.lengths)
        caches.pad_left(self.cache, max(its - mine, 0))
        caches.pad_left(other.cache, max(mine - its, 0))
        caches.join(self.cache, other.cache)
        self.sequences += other.sequences
        self.lengths += other.lengths
        self.offsets += other.offsets


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Prefilled:
    """A prompt that went through the model."""

    length: int
    """Its tokens."""
    logits_V: torch.Tensor
    """After its last token."""
    cache: Any
    """Of this one sequence."""
    offset: int
    """The difference between the rotary position of what follows and its place."""

    def begin(self, sequences: Sequence[Growing], reader: Reader) -> Batch:
        """Let sequences begin after it, and choose their next tokens."""
        cache = caches.selected(self.cache, [0] * len(sequences))
        batch = Batch(sequences, cache, offsets=[self.offset] * len(sequences))
        batch.take(self.logits_V.expand(len(sequences), -1), reader)
        return batch


def begin(
    sequences: Sequence[Growing], reader: Reader, *, keep: Callable[[EncodedSequence, Prefilled], None] | None = None
) -> Batch:
    """Prefill what sequences begin with, each prompt once, and choose their next tokens.

    Args:
        sequences: those that begin alike are adjacent.
        reader: the model.
        keep: is called with each prompt; None: they are not kept.
    """
    groups = [list(group) for _, group in groupby(sequences, key=lambda s: (s.prompt.digest, *s.tokens))]
    contexts = [group[0].context for group in groups]
    logits_BV, cache = reader.prefill(contexts)
    longest = max(context.length for context in contexts)
    offsets = [int(reader.positions(context).max()) + 1 - context.length for context in contexts]
    if keep is not None:
        for row, context in enumerate(contexts):
            of_row = caches.selected(cache, [row])
            caches.trim_left(of_row, longest - context.length)
            keep(context, Prefilled(length=context.length, logits_V=logits_BV[row], cache=of_row, offset=offsets[row]))
    rows = torch.tensor([index for index, group in enumerate(groups) for _ in group])
    if len(rows) > len(groups):
        caches.select(cache, rows)
    batch = Batch(sequences, cache, offsets=[offsets[row] for row in rows])
    batch.take(logits_BV[rows.to(logits_BV.device)], reader)
    return batch


def groups_by_length(prompts: Sequence[EncodedSequence]) -> list[list[int]]:
    """Indices of prompts that are prefilled together, with a fifth of padding at most."""
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
