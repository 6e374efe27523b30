"""Placing algorithms: exact fill, best fit decreasing over runs of equal bins, and a lower bound.

A *run* is a stretch of neighboring bins with the same room left. Samples of one length go to a whole run at once, so
that the work depends on how many lengths and runs there are, hardly on how many samples.

Exact fill takes the longest sample left, and the subset of the others that fills its row to the last token.
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
    """Place samples by best fit: each in the open bin with the least room that is enough, or in a new one.

    Args:
        sizes: int64 [K]: the different lengths, falling.
        counts: int64 [K]: samples of each.
        capacity: of a bin, in tokens.
    """
    fitting: list[tuple[int, int, int]] = []
    """Heap of the runs with room for the current length: (room of each bin, first bin, bins)."""
    fuller: list[tuple[int, int, int]] = []
    """Heap of the others, with the room negated."""
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
            over = end - at - full * each if full < bins else 0  # too few to fill a bin: they all go to the next one
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
    return placements


@final
class Placements:
    """Stretches of sorted samples and the bins they went to."""

    def __init__(self) -> None:
        self.bins = 0
        """Bins that hold something."""
        self._rows: list[tuple[int, int, int, int]] = []

    def add(self, at: int, *, first_bin: int, per_bin: int, bins: int) -> None:
        """The sorted samples from `at` on go to `bins` neighboring bins, `per_bin` to each."""
        self._rows.append((at, first_bin, per_bin, per_bin * bins))
        if first_bin + bins > self.bins:
            self.bins = first_bin + bins

    def copy(self) -> Placements:
        """The same placements, to which nothing is added."""
        same = Placements()
        same.bins, same._rows = self.bins, list(self._rows)
        return same

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


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Place samples by best-fit-decreasing: at most 11/9 of the fewest bins possible, plus one.

    Args:
        lengths: int64 [N], each from 1 to `capacity` tokens.
        capacity: of a bin, in tokens.

    Returns:
        int64 [N]: the bin of each sample, from 0.
    """
    order = longest_first(lengths)
    return place_sorted(*_counted(lengths[order]), capacity).assign(order)


