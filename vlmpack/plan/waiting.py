"""Samples that wait for a row: each row is made around the oldest of them, so that none waits for long."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index as as_int
from typing import final

import numpy as np

from vlmpack.errors import ConfigError, SampleError
from vlmpack.plan.lengths import checked_capacity
from vlmpack.plan.several import fill_row
from vlmpack.plan.subset import best_subset


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
        self._ids: list[int] = []
        self._costs: list[tuple[int, ...]] = []

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def waiting(self) -> list[tuple[int, ...]]:
        """(id, length, *costs) of each waiting sample, the oldest first: what `add` takes."""
        return [(name, *costs) for name, costs in zip(self._ids, self._costs, strict=True)]

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
        self._ids.append(sample_id)
        self._costs.append(needs)
        self.tokens += needs[0]

    def take_oldest(self) -> tuple[int, ...]:
        """Give out the sample that has waited longest by itself: (id, length, *costs)."""
        sample_id, costs = self._ids.pop(0), self._costs.pop(0)
        self.tokens -= costs[0]
        return (sample_id, *costs)

    @property
    def oldest(self) -> int:
        """The id of the sample that has waited longest; somebody has to be there."""
        return self._ids[0]

    def take(self, *, at_least: float = 0) -> list[int]:
        """Give out one row: ids, the oldest first. Empty if nobody waits, or it would hold fewer tokens than that."""
        if not self._ids:
            return []
        chosen = self._choose()
        row = [self._ids[index] for index in chosen]
        tokens = sum(self._costs[index][0] for index in chosen)
        if tokens < at_least:
            return []
        self.tokens -= tokens
        for index in reversed(chosen):
            del self._ids[index], self._costs[index]
        return row

    def _choose(self) -> list[int]:
        if len(self.limits) > 1:
            return fill_row(np.asarray(self._costs), np.asarray(self.limits))
        (first,), *others = self._costs
        return [0, *(1 + index for index in best_subset([length for (length,) in others], self.limits[0] - first))]


def _whole(sample_id: int, needs: tuple[int, ...]) -> tuple[int, ...]:
    """Python ints, from those of numpy or torch too: subset sums shift by them."""
    try:
        return tuple(map(as_int, needs))
    except TypeError as error:
        raise SampleError(
            f"has a length and costs of {needs}; they must be whole numbers", index=sample_id, reason="not_whole"
        ) from error
