"""Patterns: the keys that a layer's queries attend to, and how their scores become weights.

    causal        the token itself and every earlier token of its sample
    window        the last `window` of these (sliding window)      Mistral, Gemma, Olmo 3, Cohere 2, gpt-oss
    chunk         the ones in the same chunk of the sample         Llama 4
    softcap       scores s become softcap * tanh(s / softcap)      Gemma 2
    sinks         one more key per head, a score without a value   gpt-oss
    spans         also later tokens of the same span (`spans.py`)  Gemma 3 and 4, PaliGemma

**Windows by blocks.** A segment longer than two windows is split into blocks of W queries, and each block has 2 W keys.
Work grows with L * W, and masks are [W, 2 W]. W = 3, a segment of 11 tokens:

    first    0 1 2             keys 0 1 2                 causal
    middle   3 4 5, 6 7 8      keys 0 .. 5, 3 .. 8        one call, one mask
    last     9 10              keys 6 .. 10               the same mask, its first rows

**Chunks are shorter segments.** A sample is split every C tokens from its start, so any back-end can compute chunks
(`Chunks`). If a segment has more keys than queries (`keys`), the queries are at its last positions. This then also
holds in each chunk, and keys of chunks without queries are dropped.

**Sinks as a key.** One more key comes first in every segment; its value is 0. Queries get a channel with sink / scale,
and a second one with the rounding error of the first. Both channels are 1 in the new key and 0 in all others, and the
other channels of the new key are 0. So its score is the sink, and PyTorch's own attention computes sinks and their
gradients.

L queries and L' keys of a segment, where the queries are at the positions of the last L keys; N query heads, K
key-value heads (N a multiple of K), H head dimension, W window.
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
"""Number of channels that sinks add to queries and keys: two are used, the others keep the alignment of kernels."""


@final
@dataclass(frozen=True, kw_only=True)
class LayerMask:
    """The earlier tokens that a query of a layer attends to: all of them, or a sliding window, or a chunk."""

    window: int | None = None
    """Number of tokens that a query attends to, itself included; None: no window."""
    chunk: int | None = None
    """Length of chunks in tokens, counted from the start of the sample; a query attends to no token before its chunk.
    None: no chunks."""

    def __str__(self) -> str:
        return "sample" if not self.is_local else f"chunk of {self.chunk}" if self.chunk else f"window of {self.window}"

    @property
    def is_local(self) -> bool:
        """Return whether a window or chunks limit the keys of a query."""
        return self != FULL_CAUSAL

    def first_key(self, place: int) -> int:
        """Return the position in the sample of the first key of the query at position `place`."""
        if self.chunk is not None:
            return place // self.chunk * self.chunk
        return 0 if self.window is None else max(place + 1 - self.window, 0)


FULL_CAUSAL = LayerMask()
"""No limit: queries attend to all earlier tokens of their sample."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Pattern:
    """The attention pattern of one layer, in addition to causal attention within samples."""

    window: int | None = None
    """Size of the sliding window: number of tokens that a query attends to, itself included; None: no window."""
    chunk: int | None = None
    """Length of chunks in tokens; a query attends to no token before its chunk. None: no chunks."""
    softcap: float | None = None
    """Bound of the scores; None: no softcap."""
    sinks: Tensor | None = None
    """[N]: for each head, the score of a key without a value; None: no sinks."""
    spans: Spans | None = None
    """Bidirectional spans of the row; layers with chunks have none. None: no spans."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parts that a back-end has to support."""
        return tuple(name for name, value in vars(self).items() if value is not None)

    @property
    def causal_part(self) -> Pattern:
        """The pattern without spans."""
        return self if self.spans is None else replace(self, spans=None)

    def of_heads(self, first: int, count: int) -> Pattern:
        """Return the pattern of heads [first, first + count)."""
        if self.sinks is None or len(self.sinks) == count:
            return self
        return replace(self, sinks=self.sinks[first : first + count])


CAUSAL = Pattern()
"""Plain causal attention."""


