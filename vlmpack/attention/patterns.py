"""Patterns: the keys that a layer's queries attend to, and how their scores become weights.

    causal        every earlier token of the sample, and the token itself
    window        of these the nearest `window`                    Mistral, Gemma, Olmo 3, Cohere 2, gpt-oss
    chunk         those of the same chunk of its sample            Llama 4
    softcap       scores s become softcap * tanh(s / softcap)      Gemma 2
    sinks         one more key a head, with a score and no value   gpt-oss
    spans         later tokens of the same span (`spans.py`)       Gemma 3 and 4, PaliGemma

**Windows by blocks.** A segment longer than two windows is cut into blocks of W queries, each of which has 2 W keys: so
work grows with L W and masks are [W, 2 W]. W = 3, a segment of 11 tokens:

    first    0 1 2             keys 0 1 2                 causal
    middle   3 4 5, 6 7 8      keys 0 .. 5, 3 .. 8        one call, one mask
    last     9 10              keys 6 .. 10               the same mask, its first rows

**Chunks are finer segments.** A sample is cut every C tokens from its start, so any back-end computes them (`Chunks`).
Where queries are the last ones of their keys (`keys`), so are those of each chunk, and keys of earlier chunks go.

**Sinks as a key.** One more channel of the queries holds sink / scale (a second one what rounding left of it), and is 0
in all keys but a first one, which is 0 elsewhere and has no value. Its score is then the sink, and PyTorch's own
attention computes sinks with their gradients.

L queries, L' keys of a segment, the last L of which are at the places of the queries; N query heads, K key-value heads
(N a multiple of K), H head dimension, W window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vlmpack.attention.spans import Spans
from vlmpack.layout.device import to_device
from vlmpack.layout.segments import Segments, ranges

SINK_CHANNELS = 8
"""Channels that sinks add to queries and keys: two are used, the others keep kernels' alignment."""


