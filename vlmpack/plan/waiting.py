"""Samples that wait for a row: each row is made around the oldest of them, so that none waits for long."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from operator import index as as_int
from typing import final

import numpy as np

from vlmpack.errors import ConfigError, SampleError
from vlmpack.plan.lengths import checked_capacity
from vlmpack.plan.several import fill_row
from vlmpack.plan.subset import best_subset

STEPS = 64
"""Samples that are looked at before those that may be of use are counted."""


@final
class WaitingRoom:
    """Take samples in one by one and give rows out: the oldest sample, and those that fill its row exactly.

    No randomness: what comes out depends on what came in and when rows were taken, and on nothing else. To continue
    somewhere else, give `waiting` to a new room, line by line.

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
        """Tokens that wait."""
        self._waiting: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        """(id, length, *costs) by the number under which a sample came in, the oldest first."""
        self._lengths: Counter[int] = Counter()
        """How many samples of each length wait."""
        self._added = 0
        self._table = np.zeros((0, len(self.limits)), np.int64)
        """int64 [W, K]: what the samples need, in their order; those that came since it was last used have no line."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> list[tuple[int, ...]]:
        """(id, length, *costs) of each waiting sample, the oldest first: what `add` takes."""
        return list(self._waiting.values())

    def add(self, sample_id: int, length: int, *costs: int) -> None:
        """Take a sample in.

        Args:
            sample_id: what `take` will give back.
            length: in tokens, at least 1.
            costs: what else it needs, one number a limit, 0 or more.

        Raises:
            SampleError: it can never fit a row, has no tokens, or has a length or cost that is no whole number, or a
                negative one.
            ConfigError: there are more or fewer costs than limits.
        """
        needs = _whole(sample_id, (length, *costs))
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
        self._waiting[self._added] = (sample_id, *needs)
        self._added += 1
        self._lengths[needs[0]] += 1
        self.tokens += needs[0]

    def take_oldest(self) -> tuple[int, ...]:
        """Give out the sample that has waited longest by itself: (id, length, *costs)."""
        sample = self._waiting[next(iter(self._waiting))]
        self._remove([0], [next(iter(self._waiting))])
        return sample

    @property
    def oldest(self) -> int:
        """The id of the sample that has waited longest; somebody has to be there."""
        return next(iter(self._waiting.values()))[0]

    def take(self, *, at_least: float = 0) -> list[int]:
        """Give out one row: ids, the oldest first. Empty if nobody waits, or it would hold fewer tokens than that."""
        if not self._waiting:
            return []
        places, chosen = self._choose()
        row = [self._waiting[number] for number in chosen]
        if sum(sample[1] for sample in row) < at_least:
            return []
        self._remove(places, chosen)
        return [sample[0] for sample in row]

    def _remove(self, places: Sequence[int], numbers: Sequence[int]) -> None:
        """Take samples out; `places` in the table are looked at where there is one."""
        self._table = np.delete(self._table, [at for at in places if at < len(self._table)], axis=0)
        for number in numbers:
            length = self._waiting.pop(number)[1]
            self.tokens -= length
            self._lengths[length] -= 1
            if not self._lengths[length]:
                del self._lengths[length]

    def _choose(self) -> tuple[list[int], list[int]]:
        """(places among those that wait, numbers) of the samples of one row; no places under one limit alone."""
        if len(self.limits) == 1:
            return [], self._fullest()
        new = [needs for _, *needs in islice(self._waiting.values(), len(self._table), None)]
        self._table = np.concatenate([self._table, np.array(new, np.int64).reshape(-1, len(self.limits))])
        places, numbers = fill_row(self._table, np.asarray(self.limits)), list(self._waiting)
        return places, [numbers[at] for at in places]

    def _fullest(self) -> list[int]:
        """Numbers of the oldest sample, and of those that fill its row best."""
        oldest, first = next(iter(self._waiting.items()))
        room, numbers = self.limits[0] - first[1], list[int]()
        return [oldest, *(numbers[at] for at in best_subset(self._company(room, numbers), room))]

    def _company(self, room: int, numbers: list[int]) -> Iterator[int]:
        """Lengths of the samples that may share a room with the oldest, the oldest first; their numbers go to a list.

        Of equal lengths, no more than fit together. The walk ends where all such have been met, which is only counted
        out after some steps: most rooms are full by then.
        """
        more: dict[int, int] = {}
        end: int | None = None
        for step, (number, (_, length, *_)) in enumerate(islice(self._waiting.items(), 1, None)):
            if more.setdefault(length, room // length):
                more[length] -= 1
                numbers.append(number)
                yield length
            if step == STEPS:
                others = self._lengths - Counter([next(iter(self._waiting.values()))[1]])
                end = sum(min(count, room // length) for length, count in others.items())
            if len(numbers) == end:
                return


def _whole(sample_id: int, needs: tuple[int, ...]) -> tuple[int, ...]:
    """Python ints, from those of numpy or torch too: subset sums shift by them."""
    try:
        return tuple(map(as_int, needs))
    except TypeError as error:
        raise SampleError(
            f"has a length and costs of {needs}; they must be whole numbers", index=sample_id, reason="not_whole"
        ) from error
