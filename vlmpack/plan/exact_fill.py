"""Bin packing algorithms: exact fill, best-fit-decreasing, and a lower bound.

Best fit works on *runs*: neighboring bins with the same free space. Samples of one length go to a whole run at once,
so run time depends on the number of different lengths and runs, hardly on the number of samples.

Exact fill takes a sample and the subset of the others that fills its row to the last token: the longest sample left,
or any if best fit is far from the lower bound, because then long samples must share rows with short ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from heapq import heappop, heappush
from operator import index as as_int
from typing import final

import numpy as np

from vlmpack.plan.lengths import divided_up


def place_sorted(sizes: np.ndarray, counts: np.ndarray, capacity: int) -> Placements:
    """Place samples by best fit: each goes to the fullest open bin that has room for it, or to a new bin.

    Args:
        sizes: int64 [K]: distinct lengths, descending.
        counts: int64 [K]: number of samples of each length.
        capacity: tokens of a bin.
    """
    fitting: list[tuple[int, int, int]] = []
    """Heap of the runs that have room for the current length: (free space of each bin, first bin, number of bins)."""
    fuller: list[tuple[int, int, int]] = []
    """Heap of the other runs, with negated free space."""
    placements, at = Placements(), 0
    for length, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        while fuller and -fuller[0][0] >= length:
            room, first, bins = heappop(fuller)
            heappush(fitting, (-room, first, bins))
        end = at + count
        while at < end:
            if fitting:
                room, first, bins = heappop(fitting)
            else:
                room, first, bins = capacity, placements.bins, divided_up(end - at, capacity // length)
            each = room // length
            full = min(bins, (end - at) // each)
            over = end - at - full * each if full < bins else 0  # too few to fill a bin: they all go to the next bin
            if full:
                placements.add(at, first_bin=first, per_bin=each, bins=full)
                heappush(fuller, (each * length - room, first, full))
                at += full * each
            if over:
                placements.add(at, first_bin=first + full, per_bin=over, bins=1)
                heappush(fitting, (room - over * length, first + full, 1))
                at = end
                full += 1
            if full < bins:
                heappush(fitting, (room, first + full, bins - full))
    emptiest = max(fitting)[0] if fitting else -fuller[0][0] if fuller else 0
    placements.needed = placements.bins - emptiest / capacity
    return placements


@final
class Placements:
    """Slices of the sorted samples, and the bins they went to."""

    def __init__(self) -> None:
        self.bins = 0
        """Number of bins in use."""
        self.needed = 0.0
        """Number of bins after best fit, where the emptiest one counts by what is in it."""
        self._rows: list[tuple[int, int, int, int]] = []

    def add(self, at: int, *, first_bin: int, per_bin: int, bins: int) -> None:
        """Place sorted samples from index `at` on into `bins` neighboring bins, `per_bin` in each."""
        self._rows.append((at, first_bin, per_bin, per_bin * bins))
        if first_bin + bins > self.bins:
            self.bins = first_bin + bins

    def copy(self) -> Placements:
        """Return an independent copy."""
        same = Placements()
        same.bins, same._rows = self.bins, list(self._rows)
        return same

    def assign(self, order: np.ndarray) -> np.ndarray:
        """Return the bin of each sample, int64 [N], given the sorted sample indices; -1 for unplaced samples."""
        bin_of = np.full(len(order), -1)
        if self._rows:
            at, first_bin, per_bin, count = np.asarray(self._rows).T
            within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
            samples = order[np.repeat(at, count) + within]
            bin_of[samples] = np.repeat(first_bin, count) + within // np.repeat(per_bin, count)
        return bin_of


def stable_order(numbers: np.ndarray) -> np.ndarray:
    """Return the indices that sort whole numbers from 0 to 2^31, int64 [N]; equal numbers keep the order given.

    Packing number and index into one int64 lets numpy sort values, which is several times as fast as argsort.
    """
    bits = len(numbers).bit_length()
    keys = (numbers << bits) | np.arange(len(numbers))
    keys.sort()
    return keys & ((1 << bits) - 1)


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Place samples by best-fit-decreasing, which needs at most 11/9 of the optimal number of bins, plus one.

    Args:
        lengths: int64 [N], each from 1 to `capacity` tokens.
        capacity: tokens of a bin.

    Returns:
        int64 [N]: the bin of each sample, counted from 0.
    """
    order = stable_order(lengths.max() - lengths)  # longest first
    return place_sorted(*_counted(lengths[order]), capacity).assign(order)


