"""What the boundaries of a row say of each of its tokens, as numpy arrays: no python loop over tokens.

G segments, T row tokens, R real tokens. A row without gaps, the usual one, takes the short way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vlmpack.layout.segments import Segments


def ranges(starts: np.ndarray | int, lengths: np.ndarray, dtype: type[np.integer] = np.int64) -> np.ndarray:
    """The whole numbers of every range [start, start + length), one range after the other, of type `dtype`."""
    before = np.cumsum(lengths) - lengths
    numbers = np.arange(lengths.sum(), dtype=dtype)
    numbers += np.repeat((starts - before).astype(dtype), lengths)
    return numbers


def real(row: Segments) -> np.ndarray:
    """int32 [G + 1]: cumulative real tokens."""
    return np.asarray(row.real, np.int32)


def stride(row: Segments) -> np.ndarray:
    """int32 [G + 1]: where each slot starts."""
    return np.asarray(row.stride, np.int32)


def kernel(row: Segments) -> np.ndarray:
    """int32 [any]: boundaries for varlen attention kernels."""
    return np.asarray(row.kernel, np.int32)


def seq_idx(row: Segments) -> np.ndarray:
    """int32 [T]: the segment whose slot holds each token; G on the row's tail."""
    slots = _slots_and_tail(row)
    return np.repeat(np.arange(len(slots), dtype=np.int32), slots)


def padding(row: Segments) -> np.ndarray:
    """bool [T]: True where the row holds padding."""
    mask = np.full(row.total, row.has_gaps)
    for start, stop in row.spans if row.has_gaps else ():
        mask[start:stop] = False
    return mask


def real_index(row: Segments) -> np.ndarray:
    """int64 [R]: where the real tokens are, in order."""
    return np.flatnonzero(~padding(row))


def position(row: Segments) -> np.ndarray:
    """int64 [T]: 0, 1, 2, ... from each slot's start; 0 on padding."""
    if not row.has_gaps:
        place = np.arange(row.max_length)
        return np.concatenate([place[:n] for n in row.lengths])
    place = np.arange(row.total) - np.repeat(row.stride, _slots_and_tail(row))
    return np.where(padding(row), 0, place)


def first_tokens(row: Segments) -> np.ndarray:
    """int64 [at most G]: where each segment has its first real token; empty segments have none."""
    return np.asarray([start for start, stop in row.spans if stop > start], np.int64)


def last_tokens(row: Segments) -> np.ndarray:
    """int64 [at most G]: where each segment has its last real token; empty segments have none."""
    return np.asarray([stop - 1 for start, stop in row.spans if stop > start], np.int64)


def _slots_and_tail(row: Segments) -> tuple[int, ...]:
    return (*row.slots, row.total - sum(row.slots))
