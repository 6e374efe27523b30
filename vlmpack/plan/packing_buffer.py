"""A packing buffer (look-ahead): each row is filled around the oldest buffered sample, so that no sample waits long."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from operator import index as as_int
from typing import final

import numpy as np

from vlmpack.errors import ConfigError, SampleError
from vlmpack.plan.exact_fill import best_subset
from vlmpack.plan.lengths import OVERLENGTH, checked_capacity

SHARPNESS = 8
"""A limit's weight is its demand relative to the highest demand, to this power: slack limits hardly count."""

ENOUGH = 0.995
"""Fill (by weighted limits) from which a row needs no further exchanges."""

LEAST_GAIN = 1e-3
"""Minimum gain of an exchange, as a fraction of a full row."""

EXCHANGES = 8
"""Maximum exchanges per row."""

OUTSIDERS = 64
"""How many buffered samples, oldest first, an exchange considers."""


def fill_row(costs: np.ndarray, limits: np.ndarray) -> list[int]:
    """Choose buffered samples for one row; the oldest one is always among them.

    The limit with the highest demand in the buffer dominates: subset sums fill it exactly. If the result exceeds
    another limit, samples are removed again. Then samples are exchanged one for one with buffered ones while that makes
    the row fuller, and samples that still fit are added.

    Args:
        costs: int64 [W, K]: costs of W buffered samples under K limits, oldest first; each sample fits a row.
        limits: int64 [K]: limits of a row.

    Returns:
        Indices into `costs`, ascending, including 0.
    """
    shares = costs / limits
    demand = shares.sum(0)
    dominant = int(demand.argmax())
    weights = (demand / demand[dominant]) ** SHARPNESS
    inside = np.zeros(len(costs), bool)
    inside[0] = True
    fitting = np.flatnonzero((costs[0] + costs <= limits).all(1) & (costs[:, dominant] > 0))
    fitting = fitting[fitting > 0]
    room = int(limits[dominant] - costs[0, dominant])
    inside[fitting[best_subset(costs[fitting, dominant].tolist(), room)]] = True
    _repair(inside, costs, limits, dominant)
    _exchange(inside, costs, limits, worth=costs @ (weights / limits), enough=ENOUGH * weights.sum())
    left = limits - costs[inside].sum(0)
    for sample in np.flatnonzero(~inside & (costs <= left).all(1)).tolist():
        if (costs[sample] <= left).all():
            inside[sample], left = True, left - costs[sample]
    return np.flatnonzero(inside).tolist()


def _repair(inside: np.ndarray, costs: np.ndarray, limits: np.ndarray, dominant: int) -> None:
    """Remove samples until no limit is exceeded: each time the one with the most excess per share of `dominant`."""
    while (over := costs[inside].sum(0) > limits).any():
        others = np.flatnonzero(inside)[1:]
        excess = (costs[others][:, over] / limits[over]).sum(1)
        benefit = costs[others, dominant] / limits[dominant]
        inside[others[(excess / benefit).argmax()]] = False


def _exchange(inside: np.ndarray, costs: np.ndarray, limits: np.ndarray, *, worth: np.ndarray, enough: float) -> None:
    """Add a buffered sample, or swap one in, while that makes the row fuller.

    Args:
        inside: bool [W]: which samples are in the row; changed here.
        costs: int64 [W, K].
        limits: int64 [K].
        worth: float [W]: how much of the row each sample fills, by weighted limits.
        enough: fill from which the row needs no further exchanges.
    """
    for _ in range(EXCHANGES):
        others, outside = np.flatnonzero(inside)[1:], np.flatnonzero(~inside)[:OUTSIDERS]
        if not len(outside) or worth[inside].sum() >= enough:
            return
        # the first line is for adding a sample, without one that leaves
        left = limits - costs[inside].sum(0)
        room = left + np.concatenate([np.zeros_like(costs[:1]), costs[others]])
        lost = np.append(0.0, worth[others])
        fits = (costs[outside][None] <= room[:, None]).all(2)
        gain = np.where(fits, worth[outside][None] - lost[:, None], -1.0)
        leaver, joiner = np.unravel_index(int(gain.argmax()), gain.shape)
        if gain[leaver, joiner] < LEAST_GAIN:
            return
        if leaver:
            inside[others[leaver - 1]] = False
        inside[outside[joiner]] = True


STEPS = 64
"""How many samples to examine before counting how many can still be useful."""


