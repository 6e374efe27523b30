"""Placing algorithms: best, first and worst fit decreasing over runs of equal bins, next fit, and a lower bound.

A *run* is a stretch of neighbouring bins with the same room left. Samples of one length go to a whole run at once, so
that the work depends on how many lengths and runs there are, hardly on how many samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import NamedTuple, final

import numpy as np

from vlmpack.plan.lengths import divided_up

Preference = Callable[[int, int], int]
"""(room in tokens, number of the first bin) -> rank of a run; the lowest is used first, then the first bin."""


class Run(NamedTuple):
    """Neighbouring bins with the same room left."""

    first_bin: int
    """The number of the first of them."""
    room: int
    """Tokens that each of them still holds."""
    bins: int
    """Their number."""


@final
class Runs:
    """Open bins as runs: those with room for the current length, by preference, and the fuller ones."""

    def __init__(self, preference: Preference) -> None:
        self._preference = preference
        self._fitting: list[tuple[int, Run]] = []
        """Heap of (rank, run)."""
        self._fuller: list[tuple[int, Run]] = []
        """Heap of (-room, run)."""
        self._length = 0

    def set_length(self, length: int) -> None:
        """Place samples of this length from now on; it is smaller than any before."""
        self._length = length
        while self._fuller and -self._fuller[0][0] >= length:
            self.put(heappop(self._fuller)[1])

    def take(self) -> Run | None:
        """Take out the preferred run that has room; None: no bin has."""
        return heappop(self._fitting)[1] if self._fitting else None

    def put(self, run: Run) -> None:
        """Put a run back, if any bin is left of it."""
        if not run.bins:
            return
        if run.room >= self._length:
            heappush(self._fitting, (self._preference(run.room, run.first_bin), run))
        else:
            heappush(self._fuller, (-run.room, run))


def place_decreasing(
    lengths: np.ndarray, capacity: int, preference: Preference, *, one_a_visit: bool = False
) -> np.ndarray:
    """Place every sample in the preferred open bin that has room, the longest first; open a bin where none has.

    Args:
        lengths: int64 [N], each from 1 to `capacity` tokens.
        capacity: of a bin, in tokens.
        preference: which run of bins comes first.
        one_a_visit: after each sample look for the preferred bin anew. Best fit and first fit need not: a bin that was
            preferred and has room for one more of the same length is preferred still.

    Returns:
        int64 [N]: the bin of each sample; bins are numbered in the order in which they were opened.
    """
    order = longest_first(lengths)
    return place_sorted(lengths[order], capacity, preference, one_a_visit=one_a_visit).assign(order)


def place_sorted(
    sorted_lengths: np.ndarray, capacity: int, preference: Preference, *, one_a_visit: bool = False
) -> Placements:
    """Place lengths that are sorted from long to short; the result is not yet expanded to one bin a sample."""
    runs, placements, at = Runs(preference), Placements(), 0
    for length, count in _groups(sorted_lengths):
        runs.set_length(length)
        end = at + count
        while at < end:
            open_run = runs.take()
            first, room, bins = open_run or Run(placements.bins, capacity, divided_up(end - at, capacity // length))
            each = 1 if open_run and one_a_visit else room // length
            full = min(bins, (end - at) // each)
            over = end - at - full * each if full < bins else 0  # too few to fill a bin: they all go to the next one
            for start, number, samples in ((first, full, each), (first + full, min(over, 1), over)):
                if number:
                    placements.add(at, first_bin=start, per_bin=samples, bins=number)
                    runs.put(Run(start, room - samples * length, number))
                    at += number * samples
            used = full + (over > 0)
            runs.put(Run(first + used, room, bins - used))
    return placements


@final
class Placements:
    """Stretches of sorted samples and the bins they went to."""

    def __init__(self) -> None:
        self.bins = 0
        """Bins that hold something."""
        self._rows: list[tuple[int, int, int, int]] = []

    def add(self, at: int, *, first_bin: int, per_bin: int, bins: int) -> None:
        """The sorted samples from `at` on go to `bins` neighbouring bins, `per_bin` to each."""
        self._rows.append((at, first_bin, per_bin, per_bin * bins))
        self.bins = max(self.bins, first_bin + bins)

    def assign(self, order: np.ndarray) -> np.ndarray:
        """int64 [N]: the bin of each sample where `order` holds the sorted samples; -1 for one that was not placed."""
        bin_of = np.full(len(order), -1)
        if self._rows:
            at, first_bin, per_bin, count = np.asarray(self._rows).T
            within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
            samples = order[np.repeat(at, count) + within]
            bin_of[samples] = np.repeat(first_bin, count) + within // np.repeat(per_bin, count)
        return bin_of


def longest_first(lengths: np.ndarray) -> np.ndarray:
    """int64 [N]: indices that sort `lengths` from long to short, equal ones in the order given.

    Length and index share one int64, which numpy sorts several times as fast as it sorts indices.
    """
    bits = len(lengths).bit_length()
    keys = (lengths.max() - lengths << bits) | np.arange(len(lengths))
    keys.sort()
    return keys & ((1 << bits) - 1)


def _groups(sorted_lengths: np.ndarray) -> Iterator[tuple[int, int]]:
    """(length, how many samples have it), in the order given."""
    edges = np.flatnonzero(np.diff(sorted_lengths, prepend=-1, append=-1))
    return zip(sorted_lengths[edges[:-1]].tolist(), np.diff(edges).tolist(), strict=True)


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Place samples by best-fit-decreasing: at most 11/9 of the fewest bins possible, plus one.

    Args:
        lengths: int64 [N], each from 1 to `capacity` tokens.
        capacity: of a bin, in tokens.

    Returns:
        int64 [N]: the bin of each sample, from 0.
    """
    return place_decreasing(lengths, capacity, least_room)


