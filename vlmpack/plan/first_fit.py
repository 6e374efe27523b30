"""First fit, the longest first: each sample goes to the first bin that has room for it."""

from __future__ import annotations

import numpy as np

from vlmpack.plan.grouped import place_falling


def first_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Place samples by first-fit-decreasing: at most 11/9 of the fewest bins possible, plus one.

    Args:
        lengths: int64 [N], each from 1 to `capacity` tokens.
        capacity: of a bin, in tokens.

    Returns:
        int64 [N]: the bin of each sample, from 0.
    """
    return place_falling(lengths, capacity, lambda room, first: first)
