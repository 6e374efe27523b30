"""Lay a row out for layers that carry state along a sequence: `Buckets` of right-padded segments of like length.

Lengths [3, 5, 2, 5] in a row, cut into two buckets:

    row       a a a .  b b b b b . . .  c c . .  d d d d d . . .
    buckets   a a a        b b b b b
              c c ~        d d d d d            ~ a copy of the sample's last token: finite, and never read again

`split` and `join` are inverses of each other on real tokens; `join` puts zeros on padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import final

import numpy as np
import torch

from vlmpack.layout.device import to_device
from vlmpack.layout.segments import Segments, ranges

MAX_STRETCH = 1.25
"""Most tokens that a bucket may compute for each real token that it holds."""

_NOTHING = np.zeros(0, np.int64)


@final
@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Segments that are computed together, n of them."""

    members: tuple[int, ...]
    """Their numbers in the row, shortest first."""
    width: int
    """Tokens of the longest, W."""

    @property
    def tokens(self) -> int:
        """Tokens that it computes, n * W."""
        return len(self.members) * self.width


@final
@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Every segment of a row that has tokens, in one bucket each."""

    segments: Segments
    """The row."""
    buckets: tuple[Bucket, ...]
    """The parts that it is cut into."""

    @classmethod
    def cheapest(cls, segments: Segments, *, call_cost: float) -> Buckets:
        """The cut that costs least, if a batch costs its tokens, padding included, plus `call_cost` for the call.

        Lengths are put in order and cut into runs. best[j] is the least cost of the segments of the j shortest lengths:

            best[j] = min over i < j of  best[i] + call_cost + segments(i .. j) * length[j]

        where runs that would pad by more than `MAX_STRETCH` are left out. One segment a bucket is always allowed, and
        is what comes out when calls are cheap.

        Args:
            segments: the row.
            call_cost: what one more call costs, in tokens.
        """
        order = sorted((i for i, n in enumerate(segments.lengths) if n), key=segments.lengths.__getitem__)
        lengths = np.asarray([segments.lengths[i] for i in order], np.int64)
        cuts = _cheapest_cuts(lengths, call_cost)
        runs = [order[start:stop] for start, stop in pairwise(cuts)]
        buckets = [Bucket(members=tuple(run), width=segments.lengths[run[-1]]) for run in runs]
        if len(buckets) == len(
            order
        ):  # per-sample execution: in the order of the row, nothing is put back in its place
            buckets.sort(key=lambda bucket: bucket.members)
        return cls(segments=segments, buckets=tuple(buckets))

    @property
    def tokens(self) -> int:
        """Tokens that all buckets compute."""
        return sum(bucket.tokens for bucket in self.buckets)

    def split(self, row_1TD: torch.Tensor) -> list[torch.Tensor]:
        """[1, T, ...] to [n, W, ...] of each bucket.

        All at once, and then cut: the gradient of a slice of the row is as wide as the row.
        """
        source, _ = self._tensors(row_1TD.device)
        tokens = row_1TD[0] if source is None else row_1TD[0].index_select(0, source)
        parts = tokens.split([bucket.tokens for bucket in self.buckets])
        shapes = [(len(bucket.members), bucket.width) for bucket in self.buckets]
        return [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """[n, W, D] of each bucket to [1, T, D], zeros on padding. At least one bucket."""
        real_1RD = torch.cat([part.flatten(0, 1)[None] for part in parts], 1)
        _, order = self._tensors(real_1RD.device)
        if order is not None:
            real_1RD = real_1RD.index_select(1, order)
        return onto_row(real_1RD, self.segments)

    @cached_property
    def _on_device(self) -> dict[torch.device, tuple[torch.Tensor | None, torch.Tensor | None]]:
        return {}

    def _tensors(self, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(the row's token at each place of the buckets laid one after the other, [R] from there back to the row), each
        int64; None: the one is the other."""
        if device not in self._on_device:
            starts, stops = np.asarray(self.segments.spans, np.int64).reshape(-1, 2).T
            source = np.concatenate([_NOTHING, *(_source(bucket, starts, stops) for bucket in self.buckets)])
            order = _unless_in_order(self._order(), self.tokens, device)
            self._on_device[device] = _unless_in_order(source, self.segments.total, device), order
        return self._on_device[device]

    def _order(self) -> np.ndarray:
        """int64 [R]: where each real token of the row lies in the buckets laid one after the other."""
        firsts = np.zeros(len(self.segments.lengths), np.int64)
        for bucket, start in zip(self.buckets, accumulate((b.tokens for b in self.buckets), initial=0), strict=False):
            firsts[list(bucket.members)] = start + bucket.width * np.arange(len(bucket.members))
        return ranges(firsts, np.asarray(self.segments.lengths, np.int64))


def _source(bucket: Bucket, starts_G: np.ndarray, stops_G: np.ndarray) -> np.ndarray:
    """int64 [n * W]: the row's token at each place of the bucket."""
    starts_n1, stops_n1 = (x[list(bucket.members), None] for x in (starts_G, stops_G))
    return np.minimum(starts_n1 + np.arange(bucket.width), stops_n1 - 1).ravel()


def onto_row(real_1RD: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Real tokens [1, R, D] on their places in the row [1, T, D], zeros on padding. No view: FSDP2 warns of those."""
    if not segments.has_gaps:
        return real_1RD
    row_1TD = real_1RD.new_zeros(1, segments.total, real_1RD.shape[-1])
    return row_1TD.index_copy(1, segments.real_index(real_1RD.device), real_1RD)


def _unless_in_order(index: np.ndarray, total: int, device: torch.device) -> torch.Tensor | None:
    """`index` on `device`; None if it only counts from 0 to `total`."""
    return None if np.array_equal(index, np.arange(total)) else to_device(index, device)


def _cheapest_cuts(lengths: np.ndarray, call_cost: float) -> list[int]:
    """Where to cut `lengths`, int64 [n] in rising order: 0, ..., n.

    Equal lengths are never apart: the later run, which is at least as wide, is no dearer without those of the earlier.
    """
    widths, counts = np.unique(lengths, return_counts=True)
    edges = np.concatenate([[0], np.cumsum(counts)])
    tokens = np.concatenate([[0], np.cumsum(counts * widths)])
    best, before = np.zeros(len(edges)), np.zeros(len(edges), np.int64)
    for stop in range(1, len(edges)):
        computed = (edges[stop] - edges[:stop]) * widths[stop - 1]
        allowed = computed <= MAX_STRETCH * (tokens[stop] - tokens[:stop])
        cost = np.where(allowed, best[:stop] + call_cost + computed, np.inf)
        before[stop] = np.argmin(cost)
        best[stop] = cost[before[stop]]
    cuts = [len(widths)]
    while cuts[-1]:
        cuts.append(int(before[cuts[-1]]))
    return edges[cuts[::-1]].tolist()
