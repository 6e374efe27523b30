"""Bidirectional spans: runs of tokens that attend to later tokens of the same run, as image tokens and prefixes do.

A span's queries attend to all keys up to its end, so no mask is needed for them: a second call computes them, without
the causal limit, and its results take the place of those of the first.

    sample    t t i i i i t t t        two image spans would be two segments of the second call
    first     causal                   every token; those of spans are computed in vain
    second    queries   i i i i        keys  t t i i i i

With a sliding window of W the second call's keys begin W - 1 tokens before the span, and each of its queries sees none
that lies W or more before it. Where a span reaches beyond the window, queries from its W-th token on see the whole span
and nothing before it: a third call computes these, and spans that begin their sample, as prefixes do.

T row tokens, T' tokens of keys, S keys of a call, R its queries.
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
"""(start, stop) of queries, and of their keys."""


@final
@dataclass(frozen=True, kw_only=True)
class Spans:
    """The spans of one row."""

    runs: tuple[tuple[int, int], ...]
    """(start, stop) of each: places of the row, rising, each within one segment."""
    beyond_window: bool = False
    """True if a span's tokens also see those of the span that lie out of the window."""

    def further_pairs(self, window: int | None) -> int:
        """Query-key pairs of one layer beside those of causal attention; `window`: that of the layer."""
        lengths = [stop - start for start, stop in self.runs]
        later = sum(n * (n - 1) // 2 for n in lengths)
        if window is None or not self.beyond_window:
            return later
        beyond = (max(n - window, 0) for n in lengths)
        return later + sum(n * (n + 1) // 2 for n in beyond)

    def cut(self, segments: Segments, keys: Segments, window: int | None) -> tuple[SpanCall, ...]:
        """Lay out the calls that compute spans, each of whose results take the place of earlier ones.

        Args:
            segments: the boundaries of the queries.
            keys: those of the keys; the last query of each segment is at the place of its last key.
            window: tokens that a query sees, itself included; None: all before it.
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
    """A call that computes spans, or the last queries of some."""

    places: tuple[Place, ...]
    """Of each span."""
    window: int | None
    """Tokens that a query sees, itself included, beside the later ones of its span; None: all before it."""

    @cached_property
    def segments(self) -> Segments:
        """The boundaries of its queries."""
        return Segments.from_lengths([stop - start for start, stop, _, _ in self.places])

    @cached_property
    def keys(self) -> Segments:
        """The boundaries of its keys."""
        return Segments.from_lengths([stop - start for _, _, start, stop in self.places])

    def query_index(self, device: torch.device) -> torch.Tensor:
        """int64 [R]: where its queries are in the row."""
        return self.segments.derived("queries of spans", device, lambda: self._index(0))

    def key_index(self, device: torch.device) -> torch.Tensor:
        """int64 [S]: where its keys are among all keys."""
        return self.keys.derived("keys of spans", device, lambda: self._index(2))

    def _index(self, first: int) -> np.ndarray:
        starts, stops = np.asarray(self.places, np.int64)[:, first : first + 2].T
        return ranges(starts, stops - starts)