def attended_pairs(segments: Segments, mask: LayerMask = FULL_CAUSAL) -> int:
    """Return the number of query-key pairs of one layer: n (n + 1) / 2 for n tokens, less pairs outside `mask`."""
    if mask.chunk is not None:
        return segments.in_chunks(mask.chunk).attended_pairs
    if mask.window is None:
        return segments.attended_pairs
    beyond = (max(length - mask.window, 0) for length in segments.sample_lengths)
    return segments.attended_pairs - sum(n * (n + 1) // 2 for n in beyond)


# ---------------------------------------------------------------------- chunks


@final
@dataclass(frozen=True, kw_only=True)
class Chunks:
    """The boundaries of a row's chunks."""

    queries: Segments
    """Boundaries of the queries."""
    keys: Segments
    """Boundaries of the keys, in chunks with queries only; the last query of a chunk is at the position of its last
    key."""
    key_index: np.ndarray | None = None
    """int64 [S]: positions of these keys among all keys; None: they are all keys."""

    @classmethod
    def of(cls, segments: Segments, keys: Segments, size: int) -> Chunks:
        """Split a row into chunks of `size` tokens, counted from the first key of each segment.

        Args:
            segments: the boundaries of the queries.
            keys: the boundaries of the keys: `segments` itself, or the same number of segments without gaps. The last
                query of each segment is at the position of its last key.
            size: length of a chunk in tokens.
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
    """Return the range [first, end) of each query's keys: int32 [2, T]. Keys are contiguous in every pattern.

    Args:
        segments: the boundaries of the queries.
        keys: the boundaries of the keys; the last query of each segment is at the position of its last key.
        causal: False if tokens also attend to later tokens of their segment; of `pattern` the window is left then.
        pattern: window, chunks and spans of the layer.
    """
    lengths_G = np.asarray(segments.lengths, np.int64)
    first_G, end_G = np.asarray(keys.spans[: len(lengths_G)], np.int64).T
    first_R, end_R = np.repeat(first_G, lengths_G), np.repeat(end_G, lengths_G)
    place_R = ranges(end_G - lengths_G, lengths_G)
    if causal and pattern.chunk is not None:
        first_R += (place_R - first_R) // pattern.chunk * pattern.chunk
    if pattern.window is not None:
        first_R = np.maximum(first_R, place_R + 1 - pattern.window)
    if causal:
        end_R = place_R + 1
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
    """Return the mask of a whole row, bool [T, T']: True if the query (row) attends to the key (column).

    The arguments are those of `key_bounds`.
    """
    first_T, end_T = to_device(key_bounds(segments, keys, causal=causal, pattern=pattern), device)
    key_T = torch.arange(keys.total, device=device)
    return (key_T >= first_T[:, None]) & (key_T < end_T[:, None])


# ---------------------------------------------------------------------- n segments of the same length

AttendMasked = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Function of queries [n, L, N, H], keys and values [n, L', K, H] and a mask, bool [L, L']; returns [n, L, N, H].
Without a mask: causal attention with L = L' or L = 1."""


def windowed(q_nLNH: Tensor, k_nLKH: Tensor, v_nLKH: Tensor, window: int | None, attend: AttendMasked) -> Tensor:
    """Call `attend` causally within a window; segments longer than two windows are computed by blocks."""
    queries, visible = q_nLNH.shape[1], k_nLKH.shape[1]
    if window is None or visible <= window:
        mask = None if queries in (1, visible) else last_queries(queries, visible, q_nLNH.device)
        return attend(q_nLNH, k_nLKH, v_nLKH, mask)
    if queries < visible or visible <= 2 * window:
        near = min(visible, queries + window)  # earlier keys are in no query's window
        mask = last_queries(queries, near, q_nLNH.device, window=window)
        return attend(q_nLNH, k_nLKH[:, -near:], v_nLKH[:, -near:], mask)
    return _by_blocks(q_nLNH, k_nLKH, v_nLKH, window, attend)


def _by_blocks(q_nLNH: Tensor, k_nLKH: Tensor, v_nLKH: Tensor, window: int, attend: AttendMasked) -> Tensor:
    n, length = q_nLNH.shape[:2]
    blocks, rest = divmod(length, window)
    whole, middle = blocks * window, blocks - 1
    mask = last_queries(window, 2 * window, q_nLNH.device, window=window)

    def pairs(x_nLKH: Tensor) -> Tensor:
        """[n * middle, 2 W, K, H]: each block except the first, preceded by the block before it."""
        x_nbWKH = x_nLKH[:, :whole].unflatten(1, (blocks, window))
        return torch.cat([x_nbWKH[:, :-1], x_nbWKH[:, 1:]], 2).flatten(0, 1)

    q_bWNH = q_nLNH[:, window:whole].unflatten(1, (middle, window)).flatten(0, 1)
    out = [
        attend(q_nLNH[:, :window], k_nLKH[:, :window], v_nLKH[:, :window], None),
        attend(q_bWNH, pairs(k_nLKH), pairs(v_nLKH), mask).unflatten(0, (n, middle)).flatten(1, 2),
    ]
    if rest:
        first = whole - window
        out.append(attend(q_nLNH[:, whole:], k_nLKH[:, first:], v_nLKH[:, first:], mask[:rest, : window + rest]))
    return torch.cat(out, 1)


def last_queries(
    queries: int, keys: int, device: torch.device, *, causal: bool = True, window: int | None = None
) -> Tensor:
    """Return the mask of queries at the last L of L' positions, bool [L, L'].

    Args:
        queries: L.
        keys: L'.
        device: device of the mask.
        causal: False if queries also see later keys.
        window: number of keys up to its own that a query sees; None: all.
    """
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if causal:
        mask = mask.tril(keys - queries)
    return mask if window is None else mask.triu(keys - queries - window + 1)


# ---------------------------------------------------------------------- scores


def with_sinks(
    q_nLNH: Tensor, k_nLKH: Tensor, v_nLKH: Tensor, mask: Tensor, *, sinks: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys, values and mask with the sinks as one more key, before all others."""
    n, queries = q_nLNH.shape[:2]
    score = sinks / scale
    rounded = score.to(q_nLNH.dtype)
    rest = (score - rounded).to(q_nLNH.dtype).detach()  # rounding error of a float32 sink in bfloat16
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
    """Compute attention with the score matrix in memory: [n, L, N, H].

    `visible`: bool [L, L'], or [n, 1, L, L'], True if the query (row) attends to the key (column); at least one key per
    query.
    """
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
    weights = scores.softmax(-1)[..., : visible.shape[-1]]
    weights = torch.dropout(weights, dropout, train=dropout > 0)
    return (weights.to(v_nNLH.dtype) @ v_nNLH).transpose(1, 2)