def _counted(sorted_lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(int64 [K]: the different lengths, int64 [K]: how many there are of each)."""
    edges = np.flatnonzero(np.diff(sorted_lengths, prepend=-1, append=-1))
    return sorted_lengths[edges[:-1]], np.diff(edges)


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


MOST_PARTS = 16
"""Parts of a bin that the lower bound counts, at most."""


def lower_bound(sizes: np.ndarray, capacity: int) -> int:
    """No packing needs fewer bins: the best of two bounds.

    L2 of Martello and Toth (1990): for a threshold t, samples above `capacity - t` can share with none of size t or
    more; those above half the capacity need a bin each; what the others of size t or more have over after filling these
    bins needs bins of its own. The best of all thresholds counts, t = 0 (everything together over the capacity)
    included.

    Parts: in k parts of a bin, a sample of n tokens needs ((k + 1) n - 1) // capacity of them, rounded down in favor of
    the packing, since these add up to less than k + 1 in every bin. So two samples above a third share a bin, three do
    not.

    Args:
        sizes: int64 [N], each from 0 to `capacity`; zeros need nothing.
        capacity: of a bin, in the same unit.
    """
    return _lower_bound(*np.unique(sizes[sizes > 0], return_counts=True), capacity)


def _lower_bound(rising: np.ndarray, counts: np.ndarray, capacity: int) -> int:
    """`lower_bound` of the different sizes [K], rising, and the samples of each."""
    if not len(rising):
        return 0
    number, sums = (np.concatenate([[0], np.cumsum(of_each)]) for of_each in (counts, counts * rising))
    half = int(np.searchsorted(rising, capacity // 2, side="right"))
    thresholds = np.concatenate([[0], rising[:half]])
    first = np.searchsorted(rising, thresholds, side="left")
    alone = np.searchsorted(rising, capacity - thresholds, side="right")
    room = (number[alone] - number[half]) * capacity - (sums[alone] - sums[half])
    over = np.maximum(sums[half] - sums[first] - room, 0)
    needed = [int((number[-1] - number[half] + divided_up(over, capacity)).max())]
    for parts in range(2, MOST_PARTS + 1):
        needed.append(divided_up(int((((parts + 1) * rising - 1) // capacity * counts).sum()), parts))
    return max(needed)


# ---------------------------------------------------------------------- exact fill


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

SLACK = 1024
"""A row counts as full with less than a part in this many left over."""

NEGLIGIBLE = 10_000
"""Best fit is good enough where less than one bin in this many could be saved."""

MIN_DRAWS = 256
"""Draws without a gain after which the search ends, or more: fewer gain too little in a small set to be seen."""


def exact_fill(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Fill rows exactly, many alike at a time, for as long as that saves rows; best-fit-decreasing places the rest.

    From time to time the samples left over are placed on trial, which gives the number of bins if the search ended
    there. It ends where that number has stopped falling, and goes back to where it was lowest. So there are never more
    bins than best fit needs, and where nothing can be gained the search costs little more than best fit itself.

    Args:
        lengths: int64 [N], each from 1 to `capacity` tokens.
        capacity: of a bin, in tokens.

    Returns:
        int64 [N]: the bin of each sample, from 0.
    """
    order = longest_first(lengths)
    sizes, counts = _counted(lengths[order])
    best_fit = place_sorted(sizes, counts, capacity)
    bound = _lower_bound(sizes[::-1], counts[::-1], capacity)
    if best_fit.bins - bound <= best_fit.bins // NEGLIGIBLE:
        return best_fit.assign(order)
    exact = _fill_rows(Stock(sizes, counts), capacity, best_fit=best_fit.bins, bound=bound)
    if not exact.bins:
        return best_fit.assign(order)
    bin_of = exact.assign(order)
    if len(rest := order[bin_of[order] < 0]):
        bin_of[rest] = exact.bins + place_sorted(*_counted(lengths[rest]), capacity).assign(np.arange(len(rest)))
    return bin_of


def _fill_rows(stock: Stock, capacity: int, *, best_fit: int, bound: int) -> Placements:
    """Make full rows around the longest lengths, up to where best fit of the rest gives the fewest bins in all.

    Args:
        stock: all samples.
        capacity: of a bin, in tokens.
        best_fit: bins that best fit needs for all of them.
        bound: no packing needs fewer bins.
    """
    placements = Placements()
    best, fewest, best_draws, useless = placements.copy(), best_fit, 0, 0
    # draws before the first trial take about as long as the trial itself, a best fit of what is left
    first_trial = 1 + 2048 * len(stock.sizes) // (16384 + capacity)
    next_trial, left = first_trial, True
    while left and fewest > bound:
        while (left := stock.seek_longest()) and stock.draws < next_trial:
            _fill_rows_of_longest(stock, placements, capacity)
        bins = placements.bins + place_sorted(*stock.left, capacity).bins
        if bins < fewest:
            best, fewest, best_draws, useless = placements.copy(), bins, stock.draws, 0
        else:
            useless += 1
        if useless >= (2 if best_draws else 1) and stock.draws - best_draws >= MIN_DRAWS:
            break
        next_trial = stock.draws + (2 if best_draws else 1) * first_trial
    return best


def _fill_rows_of_longest(stock: Stock, placements: Placements, capacity: int) -> None:
    """Make full rows around the longest length that is left, or leave it to best fit."""
    room = capacity - stock.longest
    for _ in range(TRIES):
        company = stock.draw(room)
        chosen = company[best_subset(stock.sizes[company].tolist(), room)]
        if room - int(stock.sizes[chosen].sum()) <= capacity // SLACK:
            stock.use(chosen, placements)
            return
        if not len(company):
            break
    stock.skip_longest()


@final
class Stock:
    """Counts of the samples of each length that are left.

    Args:
        sizes: int64 [K]: the different lengths, falling.
        counts: int64 [K]: samples of each.
    """

    def __init__(self, sizes: np.ndarray, counts: np.ndarray) -> None:
        self.sizes = sizes
        """int64 [K]: the different lengths, falling."""
        self._negated = -sizes
        self._next = np.cumsum(counts) - counts
        self._left = counts.copy()
        self._shares = self._left.cumsum()
        self._used = 0
        self._top = 0
        self.draws = 0
        """Times that samples were drawn."""
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

    @property
    def left(self) -> tuple[np.ndarray, np.ndarray]:
        """(int64 [k]: lengths, falling, int64 [k]: samples of each that are left)."""
        kinds = np.flatnonzero(self._left)
        return self.sizes[kinds], self._left[kinds]

    def skip_longest(self) -> None:
        """Leave the longest length alone from now on, except as company of shorter ones."""
        self._top += 1

    def draw(self, room: int) -> np.ndarray:
        """Indices into `sizes`, falling lengths: samples of at most `room` tokens, drawn as often as they occur."""
        self.draws += 1
        if self._used >= CANDIDATES // 8:  # the shares are good enough for a while
            self._shares, self._used = self._left.cumsum(), 0
        fitting = int(self._negated.searchsorted(-room))
        below = int(self._shares[fitting - 1]) if fitting else 0
        if below == self._shares[-1]:
            return np.zeros(0, np.int64)
        drawn = self._random.integers(below, self._shares[-1], CANDIDATES)
        drawn.sort()
        kinds = self._shares.searchsorted(drawn, side="right")
        nth = np.arange(CANDIDATES) - kinds.searchsorted(kinds)  # of its length, from 0
        return kinds[nth < self._left[kinds] - (kinds == self._top)]

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