@final
class PackingBuffer:
    """Buffer samples one by one, and make rows of the oldest sample and the samples that fill its row exactly.

    The buffer is deterministic: rows depend only on the samples added and on when rows were taken. To continue
    elsewhere, `add` each entry of `buffered` to a new buffer.

    Args:
        capacity: maximum tokens of a row.
        limits: further limits of a row, in the order of the costs given with each sample.

    Raises:
        ConfigError: the capacity or a limit is not a whole number of at least 1.
    """

    def __init__(self, capacity: int, limits: Sequence[int] = ()) -> None:
        self.limits = (checked_capacity(capacity), *(checked_capacity(limit, "a row's limit") for limit in limits))
        """The capacity and the other limits."""
        self.tokens = 0
        """Tokens in the buffer."""
        self._buffered: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        """Insertion number -> (id, length, *costs), oldest first."""
        self._lengths: Counter[int] = Counter()
        """Number of buffered samples of each length."""
        self._added = 0
        self._table = np.zeros((0, len(self.limits)), np.int64)
        """int64 [W, K]: costs of the buffered samples, in order; samples added since its last use are missing."""

    def __len__(self) -> int:
        return len(self._buffered)

    @property
    def buffered(self) -> list[tuple[int, ...]]:
        """(id, length, *costs) of each buffered sample, oldest first: the arguments of `add`."""
        return list(self._buffered.values())

    def add(self, sample_id: int, length: int, *costs: int) -> None:
        """Add a sample.

        Args:
            sample_id: the id that `take` will return.
            length: tokens, at least 1.
            costs: one whole number of at least 0 per further limit.

        Raises:
            SampleError: the sample can never fit a row, has no tokens, or has a length or cost that is negative or not
                a whole number.
            ConfigError: there are more or fewer costs than limits.
        """
        needs = whole_needs((length, *costs), sample_id)
        if len(needs) != len(self.limits):
            raise ConfigError(f"sample {sample_id} has {len(costs)} costs, but a row has {len(self.limits) - 1} limits")
        if length < 1 or any(not 0 <= need <= limit for need, limit in zip(needs, self.limits, strict=True)):
            more, most = (f" and needs {list(costs)}", f", and 0 to {list(self.limits[1:])}") if costs else ("", "")
            raise SampleError(
                f"has {length} tokens{more}; a row holds from 1 to {self.limits[0]} tokens{most}. Leave it out, or "
                "plan larger rows",
                index=sample_id,
                reason="empty" if length < 1 else "bad_cost" if min(needs) < 0 else OVERLENGTH,
            )
        self._buffered[self._added] = (sample_id, *needs)
        self._added += 1
        self._lengths[needs[0]] += 1
        self.tokens += needs[0]

    def take_oldest(self) -> tuple[int, ...]:
        """Remove the oldest sample and return its (id, length, *costs)."""
        sample = self._buffered[next(iter(self._buffered))]
        self._remove([0], [next(iter(self._buffered))])
        return sample

    @property
    def oldest(self) -> int:
        """The id of the oldest sample; the buffer must not be empty."""
        return next(iter(self._buffered.values()))[0]

    def take(self, *, at_least: float = 0) -> list[int]:
        """Take one row: ids, oldest first.

        Returns an empty list, and takes nothing, if the buffer is empty or the row would hold fewer than `at_least`
        tokens.
        """
        if not self._buffered:
            return []
        places, chosen = self._choose()
        row = [self._buffered[number] for number in chosen]
        if sum(sample[1] for sample in row) < at_least:
            return []
        self._remove(places, chosen)
        return [sample[0] for sample in row]

    def _remove(self, places: Sequence[int], numbers: Sequence[int]) -> None:
        """Remove samples by `numbers`, and their lines in the table by `places`, as far as the table has them."""
        self._table = np.delete(self._table, [at for at in places if at < len(self._table)], axis=0)
        for number in numbers:
            length = self._buffered.pop(number)[1]
            self.tokens -= length
            self._lengths[length] -= 1
            if not self._lengths[length]:
                del self._lengths[length]

    def _choose(self) -> tuple[list[int], list[int]]:
        """Return (indices in the buffer, numbers) of one row's samples; no indices if tokens are the only limit."""
        if len(self.limits) == 1:
            return [], self._fullest()
        new = [needs for _, *needs in islice(self._buffered.values(), len(self._table), None)]
        self._table = np.concatenate([self._table, np.array(new, np.int64).reshape(-1, len(self.limits))])
        places, numbers = fill_row(self._table, np.asarray(self.limits)), list(self._buffered)
        return places, [numbers[at] for at in places]

    def _fullest(self) -> list[int]:
        """Return the numbers of the oldest sample and of the samples that fill its row best."""
        oldest, first = next(iter(self._buffered.items()))
        room, numbers = self.limits[0] - first[1], list[int]()
        return [oldest, *(numbers[at] for at in best_subset(self._candidates(room, numbers), room))]

    def _candidates(self, room: int, numbers: list[int]) -> Iterator[int]:
        """Yield the lengths of samples that may share a row with the oldest, oldest first, and append their numbers.

        Of equal lengths, only as many are yielded as fit together. The walk stops after the last useful sample. The
        number of useful samples is counted only after `STEPS` steps, because most rows are full by then.
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
    """Convert (length, *costs) of a sample from numpy or torch to Python ints, which subset sums can shift.

    Raises:
        SampleError: one of them is not a whole number.
    """
    try:
        return tuple(map(as_int, needs))
    except TypeError as error:
        fault = f"has a length and costs of {needs}; they must be whole numbers"
        raise SampleError(fault, index=sample_id, reason="not_whole") from error


LOOK_AHEAD = 64
"""Fill the buffer until it holds this many samples ..."""

ROWS_BUFFERED = 4
"""... and this many rows' worth of tokens."""


def rolling_fill(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Place samples in the order given, through a packing buffer.

    Args:
        lengths: int64 [N], each from 1 to `capacity` tokens.
        capacity: tokens of a bin.

    Returns:
        int64 [N]: the bin of each sample; bins are numbered in the order in which the buffer made them.
    """
    return fill_rows(lengths[:, None], [capacity])


def fill_rows(costs: np.ndarray, limits: Sequence[int]) -> np.ndarray:
    """Do the same under several limits: `costs` int64 [N, K], tokens first; no sample exceeds a limit alone."""
    buffer = PackingBuffer(limits[0], limits[1:])
    samples = enumerate(costs.tolist())
    bin_of = np.empty(len(costs), np.int64)
    bins, more = 0, True
    while more or len(buffer):
        while more and (len(buffer) < LOOK_AHEAD or buffer.tokens < ROWS_BUFFERED * limits[0]):
            sample = next(samples, None)
            if more := sample is not None:
                buffer.add(sample[0], *sample[1])
        if row := buffer.take():
            bin_of[row] = bins
            bins += 1
    return bin_of
