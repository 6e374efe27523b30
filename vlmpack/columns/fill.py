"""Rows of a plan as columns of numbers.

Two samples [7 7 7] and [8 8] in a row of 7, or in one as long as its tokens:

    input_ids      7    7 7    8 8   0    0       7    7 7    8 8
    labels      -100    7 7 -100 8 -100 -100   -100    7 7 -100 8
    position_ids   0    1 2    0 1   0    0       0    1 2    0 1

Labels are Hugging Face's: not shifted, because models shift them. The first one of each sample is masked, because
shifted it would be what the sample before it is to predict.

G rows, R real tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
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
    ids_R, labels_R, positions_R = _joined(samples, order, ends, form, dtype)
    row_ends = ends[bounds - bounds[0]]
    used = np.diff(row_ends)
    if not form.pad_to_capacity:
        return Rows(input_ids=ids_R, labels=labels_R, position_ids=positions_R, bounds=row_ends, used=used)
    _check_widths(used, plan.capacity)
    return Rows(
        input_ids=_spread(ids_R, row_ends, plan.capacity, form.padding_value),
        labels=_spread(labels_R, row_ends, plan.capacity, form.label_padding_value),
        position_ids=_spread(positions_R, row_ends, plan.capacity, 0),
        bounds=np.arange(len(rows) + 1) * plan.capacity,
        used=used,
    )


def _joined(
    samples: Samples, order: np.ndarray, ends: np.ndarray, form: RowFormat, dtype: type[np.integer]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids, labels, positions), each [R]: samples `order` one after the other, without padding; `ends` from 0."""
    starts, lengths = samples.starts[order], samples.lengths[order]
    spans = [slice(a, b) for a, b in zip(starts.tolist(), (starts + lengths).tolist(), strict=True)]

    def joined(values: np.ndarray) -> np.ndarray:
        return np.concatenate([values[span] for span in spans], dtype=dtype) if spans else np.zeros(0, dtype)

    ids = joined(samples.values)
    labels = ids.copy() if samples.targets is samples.values else joined(samples.targets)
    if form.label_padding_value != IGNORE:
        labels[labels == IGNORE] = form.label_padding_value
    labels[ends[:-1]] = form.label_padding_value
    positions = np.arange(ends[-1], dtype=dtype)
    positions -= np.repeat(ends[:-1].astype(dtype), lengths)
    return ids, labels, positions


def _spread(column_R: np.ndarray, row_ends: np.ndarray, width: int, padding: int) -> np.ndarray:
    """[G * width]: each row's part of the column, and padding up to the width."""
    out = np.empty((len(row_ends) - 1, width), column_R.dtype)
    for row, (a, b) in zip(out, pairwise(row_ends.tolist()), strict=True):
        row[: b - a] = column_R[a:b]
        row[b - a :] = padding
    return out.ravel()


def _check_widths(used: np.ndarray, capacity: int) -> None:
    if used.max(initial=0) > capacity:
        raise ConfigError(
            f"a row holds {used.max()} tokens (oversize='own_row') and cannot be padded to the capacity of {capacity}; "
            "choose pad_to_capacity=False"
        )
