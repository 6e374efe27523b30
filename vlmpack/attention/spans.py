"""Bidirectional spans: runs of tokens that also attend to later tokens of the run, such as image tokens and prefixes.

A span's queries attend to all keys up to its end, so they need no mask: a second call computes them without the causal
limit, and its results replace those of the first call.

    sample    t t i i i i t t t        (two image spans would be two segments of the second call)
    first     causal                   every token; results of spans are overwritten
    second    queries   i i i i        keys  t t i i i i

With a sliding window W, the second call's keys begin W - 1 tokens before the span, and no query attends to a key W or
more tokens before it. If tokens may see their span beyond the window (`beyond_window`), the queries from index W of the
span on attend to the whole span and to nothing before it. A third call computes these queries, and whole spans at the
start of their sample, such as prefixes.

T row tokens, T' key tokens, S keys of a call, R queries of a call.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
import torch

from vlmpack.layout.segments import Segments, ranges

Place = tuple[int, int, int, int]
"""(start, stop) of a span's queries in the row, then (start, stop) of its keys among all keys."""


@final
@dataclass(frozen=True, kw_only=True)
class Spans:
    """The spans of one row."""

    runs: tuple[tuple[int, int], ...]
    """(start, stop) of each span in the row, in increasing order, each within one segment."""
    beyond_window: bool = False
    """True if tokens of a span also attend to earlier tokens of the span outside the window."""

    def further_pairs(self, window: int | None) -> int:
        """Return the number of query-key pairs that spans add to causal attention in a layer with this window."""
        lengths = [stop - start for start, stop in self.runs]
        later = sum(n * (n - 1) // 2 for n in lengths)
        if window is None or not self.beyond_window:
            return later
        beyond = (max(n - window, 0) for n in lengths)
        return later + sum(n * (n + 1) // 2 for n in beyond)

    def cut(self, segments: Segments, keys: Segments, window: int | None) -> tuple[SpanCall, ...]:
        """Return the calls that compute spans, in order; the results of a call replace earlier results.

        Args:
            segments: the boundaries of the queries.
            keys: the boundaries of the keys; the last query of each segment is at the position of its last key.
            window: number of tokens that a query attends to, itself included; None: no window.
        """
        starts = [start for start, _ in segments.spans]
        is_narrow = not self.beyond_window
        in_window: list[Place] = []
        beyond: list[Place] = []
        for start, stop in self.runs:
            of = bisect_right(starts, start) - 1
            _, last = segments.spans[of]
            first_key, last_key = keys.spans[of]
            end = last_key - (last - stop)
            begin = end - (stop - start)
            before = begin - first_key
            assert start < stop <= last and before >= 0, f"the span {start}:{stop} is in no segment"
            if window is not None:
                before = min(before, window - 1)
            if is_narrow or window is None:
                in_window.append((start, stop, begin - before, end))
                continue
            if before:
                in_window.append((start, stop, begin - before, end))
                start += window
            if start < stop:
                beyond.append((start, stop, begin, end))
        calls = (SpanCall(places=tuple(in_window), window=window), SpanCall(places=tuple(beyond), window=None))
        return tuple(call for call in calls if call.places)


@final
@dataclass(frozen=True, kw_only=True)
class SpanCall:
    """A call that computes spans, or only the last queries of spans."""

    places: tuple[Place, ...]
    """The ranges of each span."""
    window: int | None
    """Number of tokens that a query attends to, itself included and later tokens of its span not counted; None: no
    window."""

    @cached_property
    def segments(self) -> Segments:
        """The boundaries of its queries."""
        return Segments.from_lengths([stop - start for start, stop, _, _ in self.places])

    @cached_property
    def keys(self) -> Segments:
        """The boundaries of its keys."""
        return Segments.from_lengths([stop - start for _, _, start, stop in self.places])

    def query_index(self, device: torch.device) -> torch.Tensor:
        """int64 [R]: positions of its queries in the row."""
        return self.segments.derived("queries of spans", device, lambda: self._index(0))

    def key_index(self, device: torch.device) -> torch.Tensor:
        """int64 [S]: positions of its keys among all keys."""
        return self.keys.derived("keys of spans", device, lambda: self._index(2))

    def _index(self, first: int) -> np.ndarray:
        starts, stops = np.asarray(self.places, np.int64)[:, first : first + 2].T
        return ranges(starts, stops - starts)
