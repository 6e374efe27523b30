"""Worst fit, the longest first: each sample goes where the most room is left, which keeps bins equally full."""

from __future__ import annotations

import numpy as np

from vlmpack.plan.grouped import place_falling


def worst_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Place samples by worst-fit-decreasing; a new bin is opened only where none has room.

    Args:
        lengths: int64 [N], each from 1 to `capacity` tokens.
        capacity: of a bin, in tokens.

    Returns:
        int64 [N]: the bin of each sample, from 0.
    """
    return place_falling(lengths, capacity, lambda room, first: -room, one_a_visit=True)
