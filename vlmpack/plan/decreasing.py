"""The longest first, each into an open bin that has room. The strategies differ only in which bin comes first:

best fit     the one with the least room
first fit    the one that was opened first
worst fit    the one with the most room, looked for anew after each sample
"""

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


def first_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The same by first-fit-decreasing, which needs no more than that either."""
    return place_falling(lengths, capacity, lambda room, first_bin: first_bin)


def worst_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The same by worst-fit-decreasing, which keeps bins equally full."""
    return place_falling(lengths, capacity, lambda room, first_bin: -room, one_a_visit=True)


def least_room(room: int, first_bin: int) -> int:
    """Rank of a run of bins: the one with the least room comes first."""
    return room
