"""Best fit, the longest first: each sample goes where the least room is left that still holds it."""

from __future__ import annotations

import numpy as np

from vlmpack.plan.grouped import place_falling


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Place samples by best-fit-decreasing: at most 11/9 of the fewest bins possible, plus one.

    Args:
        lengths: int64 [N], each from 1 to `capacity` tokens.
        capacity: of a bin, in tokens.

    Returns:
        int64 [N]: the bin of each sample, from 0.
    """
    return place_falling(lengths, capacity, least_room)


def least_room(room: int, first_bin: int) -> int:
    """Rank of a run of bins: the one with the least room comes first."""
    return room
