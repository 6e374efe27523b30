"""Rows of a plan as columns of numbers: the tokens of its samples, one copy each.

Two samples [7 7 7] and [8 8] in a row of 7, or in one as long as its tokens:

    input_ids      7    7 7    8 8   0    0       7    7 7    8 8
    labels      -100    7 7 -100 8 -100 -100   -100    7 7 -100 8
    position_ids   0    1 2    0 1   0    0       0    1 2    0 1

Labels are Hugging Face's: not shifted, because models shift them. The first one of each sample is masked, because
shifted it would be what the sample before it is to predict.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from vlmpack.columns.samples import IGNORE, Samples
from vlmpack.errors import ConfigError
from vlmpack.plan import Plan


@final
@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """What stands where no sample is, and how wide rows are."""

    padding_value: int = 0
    """Of input_ids on padding; nothing reads it, but it must be an id of the model."""
    label_padding_value: int = IGNORE
    """Of labels where nothing is to be learnt."""
    pad_to_capacity: bool = True
    """Whether rows are as wide as the capacity, or as their tokens."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """G rows one after the other, as `fill_rows` makes them."""

    input_ids: np.ndarray
    """[T] token ids."""
    labels: np.ndarray
    """[T] not shifted, each sample's first one masked."""
    position_ids: np.ndarray
    """[T] 0, 1, 2, ... in every sample; 0 on padding."""
    bounds: np.ndarray
    """int64 [G + 1]: where each row starts in the columns."""
    used: np.ndarray
    """int64 [G]: real tokens of each row; what is over is padding."""

    @property
    def mask(self) -> np.ndarray:
        """int8 [T]: 1 on tokens, 0 on padding."""
        runs = np.stack([self.used, np.diff(self.bounds) - self.used], axis=1)
        return np.repeat(np.tile(np.asarray([1, 0], np.int8), len(self.used)), runs.ravel())


def fill_rows(
    samples: Samples, plan: Plan, form: RowFormat, *, rows: range | None = None, dtype: type[np.integer] = np.int32
) -> Rows:
    """Fill some rows of a plan.

    Args:
        samples: those that were planned.
        plan: which samples share a row.
        form: padding.
        rows: neighbouring rows, by number; None: all.
        dtype: of the columns.

    Raises:
        ConfigError: rows above the capacity (`oversize="own_row"`) that are to be padded to it.
    """
    rows = range(len(plan)) if rows is None else rows
    bounds = plan.bounds[rows.start : rows.stop + 1]
    order = plan.sample_ids[bounds[0] : bounds[-1]]
    ends = np.concatenate([[0], np.cumsum(samples.lengths[order])])
    row_ends = ends[bounds - bounds[0]]
    used = np.diff(row_ends)
    widths = _widths(used, plan.capacity, form)
    starts = np.concatenate([[0], np.cumsum(widths)])
    shift = np.repeat(starts[:-1] - row_ends[:-1], np.diff(bounds))
    return _copied(samples, order, ends[:-1] + shift, form, dtype, bounds=starts, used=used)


def _widths(used: np.ndarray, capacity: int, form: RowFormat) -> np.ndarray:
    if not form.pad_to_capacity:
        return used
    if (used > capacity).any():
        raise ConfigError(
            f"a row holds {used.max()} tokens (oversize='own_row') and cannot be padded to the capacity of {capacity}; "
            "choose pad_to_capacity=False"
        )
    return np.full(len(used), capacity)


def _copied(
    samples: Samples,
    order: np.ndarray,
    places: np.ndarray,
    form: RowFormat,
    dtype: type[np.integer],
    *,
    bounds: np.ndarray,
    used: np.ndarray,
) -> Rows:
    """Copy samples `order` to their `places` in the columns, a memory copy each."""
    total = int(bounds[-1])
    input_ids = np.full(total, form.padding_value, dtype)
    labels = np.full(total, form.label_padding_value, dtype)
    position_ids = np.zeros(total, dtype)
    lengths = samples.lengths[order]
    count = np.arange(lengths.max(initial=0), dtype=dtype)
    values, targets = samples.values, _targets(samples, form)
    for at, start, n in zip(places.tolist(), samples.starts[order].tolist(), lengths.tolist(), strict=True):
        input_ids[at : at + n] = values[start : start + n]
        labels[at + 1 : at + n] = targets[start + 1 : start + n]
        position_ids[at : at + n] = count[:n]
    return Rows(input_ids=input_ids, labels=labels, position_ids=position_ids, bounds=bounds, used=used)


def _targets(samples: Samples, form: RowFormat) -> np.ndarray:
    if form.label_padding_value == IGNORE or samples.targets is samples.values:
        return samples.targets
    return np.where(samples.targets == IGNORE, np.int32(form.label_padding_value), samples.targets)
