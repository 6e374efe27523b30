"""How few bins could possibly do."""

from __future__ import annotations

import numpy as np

from vlmpack.plan.rounding import divided_up


def lower_bound(sizes: np.ndarray, capacity: int) -> int:
    """The bound L2 of Martello and Toth (1990): no packing at all needs fewer bins.

    For a threshold t, samples above `capacity - t` can share with none of size t or more; those above half the capacity
    need a bin each; what the others of size t or more have over after filling these bins needs bins of its own. The
    best of all thresholds counts, t = 0 (everything together over the capacity) included.

    Args:
        sizes: int64 [N], each from 0 to `capacity`; zeros need nothing.
        capacity: of a bin, in the same unit.
    """
    rising = np.sort(sizes[sizes > 0])
    if not len(rising):
        return 0
    sums = np.concatenate([[0], np.cumsum(rising)])
    half = int(np.searchsorted(rising, capacity // 2, side="right"))
    small = np.unique(rising[:half])
    thresholds = np.concatenate([[0], small])
    first = np.searchsorted(rising, thresholds, side="left")
    alone = np.searchsorted(rising, capacity - thresholds, side="right")
    big = len(rising) - half
    beside = (alone - half) * capacity - (sums[alone] - sums[half])
    over = np.maximum(sums[half] - sums[first] - beside, 0)
    return int((big + divided_up(over, capacity)).max())
