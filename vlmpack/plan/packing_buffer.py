"""A packing buffer (look-ahead): each row is made around the oldest sample in it, so that none stays for long."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from operator import index as as_int
from typing import final

import numpy as np

from vlmpack.errors import ConfigError, SampleError
from vlmpack.plan.exact_fill import best_subset
from vlmpack.plan.lengths import Budget, checked_capacity

SHARPNESS = 8
"""Power of a limit's share of the highest demand that is its weight: limits that do not bind hardly count."""

ENOUGH = 0.995
"""A row this full (by weighted limits) needs no further exchanges."""

LEAST_GAIN = 1e-3
"""An exchange must gain at least this much, as a part of a full row."""

EXCHANGES = 8
"""Exchanges tried on one row."""

OUTSIDERS = 64
"""Buffered samples, the oldest, that an exchange examines."""


def fill_row(costs: np.ndarray, limits: np.ndarray) -> list[int]:
    """Choose buffered samples for one row, the first of them among these.

    The limit with the highest demand in the buffer decides: it is filled exactly by subset sums. Where that
    exceeds another limit, samples are taken out again. Then samples are exchanged one for one with buffered ones while
    the row gets fuller, and what still fits is put in.

    Args:
        costs: int64 [W, K], what each of W buffered samples, the oldest first, needs of K things; each fits a row.
        limits: int64 [K], what a row may hold.

    Returns:
        Indices into `costs`, rising, 0 among them.
    """
    shares = costs / limits
    demand = shares.sum(0)
    dominant = int(demand.argmax())
    row = RowDraft(costs, limits, weights=(demand / demand[dominant]) ** SHARPNESS)
    fitting = np.flatnonzero((costs[0] + costs <= limits).all(1) & (costs[:, dominant] > 0))
    fitting = fitting[fitting > 0]
    room = int(limits[dominant] - costs[0, dominant])
    row.add(fitting[best_subset(costs[fitting, dominant].tolist(), room)])
    row.repair(dominant)
    row.exchange()
    row.top_up()
    return np.flatnonzero(row.inside).tolist()


@final
class RowDraft:
    """A row while its samples are chosen; sample 0 stays in it.

    Args:
        costs: int64 [W, K].
        limits: int64 [K].
        weights: float [K], how much each thing counts.
    """

    def __init__(self, costs: np.ndarray, limits: np.ndarray, *, weights: np.ndarray) -> None:
        self._costs = costs
        self._limits = limits
        self._worth = costs @ (weights / limits)
        self._enough = ENOUGH * weights.sum()
        self._left = limits - costs[0]
        self.inside = np.zeros(len(costs), bool)
        """bool [W]: which samples are in the row."""
        self.inside[0] = True

    def add(self, samples: np.ndarray | int) -> None:
        """Put samples in."""
        self.inside[samples] = True
        self._left = self._left - self._costs[samples].reshape(-1, len(self._limits)).sum(0)

    def remove(self, sample: int) -> None:
        """Take one out."""
        self.inside[sample] = False
        self._left = self._left + self._costs[sample]

    def repair(self, dominant: int) -> None:
        """While a limit is exceeded, take out the sample with most of what is over for what it gives of `dominant`."""
        while (over := self._left < 0).any():
            others = np.flatnonzero(self.inside)[1:]
            excess = (self._costs[others][:, over] / self._limits[over]).sum(1)
            benefit = self._costs[others, dominant] / self._limits[dominant]
            self.remove(int(others[(excess / benefit).argmax()]))

    def exchange(self) -> None:
        """Exchange one sample of the row, or none, for a buffered one, while that makes the row fuller."""
        for _ in range(EXCHANGES):
            if self._worth[self.inside].sum() >= self._enough:
                return
            others = np.flatnonzero(self.inside)[1:]
            outside = np.flatnonzero(~self.inside)[:OUTSIDERS]
            if not len(outside):
                return
            leavers = [None, *others.tolist()]  # None: nothing leaves
            room = self._left + np.concatenate([np.zeros_like(self._costs[:1]), self._costs[others]])
            worth = np.append(0.0, self._worth[others])
            fits = (self._costs[outside][None] <= room[:, None]).all(2)
            gain = np.where(fits, self._worth[outside][None] - worth[:, None], -1.0)
            at, joins = np.unravel_index(int(gain.argmax()), gain.shape)
            if gain[at, joins] < LEAST_GAIN:
                return
            if (leaver := leavers[at]) is not None:
                self.remove(leaver)
            self.add(int(outside[joins]))

    def top_up(self) -> None:
        """Put in every buffered sample that still fits, the oldest first."""
        for sample in np.flatnonzero(~self.inside & (self._costs <= self._left).all(1)).tolist():
            if (self._costs[sample] <= self._left).all():
                self.add(sample)


