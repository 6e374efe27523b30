"""Rows of a plan as columns of numbers, and as a `datasets.Dataset`.

Two samples [7 7 7] and [8 8] in a row of 7, or in one as long as its tokens:

    input_ids      7    7 7    8 8   0    0       7    7 7    8 8
    labels      -100    7 7 -100 8 -100 -100   -100    7 7 -100 8
    position_ids   0    1 2    0 1   0    0       0    1 2    0 1

Labels are Hugging Face's: not shifted, because models shift them. The first one of each sample is masked, because
shifted it would be what the sample before it is to predict.

G rows, T tokens of row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, final, get_args

import numpy as np

from vlmpack.errors import ConfigError, check_choice, check_extra, check_whole_number
from vlmpack.plan.lengths import LARGEST
from vlmpack.plan.plan import Plan
from vlmpack.text.samples import IGNORE, Samples

if TYPE_CHECKING:
    from datasets import Dataset

Mask = Literal["null", "padding"]
"""Content of the column `attention_mask`."""

BLOCK = 2**20
"""Tokens of the rows that are filled at a time; each block is a chunk of the data set."""


@final
@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """Fill values and widths of rows."""

    padding_value: int = 0
    """Of input_ids on padding; nothing reads it, but it must be an id of the model."""
    label_padding_value: int = IGNORE
    """Of labels where nothing is to be learnt."""
    pad_to_capacity: bool = True
    """True if rows are as wide as the capacity, or as their tokens."""

    def __post_init__(self) -> None:
        limits = {"at_least": 0, "at_most": LARGEST, "remedy": "give the tokenizer's pad_token_id"}
        value = check_whole_number("padding_value", self.padding_value, **limits)
        object.__setattr__(self, "padding_value", value)
        limits = {"at_least": -LARGEST, "at_most": LARGEST, "remedy": f"choose {IGNORE}, or another number below 0"}
        value = check_whole_number("label_padding_value", self.label_padding_value, **limits)
        object.__setattr__(self, "label_padding_value", value)


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
    """int64 [G]: real tokens of each row; the rest is padding."""

    @property
    def mask(self) -> np.ndarray:
        """int8 [T]: 1 on tokens, 0 on padding."""
        runs = np.stack([self.used, np.diff(self.bounds) - self.used], axis=1)
        return np.repeat(np.tile(np.asarray([1, 0], np.int8), len(self.used)), runs.ravel())


def fill_rows(
    samples: Samples, plan: Plan, form: RowFormat, *, rows: range | None = None, dtype: type[np.integer] = np.int32
) -> Rows:
    """Fill some rows of a plan: every token is copied once, a sample at a time.

    Args:
        samples: those that were planned.
        plan: which samples share a row.
        form: padding.
        rows: neighbouring rows, by number; None: all.
        dtype: of the columns.

    Raises:
        ConfigError: rows above the capacity (`oversize="own_row"`) that are to be padded to it; or a plan whose rows
            share prefixes.
    """
    from vlmpack.layout.segments import ranges

    if plan.groups is not None:
        raise ConfigError(
            "the rows of this plan share prefixes, and columns of text hold every sample whole: plan without groups=, "
            "or train on VLMCollator(tokenizer, layout='packed', share_prefixes=True)"
        )
    rows = range(len(plan)) if rows is None else rows
    bounds = plan.bounds[rows.start : rows.stop + 1]
    order = plan.sample_ids[bounds[0] : bounds[-1]]
    starts, lengths = samples.starts[order], samples.lengths[order]
    used = np.diff(np.concatenate([[0], np.cumsum(lengths)])[bounds - bounds[0]])
    widths = _padded(used, plan.capacity) if form.pad_to_capacity else used
    behind = bounds[1:] - bounds[0]  # one piece of padding ends each row, of no tokens where the row is full
    starts, lengths = np.insert(starts, behind, 0), np.insert(lengths, behind, widths - used)
    is_padding = np.insert(np.zeros(len(order), bool), behind, True)

    pads = np.full(lengths[is_padding].max(initial=0), form.padding_value, samples.values.dtype)
    spans = list(zip(map(slice, starts.tolist(), (starts + lengths).tolist()), is_padding.tolist(), strict=True))

    def joined(values: np.ndarray) -> np.ndarray:
        return np.concatenate([pads[:0], *(pads[at] if pad else values[at] for at, pad in spans)], dtype=dtype)

    input_ids = joined(samples.values)
    labels = input_ids.copy() if samples.targets is samples.values else joined(samples.targets)
    if form.label_padding_value != IGNORE:
        labels[labels == IGNORE] = form.label_padding_value
    stops = np.cumsum(lengths)
    labels[(stops - lengths)[~is_padding]] = form.label_padding_value
    position_ids = ranges(0, lengths, dtype)
    for stop, length in zip(stops[is_padding].tolist(), lengths[is_padding].tolist(), strict=True):
        labels[stop - length : stop] = form.label_padding_value
        position_ids[stop - length : stop] = 0
    row_bounds = np.concatenate([[0], np.cumsum(widths)])
    return Rows(input_ids=input_ids, labels=labels, position_ids=position_ids, bounds=row_bounds, used=used)


def _padded(used: np.ndarray, capacity: int) -> np.ndarray:
    """int64 [G]: the width of each row."""
    if used.max(initial=0) > capacity:
        raise ConfigError(
            f"a row holds {used.max()} tokens (oversize='own_row') and cannot be padded to the capacity of {capacity}; "
            "choose pad_to_capacity=False"
        )
    return np.full(len(used), capacity)


def make_dataset(samples: Samples, plan: Plan | None, form: RowFormat, mask: Mask, seq_lengths: bool) -> Dataset:
    """The rows of a plan as a data set; `plan` None: without rows.

    Raises:
        ConfigError: there is no such mask, or `datasets` is not installed.
    """
    check_choice("attention_mask", mask, get_args(Mask))
    check_extra("data", "datasets", needed_by="a packed data set")
    import pyarrow as pa
    from datasets import Dataset
    from datasets.fingerprint import Hasher

    ints = pa.list_(pa.int32())
    columns = {"input_ids": ints, "attention_mask": pa.list_(pa.int8()), "labels": ints, "position_ids": ints}
    if seq_lengths:
        columns["seq_lengths"] = ints
    schema = pa.schema(columns)
    blocks = () if plan is None else _blocks(samples, plan, form, mask)
    batches = [pa.record_batch([block[name] for name in columns], schema=schema) for block in blocks]
    settings = f"{'' if plan is None else plan.digest} {form} {[*columns]} {mask}".encode()
    content: list[Any] = [samples.values, samples.targets, samples.starts, settings]
    # Left to itself the data set pickles all that it holds to name it: 65 ns a token.
    return Dataset(pa.Table.from_batches(batches, schema=schema), fingerprint=Hasher.hash_bytes(content))


def _blocks(samples: Samples, plan: Plan, form: RowFormat, mask: Mask) -> Iterator[dict[str, Any]]:
    """Arrow arrays of some neighbouring rows at a time, by column; nothing is copied after `fill_rows`."""
    import pyarrow as pa

    def lists(values: np.ndarray, ends: np.ndarray) -> Any:
        return pa.ListArray.from_arrays(pa.array(ends.astype(np.int32)), pa.array(values))

    step = max(1, BLOCK // plan.capacity)
    for first in range(0, len(plan), step):
        rows = range(first, min(first + step, len(plan)))
        filled = fill_rows(samples, plan, form, rows=rows)
        bounds = plan.bounds[rows.start : rows.stop + 1]
        lengths = samples.lengths[plan.sample_ids[bounds[0] : bounds[-1]]].astype(np.int32)
        masks = pa.nulls(len(rows), pa.list_(pa.int8())) if mask == "null" else lists(filled.mask, filled.bounds)
        yield {
            "input_ids": lists(filled.input_ids, filled.bounds),
            "labels": lists(filled.labels, filled.bounds),
            "position_ids": lists(filled.position_ids, filled.bounds),
            "attention_mask": masks,
            "seq_lengths": lists(lengths, bounds - bounds[0]),
        }
