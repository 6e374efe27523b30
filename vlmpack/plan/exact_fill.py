"""Exact fill: the longest sample left, and the subset of the others that fills its row to the last token."""

from __future__ import annotations

from collections import Counter
from typing import final

import numpy as np

from vlmpack.plan.bound import lower_bound
from vlmpack.plan.decreasing import best_fit_decreasing, least_room
from vlmpack.plan.grouped import Placements, falling, place_sorted
from vlmpack.plan.subset import best_subset

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
    order = falling(lengths)
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
    """How many samples of each length are left.

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
