"""Next fit: samples stay in order, and a bin is closed when the next sample does not fit."""

from __future__ import annotations

import numpy as np


def next_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Cut the samples, in the order given, into bins.

    Where each bin would end is looked up for all possible starts at once; then only the starts that occur are walked.

    Args:
        lengths: int64 [N], each from 1 to `capacity` tokens.
        capacity: of a bin, in tokens.

    Returns:
        int64 [N]: the bin of each sample, from 0, never falling.
    """
    ends = np.cumsum(lengths)
    following = np.searchsorted(ends, ends - lengths + capacity, side="right").tolist()
    starts, at = [], 0
    while at < len(following):
        starts.append(at)
        at = following[at]
    opens = np.zeros(len(lengths), np.int64)
    opens[starts] = 1
    return np.cumsum(opens) - 1
