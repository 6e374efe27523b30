"""Rows and prefix trees laid out for layers that carry state along a sequence.

`Buckets` cuts a row into right-padded batches of segments of like length. Lengths [3, 5, 2, 5], two buckets:

    row       a a a b b b b b c c d d d d d
    buckets   a a a        b b b b b
              c c ~        d d d d d            ~ a copy of the sample's last token: finite, and never read again

`Spaced` puts zeros between the segments of a row, for one call of a convolution that reads some tokens before each
token; `SpacedNodes` puts before each node of a tree the tokens that it follows on its path. What runs on along the
sequence besides the convolution restarts where `stretches` begin.

`split` and `join` are inverses of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import final

import numpy as np
import torch

from vlmpack.layout.device import to_device
from vlmpack.layout.prefix_tree import PrefixTree
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
        """[n, W, D] of each bucket to [1, T, D]."""
        tokens_1D = torch.cat([part.flatten(0, 1)[None] for part in parts], 1)
        _, order = self._tensors(tokens_1D.device)
        return tokens_1D if order is None else tokens_1D.index_select(1, order)

    @cached_property
    def _on_device(self) -> dict[torch.device, tuple[torch.Tensor | None, torch.Tensor | None]]:
        return {}

    def _tensors(self, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(the row's token at each place of the buckets laid one after the other, [T] from there back to the row), each
        int64; None: the one is the other."""
        if device not in self._on_device:
            starts, stops = np.asarray(self.segments.spans, np.int64).reshape(-1, 2).T
            source = np.concatenate([_NOTHING, *(_source(bucket, starts, stops) for bucket in self.buckets)])
            order = _unless_in_order(self._order(), self.tokens, device)
            self._on_device[device] = _unless_in_order(source, self.segments.total, device), order
        return self._on_device[device]

    def _order(self) -> np.ndarray:
        """int64 [T]: where each token of the row lies in the buckets laid one after the other."""
        firsts = np.zeros(len(self.segments.lengths), np.int64)
        for bucket, start in zip(self.buckets, accumulate((b.tokens for b in self.buckets), initial=0), strict=False):
            firsts[list(bucket.members)] = start + bucket.width * np.arange(len(bucket.members))
        return ranges(firsts, np.asarray(self.segments.lengths, np.int64))


def _source(bucket: Bucket, starts_G: np.ndarray, stops_G: np.ndarray) -> np.ndarray:
    """int64 [n * W]: the row's token at each place of the bucket."""
    starts_n1, stops_n1 = (x[list(bucket.members), None] for x in (starts_G, stops_G))
    return np.minimum(starts_n1 + np.arange(bucket.width), stops_n1 - 1).ravel()


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


# ---------------------------------------------------------------------- one call for all


@final
@dataclass(frozen=True, kw_only=True)
class Spaced:
    """Every segment of a row that has tokens, `reach` zeros between one and the next; recurrences restart at `edges`.

    Lengths [3, 5, 2], a convolution that reads 3 tokens before each token:

        row       a a a b b b b b c c
        spaced    a a a 0 0 0  b b b b b 0 0 0  c c
        edges     [0, 6, 14, 16]

    Before a segment's first token the convolution reads zeros, as it does before a sample alone. They lie behind all
    that is ever read of the segment before them.
    """

    segments: Segments
    """The row."""
    reach: int
    """Tokens that a convolution reads before each token: its width less one."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each segment that has any, n of them."""
        return tuple(length for length in self.segments.lengths if length)

    @property
    def tokens(self) -> int:
        """Its width W, zeros included: what a layer computes."""
        return self.segments.total + self.reach * (len(self.lengths) - 1)

    @property
    def edges(self) -> tuple[int, ...]:
        """Where each segment starts, and the end: n + 1 values, no stretch between two of them empty.

        They cover all of it: kernels leave what lies behind the last boundary unwritten.
        """
        starts = accumulate((length + self.reach for length in self.lengths[:-1]), initial=0)
        return (*starts, self.tokens)

    def split(self, row_1TD: torch.Tensor) -> list[torch.Tensor]:
        """[1, T, D] to a list of one [1, W, D]."""
        if len(self.lengths) == 1:
            return [row_1TD]
        spaced_1WD = row_1TD.new_zeros(1, self.tokens, row_1TD.shape[-1])
        return [spaced_1WD.index_copy(1, self._places(row_1TD.device), row_1TD)]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """A list of one [1, W, D] to [1, T, D]."""
        (spaced_1WD,) = parts
        return spaced_1WD if len(self.lengths) == 1 else spaced_1WD.index_select(1, self._places(spaced_1WD.device))

    @cached_property
    def stretches(self) -> Segments:
        """Stretches between two edges, one after the other: the boundaries that a kernel is given."""
        return Segments.from_lengths([stop - start for start, stop in pairwise(self.edges)])

    def _places(self, device: torch.device) -> torch.Tensor:
        """int64 [T]: where each token lies."""
        edges, lengths = np.asarray(self.edges[:-1], np.int64), np.asarray(self.lengths, np.int64)
        return self.segments.derived(("spaced", self.reach), device, lambda: ranges(edges, lengths))


