"""All samples through one waiting room: how a stream would pack them, and how several limits are planned."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vlmpack.plan.lengths import Budget
from vlmpack.plan.waiting import WaitingRoom

WAITING = 64
"""Samples among which a row is chosen ..."""

ROWS_WAITING = 4
"""... and at least this many rows' worth of tokens."""


def rolling_fill(lengths: np.ndarray, capacity: int, budgets: Sequence[Budget] = ()) -> np.ndarray:
    """Place samples in the order given, through a room in which a few wait.

    Args:
        lengths: int64 [N], each from 1 to `capacity` tokens.
        capacity: of a bin, in tokens.
        budgets: what else a bin may hold only so much of; no sample exceeds one alone.

    Returns:
        int64 [N]: the bin of each sample, in the order in which rows came out.
    """
    room = WaitingRoom(capacity, [budget.limit for budget in budgets])
    columns = [lengths.tolist(), *(budget.costs.tolist() for budget in budgets)]
    samples = enumerate(zip(*columns, strict=True))
    bin_of = np.empty(len(lengths), np.int64)
    bins, more = 0, True
    while more or len(room):
        while more and (len(room) < WAITING or room.tokens < ROWS_WAITING * capacity):
            sample = next(samples, None)
            if more := sample is not None:
                room.add(sample[0], *sample[1])
        if row := room.take():
            bin_of[row] = bins
            bins += 1
    return bin_of