def first_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Place samples by first-fit-decreasing, with the same bound."""
    return place_decreasing(lengths, capacity, lambda room, first_bin: first_bin)


def worst_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Place samples by worst-fit-decreasing, which keeps bins equally full."""
    return place_decreasing(lengths, capacity, lambda room, first_bin: -room, one_a_visit=True)


def least_room(room: int, first_bin: int) -> int:
    """Rank of a run of bins: the one with the least room comes first."""
    return room


def next_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Cut the samples, in the order given, into bins.

    Where each bin would end is looked up for all possible starts at once; then only the starts that occur are walked.

    Args:
        lengths: int64 [N], each from 1 to `capacity` tokens.
        capacity: of a bin, in tokens.

    Returns:
        int64 [N]: the bin of each sample, from 0, never falling.
    """
    ends = np.cumsum(lengths)
    following = np.searchsorted(ends, ends - lengths + capacity, side="right").tolist()
    starts, at = [], 0
    while at < len(following):
        starts.append(at)
        at = following[at]
    opens = np.zeros(len(lengths), np.int64)
    opens[starts] = 1
    return np.cumsum(opens) - 1


def lower_bound(sizes: np.ndarray, capacity: int) -> int:
    """The bound L2 of Martello and Toth (1990): no packing at all needs fewer bins.

    For a threshold t, samples above `capacity - t` can share with none of size t or more; those above half the capacity
    need a bin each; what the others of size t or more have over after filling these bins needs bins of its own. The
    best of all thresholds counts, t = 0 (everything together over the capacity) included.

    Args:
        sizes: int64 [N], each from 0 to `capacity`; zeros need nothing.
        capacity: of a bin, in the same unit.
    """
    rising = np.sort(sizes[sizes > 0])
    if not len(rising):
        return 0
    sums = np.concatenate([[0], np.cumsum(rising)])
    half = int(np.searchsorted(rising, capacity // 2, side="right"))
    small = np.unique(rising[:half])
    thresholds = np.concatenate([[0], small])
    first = np.searchsorted(rising, thresholds, side="left")
    alone = np.searchsorted(rising, capacity - thresholds, side="right")
    big = len(rising) - half
    room = (alone - half) * capacity - (sums[alone] - sums[half])
    over = np.maximum(sums[half] - sums[first] - room, 0)
    return int((big + divided_up(over, capacity)).max())
