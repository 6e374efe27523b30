"""Per-token indices of a row, derived from its boundaries as numpy arrays: no python loop over tokens.

G segments, T row tokens, R real tokens.
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
    slots = slots_and_tail(row)
    return np.repeat(np.arange(len(slots), dtype=np.int32), slots)


def padding(row: Segments) -> np.ndarray:
    """bool [T]: True where the row holds padding."""
    mask = np.full(row.total, row.has_gaps)
    for start, stop in row.spans if row.has_gaps else ():
        mask[start:stop] = False
    return mask


def real_index(row: Segments) -> np.ndarray:
    """int64 [R]: where the real tokens are, in order."""
    return ranges(np.asarray(row.stride[:-1], np.int64), np.asarray(row.lengths, np.int64))


def position(row: Segments) -> np.ndarray:
    """int64 [T]: 0, 1, 2, ... from each slot's start; 0 on padding."""
    if not row.has_gaps:  # copies of one range: less memory is touched than by `ranges`
        longest = np.arange(row.max_length)
        return np.concatenate([longest[:n] for n in row.lengths])
    return np.where(padding(row), 0, ranges(0, np.asarray(slots_and_tail(row), np.int64)))


def first_tokens(row: Segments) -> np.ndarray:
    """int64 [at most G]: where each segment has its first real token; empty segments have none."""
    return np.asarray([start for start, stop in row.spans if stop > start], np.int64)


def last_tokens(row: Segments) -> np.ndarray:
    """int64 [at most G]: where each segment has its last real token; empty segments have none."""
    return np.asarray([stop - 1 for start, stop in row.spans if stop > start], np.int64)


def slots_and_tail(row: Segments) -> tuple[int, ...]:
    """Tokens of each slot, and of the row's tail behind them: G + 1 values that cover the row."""
    return (*row.slots, row.total - sum(row.slots))
