"""Exact fill: the longest sample left, and the subset of the others that fills its row to the last token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from operator import index as as_int
from typing import final

import numpy as np

from vlmpack.plan.algorithms import (
    Placements,
    best_fit_decreasing,
    least_room,
    longest_first,
    lower_bound,
    place_sorted,
)


def best_subset(lengths: Iterable[int], room: int) -> list[int]:
    """Choose lengths whose sum is as near to `room` as any subset's, and never above.

    Bit t of `reachable` says that some subset of the lengths so far sums to t. One more length is one shift and one OR
    over all sums at once. Earlier lengths are preferred: the search stops at the first one that fills the room
    exactly, and on the way back a length is used only where those before it do not suffice. Of equal lengths no more
    are looked at than fit into the room together: further ones make no sum possible.

    Args:
        lengths: each at least 1, in tokens; read no further than needed.
        room: in tokens, at least 0.

    Returns:
        Indices into `lengths`, rising.
    """
    room = as_int(room)  # numpy's ints have 64 bits, and cannot hold sums
    if not room:
        return []
    within = (2 << room) - 1
    full = 1 << room
    reachable = 1
    steps: list[tuple[int, int, int]] = []
    """(index, length, sums before) of lengths that made a sum possible."""
    useful: dict[int, int] = {}
    for index, size in enumerate(lengths):
        length = as_int(size)
        if (more := useful.get(length)) is None:
            more = room // length
        if not more:
            continue
        useful[length] = more - 1
        before, reachable = reachable, reachable | (reachable << length) & within
        if reachable != before:
            steps.append((index, length, before))
        if reachable & full:
            break
    left = reachable.bit_length() - 1
    chosen = []
    for index, length, before in reversed(steps):
        if not left:
            break
        if not before >> left & 1:
            chosen.append(index)
            left -= length
    return chosen[::-1]


CANDIDATES = 64
"""Samples drawn as possible company of the longest one."""

TRIES = 8
"""Draws without success after which a length is left to best fit."""

SKIPPED = 64
"""Lengths left to best fit one after the other, after which all shorter ones are left to it too."""

SLACK = 1024
"""A row counts as full with less than a part in this many left over."""

NEGLIGIBLE = 10_000
"""Best fit is good enough where less than one bin in this many could be saved."""


def exact_fill(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Fill rows exactly, many alike at a time; where best-fit-decreasing needs no more bins, that is kept.

    Args:
        lengths: int64 [N], each from 1 to `capacity` tokens.
        capacity: of a bin, in tokens.

    Returns:
        int64 [N]: the bin of each sample, from 0.
    """
    order = longest_first(lengths)
    sorted_lengths = lengths[order]
    best_fit = place_sorted(sorted_lengths, capacity, least_room)
    if best_fit.bins - lower_bound(lengths, capacity) <= best_fit.bins // NEGLIGIBLE:
        return best_fit.assign(order)
    exact = _fill_rows(sorted_lengths, capacity)
    bin_of = exact.assign(order)
    if not len(rest := np.flatnonzero(bin_of < 0)):
        return bin_of
    bin_of[rest] = exact.bins + best_fit_decreasing(lengths[rest], capacity)
    return bin_of if int(bin_of[rest].max()) + 1 < best_fit.bins else best_fit.assign(order)


def _fill_rows(sorted_lengths: np.ndarray, capacity: int) -> Placements:
    """Make rows around the longest lengths while full ones are found; samples are left over."""
    stock, placements, skipped = Stock(sorted_lengths), Placements(), 0
    while skipped < SKIPPED and stock.seek_longest():
        room = capacity - stock.longest
        for _ in range(TRIES):
            company = stock.draw(room)
            chosen = company[best_subset(stock.sizes[company].tolist(), room)]
            if room - int(stock.sizes[chosen].sum()) <= capacity // SLACK:
                stock.use(chosen, placements)
                skipped = 0
                break
        else:
            # without any company a draw costs next to nothing
            skipped += bool(len(company))  # pyright: ignore[reportPossiblyUnboundVariable]
            stock.skip_longest()
    return placements


@final
class Stock:
    """Counts of the samples of each length that are left.

    Args:
        sorted_lengths: int64 [N], falling.
    """

    def __init__(self, sorted_lengths: np.ndarray) -> None:
        edges = np.flatnonzero(np.diff(sorted_lengths, prepend=-1, append=-1))
        self.sizes = sorted_lengths[edges[:-1]]
        """int64 [K]: the different lengths, falling."""
        self._next = edges[:-1].copy()
        self._left = np.diff(edges)
        self._shares = self._left.cumsum()
        self._used = 0
        self._top = 0
        self._random = np.random.default_rng(0)

    @property
    def longest(self) -> int:
        """The longest length that is left and was not skipped, after `seek_longest`."""
        return int(self.sizes[self._top])

    def seek_longest(self) -> bool:
        """Go on to the longest length that has samples left; False: there is none."""
        while self._top < len(self.sizes) and not self._left[self._top]:
            self._top += 1
        return self._top < len(self.sizes)

    def skip_longest(self) -> None:
        """Leave the longest length alone from now on, except as company of shorter ones."""
        self._top += 1

    def draw(self, room: int) -> np.ndarray:
        """Indices into `sizes`, falling lengths: samples of at most `room` tokens, drawn as often as they occur."""
        if self._used >= CANDIDATES // 8:  # the shares are good enough for a while
            self._shares, self._used = self._left.cumsum(), 0
        fitting = int(np.searchsorted(-self.sizes, -room))
        below = int(self._shares[fitting - 1]) if fitting else 0
        if below == self._shares[-1]:
            return np.zeros(0, np.int64)
        drawn = self._random.integers(below, self._shares[-1], CANDIDATES)
        kinds, times = np.unique(np.searchsorted(self._shares, drawn, side="right"), return_counts=True)
        return np.repeat(kinds, np.minimum(times, self._left[kinds] - (kinds == self._top)))

    def use(self, company: np.ndarray, placements: Placements) -> None:
        """Make as many rows as there are samples for, each of the longest length and this company."""
        times = Counter([self._top, *company.tolist()])
        rows = min(int(self._left[kind]) // per_row for kind, per_row in times.items())
        first_bin = placements.bins
        for kind, per_row in times.items():
            placements.add(int(self._next[kind]), first_bin=first_bin, per_bin=per_row, bins=rows)
            self._next[kind] += rows * per_row
            self._left[kind] -= rows * per_row
        self._used += 1
