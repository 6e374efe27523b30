"""Rows of a plan as columns of numbers.

Two samples [7 7 7] and [8 8] in a row of 7, or in one as long as its tokens:

    input_ids      7    7 7    8 8   0    0       7    7 7    8 8
    labels      -100    7 7 -100 8 -100 -100   -100    7 7 -100 8
    position_ids   0    1 2    0 1   0    0       0    1 2    0 1

Labels are Hugging Face's: not shifted, because models shift them. The first one of each sample is masked, because
shifted it would be what the sample before it is to predict.

G rows, T tokens of row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from vlmpack.columns.samples import IGNORE, Samples
from vlmpack.errors import ConfigError
from vlmpack.plan import LARGEST, Plan

ORDINARY = {"padding_value": "the tokenizer's pad_token_id", "label_padding_value": IGNORE}
"""What padding is most often."""


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

    def __post_init__(self) -> None:
        for name in ("padding_value", "label_padding_value"):
            value = self.__dict__[name]
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise ConfigError(f"{name} is {value!r}; it is a whole number, such as {ORDINARY[name]}")
            object.__setattr__(self, name, int(value))
        if not 0 <= self.padding_value <= LARGEST:
            raise ConfigError(f"padding_value is {self.padding_value}; it is a token id, 0 or more")
        if not -LARGEST <= self.label_padding_value <= LARGEST:
            raise ConfigError(
                f"label_padding_value is {self.label_padding_value}, which is no 32-bit number; choose {IGNORE}, or "
                "another number below 0"
            )


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
    used = np.diff(ends[bounds - bounds[0]])
    starts, lengths = samples.starts[order], samples.lengths[order]
    padding = np.zeros(len(order), bool)
    widths = used
    if form.pad_to_capacity:
        widths = _padded(used, plan.capacity)
        behind = bounds[1:] - bounds[0]  # one piece of padding ends each row
        starts, lengths = np.insert(starts, behind, 0), np.insert(lengths, behind, widths - used)
        padding = np.insert(padding, behind, True)
    pieces = _Pieces(starts=starts, lengths=lengths, padding=padding)
    ids, labels, positions = _columns(samples, pieces, form, dtype)
    row_bounds = np.concatenate([[0], np.cumsum(widths)])
    return Rows(input_ids=ids, labels=labels, position_ids=positions, bounds=row_bounds, used=used)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class _Pieces:
    """What lies in the rows, from the first token to the last: P samples and runs of padding."""

    starts: np.ndarray
    """int64 [P]: where each sample starts in `Samples.values`."""
    lengths: np.ndarray
    """int64 [P]: tokens."""
    padding: np.ndarray
    """bool [P]: whether it is padding."""


def _columns(
    samples: Samples, pieces: _Pieces, form: RowFormat, dtype: type[np.integer]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids, labels, positions), each [T]: every token is copied once, a piece at a time."""
    pads = np.full(pieces.lengths[pieces.padding].max(initial=0), form.padding_value, samples.values.dtype)
    ends = (pieces.starts + pieces.lengths).tolist()
    spans = list(zip(map(slice, pieces.starts.tolist(), ends), pieces.padding.tolist(), strict=True))

    def joined(values: np.ndarray) -> np.ndarray:
        parts = [pads[span] if is_padding else values[span] for span, is_padding in spans]
        return np.concatenate(parts, dtype=dtype) if parts else np.zeros(0, dtype)

    ids = joined(samples.values)
    labels = ids.copy() if samples.targets is samples.values else joined(samples.targets)
    if form.label_padding_value != IGNORE:
        labels[labels == IGNORE] = form.label_padding_value
    bounds = np.concatenate([[0], np.cumsum(pieces.lengths)])
    labels[bounds[:-1][~pieces.padding]] = form.label_padding_value
    positions = np.arange(bounds[-1], dtype=dtype)
    positions -= np.repeat(bounds[:-1].astype(dtype), pieces.lengths)
    for a, b in np.stack([bounds[:-1], bounds[1:]], axis=1)[pieces.padding].tolist():
        labels[a:b] = form.label_padding_value
        positions[a:b] = 0
    return ids, labels, positions


def _padded(used: np.ndarray, capacity: int) -> np.ndarray:
    """int64 [G]: the width of each row."""
    if used.max(initial=0) > capacity:
        raise ConfigError(
            f"a row holds {used.max()} tokens (oversize='own_row') and cannot be padded to the capacity of {capacity}; "
            "choose pad_to_capacity=False"
        )
    return np.full(len(used), capacity)
