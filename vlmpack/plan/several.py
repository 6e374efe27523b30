"""One row under several limits at once: tokens, vision patches, images."""

from __future__ import annotations

from typing import final

import numpy as np

from vlmpack.plan.subset import best_subset

SHARPNESS = 8
"""How fast limits lose weight with their distance from binding: their share of the highest demand, to this power."""

ENOUGH = 0.995
"""A row this full (by weighted limits) needs no further exchanges."""

LEAST_GAIN = 1e-3
"""An exchange must gain at least this much, as a part of a full row."""

EXCHANGES = 8
"""Exchanges tried on one row."""

OUTSIDERS = 64
"""Waiting samples, the oldest, that an exchange looks at."""


def fill_row(costs: np.ndarray, limits: np.ndarray) -> list[int]:
    """Choose waiting samples for one row, the first of them among these.

    The limit with the highest demand among all that wait decides: it is filled exactly by subset sums. Where that
    exceeds another limit, samples are taken out again. Then samples are exchanged one for one with waiting ones as long
    as the row gets fuller, and what still fits is put in.

    Args:
        costs: int64 [W, K], what each of W waiting samples, the oldest first, needs of K things; each fits a row alone.
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
            given = self._costs[others, dominant] / self._limits[dominant]
            self.remove(int(others[(excess / given).argmax()]))

    def exchange(self) -> None:
        """Exchange one sample of the row, or none, for a waiting one, while that makes the row fuller."""
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
        """Put in every waiting sample that still fits, the oldest first."""
        for sample in np.flatnonzero(~self.inside & (self._costs <= self._left).all(1)).tolist():
            if (self._costs[sample] <= self._left).all():
                self.add(sample)