@final
@dataclass(frozen=True, kw_only=True)
class Reach:
    """The tokens before it that a query of a layer attends to: all, or those of its window or of its chunk."""

    window: int | None = None
    """Tokens that a query attends to, itself included; None: no window."""
    chunk: int | None = None
    """Tokens of a chunk, counted from the start of the sample, which attend to none before it; None: no chunks."""

    def __str__(self) -> str:
        return "sample" if not self.is_local else f"chunk of {self.chunk}" if self.chunk else f"window of {self.window}"

    @property
    def is_local(self) -> bool:
        """Return whether some tokens before a query are out of its reach."""
        return self != EVERYTHING

    def first_key(self, place: int) -> int:
        """The place in the sample of the first token that the query at `place` attends to."""
        if self.chunk is not None:
            return place // self.chunk * self.chunk
        return 0 if self.window is None else max(place + 1 - self.window, 0)

    def queries_of(self, place: int) -> int:
        """The place behind the last query that attends to the token at `place`, in a sample that goes on for ever."""
        if self.chunk is not None:
            return (place // self.chunk + 1) * self.chunk
        return ENDLESS if self.window is None else place + self.window


EVERYTHING = Reach()
"""All tokens before a query."""
ENDLESS = 1 << 62
"""A place behind those of any sample."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Pattern:
    """A pattern of one layer beside causal attention within samples."""

    window: int | None = None
    """Tokens that a query attends to, itself included; None: all before it."""
    chunk: int | None = None
    """Tokens of a chunk of a sample, which attend to none before it; None: there are no chunks."""
    softcap: float | None = None
    """The bound of scores; None: they have none."""
    sinks: Tensor | None = None
    """[N]: of each head the score of a key without value; None: there is none."""
    spans: Spans | None = None
    """Runs of tokens of the row that see each other in both directions, in no layer with chunks; None: none."""

    @property
    def names(self) -> tuple[str, ...]:
        """The parts that a back-end has to compute."""
        return tuple(name for name, value in vars(self).items() if value is not None)

    @property
    def causal_part(self) -> Pattern:
        """The pattern without spans."""
        return self if self.spans is None else replace(self, spans=None)

    def of_heads(self, first: int, count: int) -> Pattern:
        """The pattern of `count` heads from head `first` on."""
        if self.sinks is None or len(self.sinks) == count:
            return self
        return replace(self, sinks=self.sinks[first : first + count])


CAUSAL = Pattern()
"""No pattern beside causal attention."""


def attended_pairs(segments: Segments, reach: Reach = EVERYTHING) -> int:
    """Query-key pairs of causal attention in one layer: of n tokens n (n + 1) / 2, less those out of its reach."""
    if reach.chunk is not None:
        return segments.in_chunks(reach.chunk).attended_pairs
    if reach.window is None:
        return segments.attended_pairs
    beyond = (max(length - reach.window, 0) for length in segments.sample_lengths)
    return segments.attended_pairs - sum(n * (n + 1) // 2 for n in beyond)


# ---------------------------------------------------------------------- chunks


@final
@dataclass(frozen=True, kw_only=True)
class Chunks:
    """The boundaries of a row's chunks."""

    queries: Segments
    """Of its queries."""
    keys: Segments
    """Of the keys in the chunks that have queries; the last query of each is at the place of its last key."""
    key_index: np.ndarray | None = None
    """int64 [S]: where these are among all keys; None: they are all keys."""

    @classmethod
    def of(cls, segments: Segments, keys: Segments, size: int) -> Chunks:
        """Cut a row into chunks of `size` tokens, counted from the first key of each segment.

        Args:
            segments: the boundaries of the queries.
            keys: those of the keys: the same, or of as many segments, without gaps; the last query of each is at the
                place of its last key.
            size: tokens of a chunk.
        """
        if keys is segments:
            cut = segments.in_chunks(size)
            return cls(queries=cut, keys=cut)
        queries, visible, first = [], [], []
        for length, (start, stop) in zip(segments.lengths, keys.spans, strict=True):
            for at in range((stop - start - length) // size * size, stop - start, size):
                end = min(at + size, stop - start)
                queries.append(end - max(at, stop - start - length))
                visible.append(end - at)
                first.append(start + at)
        key_index = ranges(np.asarray(first, np.int64), np.asarray(visible, np.int64))
        return cls(
            queries=Segments.from_lengths(queries),
            keys=Segments.from_lengths(visible),
            key_index=None if len(key_index) == keys.total else key_index,
        )


# ---------------------------------------------------------------------- the dense mask


def key_bounds(segments: Segments, keys: Segments, *, causal: bool, pattern: Pattern = CAUSAL) -> np.ndarray:
    """The keys of a query are neighbors, whatever the pattern: int32 [2, T], the first of each query and the place
    behind the last.

    Args:
        segments: the boundaries of the queries.
        keys: those of the keys; the last query of each segment is at the place of its last key.
        causal: False if a token sees all of its segment, whatever the pattern.
        pattern: window, chunk and spans of the layer.
    """
    lengths_G = np.asarray(segments.lengths, np.int64)
    first_G, end_G = np.asarray(keys.spans[: len(lengths_G)], np.int64).T
    first_R, end_R = np.repeat(first_G, lengths_G), np.repeat(end_G, lengths_G)
    if causal:
        place_R = ranges(end_G - lengths_G, lengths_G)
        end_R = place_R + 1
        if pattern.chunk is not None:
            first_R += (place_R - first_R) // pattern.chunk * pattern.chunk
        elif pattern.window is not None:
            first_R = np.maximum(first_R, end_R - pattern.window)
    bounds_2T = np.stack([first_R, end_R]).astype(np.int32)
    spans = pattern.spans if causal and pattern.spans is not None else Spans(runs=())
    for start, stop in spans.runs:
        first_T, end_T = bounds_2T[:, start:stop]
        if spans.beyond_window:
            np.minimum(first_T, end_T[0] - 1, out=first_T)
        end_T[:] = end_T[-1]
    return bounds_2T


def visible_keys(
    segments: Segments, keys: Segments, device: torch.device, *, causal: bool, pattern: Pattern = CAUSAL
) -> Tensor:
    """The mask of a whole row, bool [T, T']: query (row) may read key (column). Arguments as of
    `key_bounds`."""
    first_T, end_T = to_device(key_bounds(segments, keys, causal=causal, pattern=pattern), device)
    key_T = torch.arange(keys.total, device=device)
    return (key_T >= first_T[:, None]) & (key_T < end_T[:, None])


# ---------------------------------------------------------------------- n segments of a length

AttendMasked = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""[n, L, N, H], keys and values [n, L', K, H], bool [L, L'] to [n, L, N, H]; no mask: causal, L = L' or L = 1."""


def windowed(q_nLNH: Tensor, k_nLKH: Tensor, v_nLKH: Tensor, window: int | None, attend: AttendMasked) -> Tensor:
    """AttendMasked causally within a window: by blocks where segments are longer than two of them."""
    queries, visible = q_nLNH.shape[1], k_nLKH.shape[1]
    if window is None or visible <= window:
        return attend(q_nLNH, k_nLKH, v_nLKH, _last_queries(queries, visible, q_nLNH.device))
    if queries < visible or visible <= 2 * window:
        reach = min(visible, queries + window)  # the keys before these are in no query's window
        mask = _in_window(queries, reach, window, q_nLNH.device)
        return attend(q_nLNH, k_nLKH[:, -reach:], v_nLKH[:, -reach:], mask)
    return _by_blocks(q_nLNH, k_nLKH, v_nLKH, window, attend)


def _by_blocks(q_nLNH: Tensor, k_nLKH: Tensor, v_nLKH: Tensor, window: int, attend: AttendMasked) -> Tensor:
    n, length = q_nLNH.shape[:2]
    blocks, rest = divmod(length, window)
    whole, middle = blocks * window, blocks - 1
    mask = _in_window(window, 2 * window, window, q_nLNH.device)

    def pairs(x_nLKH: Tensor) -> Tensor:
        """[n * middle, 2 W, K, H]: each block but the first, after the one before it."""
        x_nbWKH = x_nLKH[:, :whole].unflatten(1, (blocks, window))
        return torch.cat([x_nbWKH[:, :-1], x_nbWKH[:, 1:]], 2).flatten(0, 1)

    q_bWNH = q_nLNH[:, window:whole].unflatten(1, (middle, window)).flatten(0, 1)
    out = [
        attend(q_nLNH[:, :window], k_nLKH[:, :window], v_nLKH[:, :window], None),
        attend(q_bWNH, pairs(k_nLKH), pairs(v_nLKH), mask).unflatten(0, (n, middle)).flatten(1, 2),
    ]
    if rest:
        reach = whole - window
        out.append(attend(q_nLNH[:, whole:], k_nLKH[:, reach:], v_nLKH[:, reach:], mask[:rest, : window + rest]))
    return torch.cat(out, 1)


def within_window(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """The mask of a span's queries, bool [L, L'], the last L of L' places, which see later ones too."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu(keys - queries - window + 1)


def _last_queries(queries: int, keys: int, device: torch.device) -> Tensor | None:
    """The causal mask; None where attention needs none."""
    return None if queries in (1, keys) else causal_mask(queries, keys, device)


def _in_window(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Causal mask of a window, bool [L, L'], for the last L of L' positions."""
    return causal_mask(queries, keys, device).triu(keys - queries - window + 1)


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Causal mask, bool [L, L'], for the last L of L' positions."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


# ---------------------------------------------------------------------- scores


def with_sinks(
    q_nLNH: Tensor, k_nLKH: Tensor, v_nLKH: Tensor, mask: Tensor, *, sinks: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and a mask with sinks as one more key, before the others."""
    n, queries = q_nLNH.shape[:2]
    score = sinks / scale
    rounded = score.to(q_nLNH.dtype)
    rest = (score - rounded).to(q_nLNH.dtype).detach()  # what a channel in bfloat16 leaves of a sink in float32
    channels = torch.stack([rounded, rest], -1).expand(n, queries, -1, 2)
    sink = F.pad(k_nLKH.new_ones(n, 1, k_nLKH.shape[2], 2), (k_nLKH.shape[3], SINK_CHANNELS - 2))
    return (
        F.pad(torch.cat([q_nLNH, channels], -1), (0, SINK_CHANNELS - 2)),
        torch.cat([sink, F.pad(k_nLKH, (0, SINK_CHANNELS))], 1),
        F.pad(v_nLKH, (0, 0, 0, 0, 1, 0)),
        F.pad(mask, (1, 0), value=True),
    )


def written_out(
    q_nLNH: Tensor,
    k_nLKH: Tensor,
    v_nLKH: Tensor,
    visible: Tensor,
    *,
    scale: float,
    dropout: float,
    pattern: Pattern,
) -> Tensor:
    """Attention with all its scores, bool [L, L'] of which are visible: [n, L, N, H], 0 where none is."""
    group = q_nLNH.shape[2] // k_nLKH.shape[2]
    q_nNLH = q_nLNH.transpose(1, 2)
    k_nNLH, v_nNLH = (x.transpose(1, 2).repeat_interleave(group, 1) for x in (k_nLKH, v_nLKH))
    scores = (q_nNLH @ k_nNLH.mT).to(torch.promote_types(q_nLNH.dtype, torch.float32)) * scale
    if pattern.softcap is not None:
        scores = torch.tanh(scores / pattern.softcap) * pattern.softcap
    scores = scores.masked_fill(~visible, float("-inf"))
    if pattern.sinks is not None:
        sink = pattern.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)[..., : visible.shape[1]]
    weights = torch.dropout(weights, dropout, train=dropout > 0)
    return (weights.to(v_nNLH.dtype) @ v_nNLH).transpose(1, 2)