STEPS = 64
"""Samples examined before those that may be of use are counted."""


@final
class PackingBuffer:
    """Buffer samples one by one and make rows: the oldest sample, and those that fill its row exactly.

    No randomness: what comes out depends on what came in and when rows were taken, and on nothing else. To continue
    somewhere else, give `buffered` to a new buffer, line by line.

    Args:
        capacity: of a row, in tokens.
        limits: of whatever else a row holds, in the order of the costs given with each sample.

    Raises:
        ConfigError: a capacity or limit that is no whole number of at least 1.
    """

    def __init__(self, capacity: int, limits: Sequence[int] = ()) -> None:
        self.limits = (checked_capacity(capacity), *(checked_capacity(limit, "a row's limit") for limit in limits))
        """The capacity and the other limits."""
        self.tokens = 0
        """Tokens in the buffer."""
        self._buffered: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        """(id, length, *costs) by the number under which a sample came in, the oldest first."""
        self._lengths: Counter[int] = Counter()
        """Number of buffered samples of each length."""
        self._added = 0
        self._table = np.zeros((0, len(self.limits)), np.int64)
        """int64 [W, K]: what the samples need, in their order; those that came since it was last used have no line."""

    def __len__(self) -> int:
        return len(self._buffered)

    @property
    def buffered(self) -> list[tuple[int, ...]]:
        """(id, length, *costs) of each buffered sample, the oldest first: what `add` takes."""
        return list(self._buffered.values())

    def add(self, sample_id: int, length: int, *costs: int) -> None:
        """Add a sample.

        Args:
            sample_id: what `take` will give back.
            length: in tokens, at least 1.
            costs: what else it needs, one number a limit, 0 or more.

        Raises:
            SampleError: it can never fit a row, has no tokens, or has a length or cost that is no whole number, or a
                negative one.
            ConfigError: there are more or fewer costs than limits.
        """
        needs = whole_needs((length, *costs), sample_id)
        if len(needs) != len(self.limits):
            raise ConfigError(f"sample {sample_id} has {len(costs)} costs, but a row has {len(self.limits) - 1} limits")
        if length < 1 or any(need > limit for need, limit in zip(needs, self.limits, strict=True)):
            more, most = (f" and needs {list(costs)}", f" and {list(self.limits[1:])}") if costs else ("", "")
            raise SampleError(
                f"has {length} tokens{more}; a row holds from 1 to {self.limits[0]} tokens{most}. Leave it out, or "
                "plan larger rows",
                index=sample_id,
                reason="overlength" if length > 0 else "empty",
            )
        if min(needs) < 0:
            raise SampleError(
                f"needs {list(costs)} beside its tokens, and that cannot be negative",
                index=sample_id,
                reason="bad_cost",
            )
        self._buffered[self._added] = (sample_id, *needs)
        self._added += 1
        self._lengths[needs[0]] += 1
        self.tokens += needs[0]

    def take_oldest(self) -> tuple[int, ...]:
        """Take out the oldest sample by itself: (id, length, *costs)."""
        sample = self._buffered[next(iter(self._buffered))]
        self._remove([0], [next(iter(self._buffered))])
        return sample

    @property
    def oldest(self) -> int:
        """The id of the oldest sample; the buffer must not be empty."""
        return next(iter(self._buffered.values()))[0]

    def take(self, *, at_least: float = 0) -> list[int]:
        """Take out one row: ids, the oldest first. Empty if the buffer is, or if the row would hold fewer tokens."""
        if not self._buffered:
            return []
        places, chosen = self._choose()
        row = [self._buffered[number] for number in chosen]
        if sum(sample[1] for sample in row) < at_least:
            return []
        self._remove(places, chosen)
        return [sample[0] for sample in row]

    def _remove(self, places: Sequence[int], numbers: Sequence[int]) -> None:
        """Take samples out; `places` in the table are used where there is one."""
        self._table = np.delete(self._table, [at for at in places if at < len(self._table)], axis=0)
        for number in numbers:
            length = self._buffered.pop(number)[1]
            self.tokens -= length
            self._lengths[length] -= 1
            if not self._lengths[length]:
                del self._lengths[length]

    def _choose(self) -> tuple[list[int], list[int]]:
        """(places in the buffer, numbers) of the samples of one row; no places under one limit alone."""
        if len(self.limits) == 1:
            return [], self._fullest()
        new = [needs for _, *needs in islice(self._buffered.values(), len(self._table), None)]
        self._table = np.concatenate([self._table, np.array(new, np.int64).reshape(-1, len(self.limits))])
        places, numbers = fill_row(self._table, np.asarray(self.limits)), list(self._buffered)
        return places, [numbers[at] for at in places]

    def _fullest(self) -> list[int]:
        """Numbers of the oldest sample, and of those that fill its row best."""
        oldest, first = next(iter(self._buffered.items()))
        room, numbers = self.limits[0] - first[1], list[int]()
        return [oldest, *(numbers[at] for at in best_subset(self._candidates(room, numbers), room))]

    def _candidates(self, room: int, numbers: list[int]) -> Iterator[int]:
        """Lengths of the samples that may share a row with the oldest, the oldest first; their numbers go to a list.

        Of equal lengths, no more than fit together. The walk ends after the last such sample. Their number is only
        counted after some steps: most rows are full by then.
        """
        more: dict[int, int] = {}
        end: int | None = None
        for step, (number, (_, length, *_)) in enumerate(islice(self._buffered.items(), 1, None)):
            if more.setdefault(length, room // length):
                more[length] -= 1
                numbers.append(number)
                yield length
            if step == STEPS:
                others = self._lengths - Counter([next(iter(self._buffered.values()))[1]])
                end = sum(min(count, room // length) for length, count in others.items())
            if len(numbers) == end:
                return


def whole_needs(needs: tuple[int, ...], sample_id: int | None = None) -> tuple[int, ...]:
    """Convert (length, *costs) of a sample to Python ints, from those of numpy or torch too: subset sums shift by them.

    Raises:
        SampleError: one of them is no whole number.
    """
    try:
        return tuple(map(as_int, needs))
    except TypeError as error:
        fault = f"has a length and costs of {needs}; they must be whole numbers"
        raise SampleError(fault, index=sample_id, reason="not_whole") from error


LOOK_AHEAD = 64
"""Samples among which a row is chosen ..."""

ROWS_BUFFERED = 4
"""... and at least this many rows' worth of tokens."""


def rolling_fill(lengths: np.ndarray, capacity: int, budgets: Sequence[Budget] = ()) -> np.ndarray:
    """Place samples in the order given, through a packing buffer.

    Args:
        lengths: int64 [N], each from 1 to `capacity` tokens.
        capacity: of a bin, in tokens.
        budgets: what else a bin may hold only so much of; no sample exceeds one alone.

    Returns:
        int64 [N]: the bin of each sample, in the order in which rows came out.
    """
    buffer = PackingBuffer(capacity, [budget.limit for budget in budgets])
    columns = [lengths.tolist(), *(budget.costs.tolist() for budget in budgets)]
    samples = enumerate(zip(*columns, strict=True))
    bin_of = np.empty(len(lengths), np.int64)
    bins, more = 0, True
    while more or len(buffer):
        while more and (len(buffer) < LOOK_AHEAD or buffer.tokens < ROWS_BUFFERED * capacity):
            sample = next(samples, None)
            if more := sample is not None:
                buffer.add(sample[0], *sample[1])
        if row := buffer.take():
            bin_of[row] = bins
            bins += 1
    return bin_of