def _counted(sorted_lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (distinct lengths, number of samples of each), both int64 [K]."""
    edges = np.flatnonzero(np.diff(sorted_lengths, prepend=-1, append=-1))
    return sorted_lengths[edges[:-1]], np.diff(edges)


MOST_PARTS = 16
"""Largest k for which the lower bound divides a bin into k parts."""


def lower_bound(sizes: np.ndarray, capacity: int) -> int:
    """Compute a lower bound of the number of bins: the best of three bounds.

    L2 of Martello and Toth (1990): for a threshold t, a sample above `capacity - t` cannot share a bin with a sample of
    size t or more, and samples above half the capacity need a bin each. The other samples of size t or more first fill
    the free space of the bins that they may share; the rest needs further bins. The maximum over all thresholds counts,
    including t = 0 (total size over capacity).

    Parts: if a bin has k parts, count ((k + 1) n - 1) // capacity parts for a sample of n tokens. This rounds down in
    favor of the packing, because these counts sum to less than k + 1 in every bin. For example, two samples above a
    third of the capacity fit into one bin, but three do not.

    All of them count in the largest unit that divides every size, and in whole units of the capacity.

    Pairs: for a threshold t above a third of the capacity, samples from t to `capacity - t` share bins in twos at most,
    and none of them fits with a larger one.

    Args:
        sizes: int64 [N], each from 0 to `capacity`; zeros need nothing.
        capacity: size of a bin, in the same unit.
    """
    return _lower_bound(*np.unique(sizes[sizes > 0], return_counts=True), capacity)


def _lower_bound(rising: np.ndarray, counts: np.ndarray, capacity: int) -> int:
    """Compute `lower_bound` from distinct sizes [K], ascending, and the number of samples of each."""
    if not len(rising):
        return 0
    unit = int(np.gcd.reduce(rising))
    rising, capacity = rising // unit, capacity // unit
    number, sums = (np.concatenate([[0], np.cumsum(of_each)]) for of_each in (counts, counts * rising))
    half = int(np.searchsorted(rising, capacity // 2, side="right"))
    large = int(np.searchsorted(rising, capacity // 3, side="right"))
    thresholds = np.concatenate([[0], rising[:half]])
    first = np.searchsorted(rising, thresholds, side="left")
    alone = np.searchsorted(rising, capacity - thresholds, side="right")
    room = (number[alone] - number[half]) * capacity - (sums[alone] - sums[half])
    over = np.maximum(sums[half] - sums[first] - room, 0)
    needed = [int((number[-1] - number[half] + divided_up(over, capacity)).max())]
    pairs = divided_up(number[alone] - number[first], 2)[large + 1 :]
    needed.append(int((number[-1] - number[alone[large + 1 :]] + pairs).max(initial=0)))
    parts = np.arange(2, MOST_PARTS + 1)
    of_parts = ((parts[:, None] + 1) * rising - 1) // capacity
    needed.append(int((-(-(of_parts @ counts) // parts)).max()))  # rounded up
    return max(needed)


# ---------------------------------------------------------------------- exact fill


def best_subset(lengths: Iterable[int], room: int) -> list[int]:
    """Choose lengths whose sum is as close to `room` as possible, without exceeding it.

    Bit t of `left` is set if some subset of the lengths so far leaves t tokens of the room free. Adding a length is one
    shift and one OR over all subsets at once. Earlier lengths are preferred: the search stops at the first length that
    makes the full sum possible, and backtracking uses a length only if the earlier ones do not suffice.

    Args:
        lengths: lengths in tokens, each at least 1; consumed no further than needed.
        room: free space in tokens, at least 0.

    Returns:
        Indices into `lengths`, ascending.
    """
    room = as_int(room)  # numpy's 64-bit ints cannot hold the bit set
    if not room:
        return []
    left = 1 << room
    steps: list[tuple[int, int, int]] = []
    """(index, length, `left` before) of each length that made a new sum possible."""
    for index, length in enumerate(lengths):
        before, left = left, left | left >> length
        if left != before:
            steps.append((index, length, before))
            if left & 1:
                break
    free = (left & -left).bit_length() - 1
    chosen = []
    for index, length, before in reversed(steps):
        if free == room:
            break
        if not before >> free & 1:
            chosen.append(index)
            free += length
    return chosen[::-1]


CANDIDATES = 64
"""Number of samples drawn as candidates to share a row with the one it is filled around."""

TRIES = 8
"""Number of failed draws after which a length is left to best fit."""

SLACK = 1024
"""A row counts as full if at most 1/SLACK of the capacity is left."""

NEGLIGIBLE = 10_000
"""Best fit is good enough if at most one bin in this many could be saved."""

FAR = 25
"""Best fit is far from the lower bound if more than one bin in this many could be saved."""

MIN_DRAWS = 256
"""Minimum number of draws without a further gain before the search ends. In a small set, gains are rare."""


def exact_fill(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Fill rows exactly, many equal rows at a time, while that saves rows; best-fit-decreasing places the rest.

    Now and then a trial run of best fit on the remaining samples tells how many bins would result if the search ended
    there. The search ends when that number stops falling, and goes back to the point where it was lowest. So there are
    never more bins than with best fit alone. It ends early if the first bins filled save nothing.

    Args:
        lengths: int64 [N], each from 1 to `capacity` tokens.
        capacity: tokens of a bin.

    Returns:
        int64 [N]: the bin of each sample, counted from 0.
    """
    order = stable_order(lengths.max() - lengths)  # longest first
    sizes, counts = _counted(lengths[order])
    unit = int(np.gcd.reduce(sizes))  # a row of padded samples is full if no further unit fits
    sizes, capacity = sizes // unit, capacity // unit
    best_fit = place_sorted(sizes, counts, capacity)
    bound = _lower_bound(sizes[::-1], counts[::-1], capacity)
    if best_fit.bins - bound <= best_fit.bins // NEGLIGIBLE:
        return best_fit.assign(order)
    is_far = FAR * (best_fit.bins - bound) > best_fit.bins
    stock = Stock(sizes, counts, capacity, longest_first=len(sizes) <= CANDIDATES or not is_far)
    exact = _fill_rows(stock, capacity, best_fit=best_fit, bound=bound)
    if not exact.bins:
        return best_fit.assign(order)
    bin_of = exact.assign(order)
    if len(rest := order[bin_of[order] < 0]):
        placed = place_sorted(*_counted(lengths[rest] // unit), capacity)
        bin_of[rest] = exact.bins + placed.assign(np.arange(len(rest)))
    return bin_of


def _fill_rows(stock: Stock, capacity: int, *, best_fit: Placements, bound: int) -> Placements:
    """Fill rows exactly, up to the point where best fit of the rest gives the fewest bins in total.

    Args:
        stock: all samples.
        capacity: tokens of a bin.
        best_fit: all samples, placed by best fit.
        bound: lower bound of the number of bins.
    """
    placements = Placements()
    best, fewest, best_draws = placements.copy(), best_fit.bins, 0
    # the draws between two trials take about as long as a trial, a best fit of the remaining samples
    interval = 1 + 2048 * len(stock.sizes) // (16384 + capacity)
    # these draws take about as long as a plan by best fit, and show whether anything can be gained
    probe = 3 + len(stock.sizes) // 64 + int(stock.left[1].sum()) // 640
    next_trial, left = min(interval, probe), True
    while left and fewest > bound:
        while (left := stock.seek()) and stock.draws < next_trial:
            stock.fill_rows(placements, capacity)
        rest = place_sorted(*stock.left, capacity)
        bins = placements.bins + rest.bins
        if bins < fewest:
            best, fewest, best_draws = placements.copy(), bins, stock.draws
        if not best.bins and stock.draws >= probe and placements.bins + rest.needed >= best_fit.needed:
            break
        if stock.draws - best_draws >= max(MIN_DRAWS, 4 * interval if best_draws else 0):
            break
        next_trial = interval if stock.draws < interval else stock.draws + (2 if best_draws else 1) * interval
    return best


@final
class Stock:
    """Number of remaining samples of each length.

    Args:
        sizes: int64 [K]: distinct lengths, descending.
        counts: int64 [K]: number of samples of each length.
        capacity: tokens of a bin.
        longest_first: fill rows around the longest samples; False: around random ones.
    """

    def __init__(self, sizes: np.ndarray, counts: np.ndarray, capacity: int, *, longest_first: bool) -> None:
        self.sizes = sizes
        """int64 [K]: distinct lengths, descending."""
        self._negated = -sizes
        self._next = np.cumsum(counts) - counts
        self._left = counts.copy()
        self._shares = self._left.cumsum()
        self._used = 0
        self._top = int((sizes > capacity - sizes[-1]).sum())  # longer ones fit with no other
        self.draws = 0
        """Number of draws so far."""
        self._drew_all = False  # whether the last draw gave all samples that can be in the row
        self._longest_first = longest_first
        self._failed = 0  # lengths since the last filled row around which no row could be filled
        self._random = np.random.default_rng(0)

    def seek(self) -> bool:
        """Choose the length to fill rows around; return False if none is left, or too many draws failed."""
        if self._longest_first:
            while self._top < len(self.sizes) and not self._left[self._top]:
                self._top += 1
            return self._top < len(self.sizes)
        if self._failed == TRIES:
            return False
        left = self._left.cumsum()
        self._top = int(left.searchsorted(self._random.integers(left[-1]), side="right")) if left[-1] else 0
        return bool(left[-1])

    @property
    def left(self) -> tuple[np.ndarray, np.ndarray]:
        """(remaining lengths, descending, int64 [k]; number of samples of each, int64 [k])."""
        kinds = np.flatnonzero(self._left)
        return self.sizes[kinds], self._left[kinds]

    def fill_rows(self, placements: Placements, capacity: int) -> None:
        """Fill rows around the chosen length; if that fails, it can still join rows of others."""
        room = capacity - int(self.sizes[self._top])
        for _ in range(TRIES):
            company = self._draw(room)
            lengths = self.sizes[company].tolist()
            chosen = best_subset(lengths, room)
            if room - sum(lengths[at] for at in chosen) <= capacity // SLACK:
                self._use(company[chosen].tolist(), placements)
                self._failed = 0
                return
            if self._drew_all:
                break
        self._top += 1
        self._failed += 1

    def _draw(self, room: int) -> np.ndarray:
        """Draw samples of at most `room` tokens, in proportion to their number; return indices into `sizes`, rising.

        If no more than `CANDIDATES` can be in a row, counting those of each length that fit together, all are drawn.
        """
        self.draws += 1
        if self._used >= CANDIDATES // 8:  # refresh the cumulative counts only now and then
            self._shares, self._used = self._left.cumsum(), 0
        fitting = int(self._negated.searchsorted(-room))
        below = int(self._shares[fitting - 1]) if fitting else 0
        self._drew_all = False
        if min(self._shares[-1] - below, len(self.sizes) - fitting) <= CANDIDATES:
            kinds = np.arange(fitting, len(self.sizes))
            useful = np.minimum(self._left[kinds] - (kinds == self._top), room // self.sizes[kinds])
            if useful.sum() <= CANDIDATES:
                self._drew_all = True
                return kinds.repeat(useful)
        drawn = self._random.integers(below, self._shares[-1], CANDIDATES)
        drawn.sort()
        kinds = self._shares.searchsorted(drawn, side="right")
        nth = np.arange(CANDIDATES) - kinds.searchsorted(kinds)  # rank within its length, from 0
        return kinds[nth < self._left[kinds] - (kinds == self._top)]

    def _use(self, company: list[int], placements: Placements) -> None:
        """Make as many rows of the chosen length and this company as there are samples for."""
        times = Counter([self._top, *company])
        rows = min(self._left.item(kind) // per_row for kind, per_row in times.items())
        first_bin = placements.bins
        for kind, per_row in times.items():
            placements.add(self._next.item(kind), first_bin=first_bin, per_bin=per_row, bins=rows)
            self._next[kind] += rows * per_row
            self._left[kind] -= rows * per_row
        self._used += 1