@final
@dataclass(frozen=True, kw_only=True)
class SpacedNodes:
    """Nodes of a prefix tree, each behind the last `reach` tokens on the path to it; zeros where there are not so many.

        tree         P ─┬─ A         P = p q r s     A = a a a     reach = 2
                        └─ B         B = b b
        all nodes    0 0 p q r s  r s a a a  r s b b
        stretches    2   4        2   3 + 2      2           P is read where it ends; behind A nothing is

    `split` takes them out of the tree. `join` is its inverse on their own tokens, which it leaves in their order here.
    """

    tree: PrefixTree
    """The tree, t tokens."""
    reach: int
    """Tokens that a convolution reads before each token: its width less one."""
    nodes: tuple[int, ...]
    """Nodes of the tree, in the order in which they lie here."""

    @classmethod
    def every(cls, tree: PrefixTree, reach: int) -> SpacedNodes:
        """All nodes, in the order of the tree."""
        return cls(tree=tree, reach=reach, nodes=tuple(range(len(tree.lengths))))

    @classmethod
    def by_depth(cls, tree: PrefixTree, reach: int) -> tuple[SpacedNodes, ...]:
        """The nodes of each depth: roots, then their children, and so on. Those without children come first, where
        fewer stretches are needed."""
        inner = {*tree.parents}
        levels: list[list[int]] = [[] for _ in range(max(tree.depths) + 1)]
        for node in sorted(range(len(tree.lengths)), key=inner.__contains__):
            levels[tree.depths[node]].append(node)
        return tuple(cls(tree=tree, reach=reach, nodes=tuple(level)) for level in levels)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each node."""
        return tuple(self.tree.lengths[node] for node in self.nodes)

    @property
    def tokens(self) -> int:
        """Width W of all, repeated tokens and zeros included: what a layer computes."""
        return sum(self.lengths) + self.reach * len(self.nodes)

    @cached_property
    def stretches(self) -> Segments:
        """Stretches over which a recurrence runs. A node's begins at its own first token, and ends with its last one if
        it has children, which start from there."""
        return Segments.from_lengths(self._cut[0])

    @property
    def numbers(self) -> tuple[int, ...]:
        """The number of each node's stretch."""
        return self._cut[1]

    def split(self, tree_1tD: torch.Tensor) -> list[torch.Tensor]:
        """[1, t, D] to a list of one [1, W, D]."""
        with_zero = torch.cat([tree_1tD[0], tree_1tD.new_zeros(1, tree_1tD.shape[-1])])
        return [with_zero.index_select(0, self._derived("source", tree_1tD.device, self._source))[None]]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """A list of one [1, W, D] to [1, r, D], the nodes' own tokens."""
        (computed_1WD,) = parts
        return computed_1WD.index_select(1, self._derived("places", computed_1WD.device, self._places))

    @cached_property
    def _cut(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(lengths of the stretches, the number of each node's)."""
        lengths: list[int] = []
        numbers: list[int] = []
        inner = {*self.tree.parents}
        for before, node in zip((None, *self.nodes), self.nodes, strict=False):
            if self.reach and (before is None or before in inner):
                lengths.append(self.reach)
            elif lengths:
                lengths[-1] += self.reach
            numbers.append(len(lengths))
            lengths.append(self.tree.lengths[node])
        return tuple(lengths), tuple(numbers)

    def _source(self) -> np.ndarray:
        """int64 [W]: the tree's token at each place; t, behind the last one: a zero."""
        starts = np.asarray([self.tree.nodes.stride[node] for node in self.nodes], np.int64)
        lengths = np.asarray(self.lengths, np.int64)
        before = self.tree.predecessor("cpu").numpy()
        tails_GK = np.empty((len(self.nodes), self.reach), np.int64)
        reached = starts
        for tap in reversed(range(self.reach)):
            reached = np.where(reached < 0, -1, before[reached])
            tails_GK[:, tap] = reached
        is_own = np.zeros(self.tokens, bool)
        is_own[self._places()] = True
        source = np.empty(self.tokens, np.int64)
        source[is_own], source[~is_own] = ranges(starts, lengths), tails_GK.ravel()
        return np.where(source < 0, self.tree.num_tokens, source)

    def _places(self) -> np.ndarray:
        """int64 [r]: where each of the nodes' own tokens lies."""
        lengths = np.asarray(self.lengths, np.int64)
        return np.arange(lengths.sum()) + self.reach * np.repeat(np.arange(1, len(lengths) + 1), lengths)

    def _derived(self, what: str, device: torch.device, make: Callable[[], np.ndarray]) -> torch.Tensor:
        return self.tree.nodes.derived(("spaced", self.reach, self.nodes, what), device, make)
