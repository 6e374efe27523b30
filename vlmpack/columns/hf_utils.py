"""Packed rows as a `datasets.Dataset`, under SeqPacker's names."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from vlmpack.columns.fill import RowFormat, fill_rows
from vlmpack.columns.packer import Packer
from vlmpack.columns.result import PackResult
from vlmpack.columns.samples import IGNORE, Oversize, Samples
from vlmpack.errors import ConfigError
from vlmpack.plan import Plan

if TYPE_CHECKING:
    from datasets import Dataset

Mask = Literal["null", "padding"]
"""What the column `attention_mask` holds."""

BLOCK = 2**20
"""Tokens of the rows that are filled at a time; each block is a chunk of the data set."""


def pack_dataset(
    token_ids: Any,
    capacity: int,
    *,
    strategy: str = "obfd",
    seed: int | None = None,
    padding_value: int = 0,
    label_padding_value: int = IGNORE,
    labels: Any = None,
    loss_mask: Any = None,
    oversize: Oversize = "error",
    pad_to_capacity: bool = True,
    attention_mask: Mask = "null",
    seq_lengths: bool = False,
) -> Dataset:
    """Pack samples into rows, as a data set.

    The first six parameters are SeqPacker's. What the columns hold is told in the room's README.

    Args:
        token_ids: one list, vector or tensor for each sample, or a column of a `datasets.Dataset`.
        capacity: tokens that a row may hold.
        strategy: SeqPacker's name or ours, see `Packer`.
        seed: of the shuffle, see `Packer`.
        padding_value: of `input_ids` on padding.
        label_padding_value: of `labels` where nothing is to be learnt.
        labels: like `token_ids`: labels of each token, not shifted, -100 where nothing is to be learnt; None: the ids.
        loss_mask: like `token_ids`: 1 for tokens to be learnt, 0 for others; None: all. Not beside labels.
        oversize: samples above the capacity: refuse them, leave them out, keep their first tokens, or cut them into
            samples of at most that length.
        pad_to_capacity: False: rows are as long as their tokens.
        attention_mask: `"null"`: nothing, so that models tell samples apart by `position_ids`; `"padding"`: SeqPacker's
            ones and zeros, with which unmodified models mix samples.
        seq_lengths: add TRL's column of that name, the length of every sample of a row.

    Raises:
        SampleError: a sample that is no vector of token ids, is empty, too long, or has other labels; names it.
        ConfigError: a setting that does not exist, or `datasets` is not installed.
    """
    packer = Packer(capacity, strategy, seed)
    samples = Samples.read(token_ids, labels=labels, loss_mask=loss_mask).fitted(capacity, oversize)
    form = RowFormat(
        padding_value=padding_value, label_padding_value=label_padding_value, pad_to_capacity=pad_to_capacity
    )
    plan = packer.plan(samples.lengths, drop_oversize=oversize == "drop") if len(samples) else None
    return _dataset(samples, plan, form, attention_mask, seq_lengths)


def pack_dataset_from_result(
    result: PackResult | Plan,
    token_ids: Any,
    *,
    padding_value: int = 0,
    label_padding_value: int = IGNORE,
    labels: Any = None,
    loss_mask: Any = None,
    pad_to_capacity: bool = True,
    attention_mask: Mask = "null",
    seq_lengths: bool = False,
) -> Dataset:
    """The rows of a result, or of any `Plan`, as a data set; see `pack_dataset`.

    Raises:
        SampleError: a sample has another length than was packed; names it.
        ConfigError: there are more or fewer samples, or a setting does not exist.
    """
    plan = result.plan if isinstance(result, PackResult) else result
    samples = Samples.read(token_ids, labels=labels, loss_mask=loss_mask)
    samples.check_lengths(plan.lengths)
    form = RowFormat(
        padding_value=padding_value, label_padding_value=label_padding_value, pad_to_capacity=pad_to_capacity
    )
    return _dataset(samples, plan, form, attention_mask, seq_lengths)


def _dataset(samples: Samples, plan: Plan | None, form: RowFormat, mask: Mask, seq_lengths: bool) -> Dataset:
    if mask not in get_args(Mask):
        raise ConfigError(f"attention_mask must be one of {', '.join(get_args(Mask))}, got {mask!r}")
    if find_spec("datasets") is None:
        raise ConfigError("a packed data set needs datasets, not installed here: pip install 'vlmpack[data]'")
    import pyarrow as pa
    from datasets import Dataset
    from datasets.fingerprint import Hasher

    ints = pa.list_(pa.int32())
    schema = {"input_ids": ints, "attention_mask": pa.list_(pa.int8()), "labels": ints, "position_ids": ints}
    if seq_lengths:
        schema["seq_lengths"] = ints
    blocks = [] if plan is None else [_block(samples, plan, form, mask, rows) for rows in _row_blocks(plan)]
    batches = [pa.record_batch([block[name] for name in schema], schema=pa.schema(schema)) for block in blocks]
    settings = f"{'' if plan is None else plan.digest} {form} {[*schema]} {mask}".encode()
    content: list[Any] = [samples.values, samples.targets, samples.starts, settings]
    # Left to itself the data set pickles all that it holds to name it: 65 ns a token.
    name = Hasher.hash_bytes(content)
    return Dataset(pa.Table.from_batches(batches, schema=pa.schema(schema)), fingerprint=name)


def _row_blocks(plan: Plan) -> Iterator[range]:
    step = max(1, BLOCK // plan.capacity)
    return (range(first, min(first + step, len(plan))) for first in range(0, len(plan), step))


def _block(samples: Samples, plan: Plan, form: RowFormat, mask: Mask, rows: range) -> dict[str, Any]:
    """Arrow arrays of some neighbouring rows, by column; nothing is copied after `fill_rows`."""
    import pyarrow as pa

    filled = fill_rows(samples, plan, form, rows=rows)
    bounds = plan.bounds[rows.start : rows.stop + 1]

    def lists(values: np.ndarray, ends: np.ndarray) -> Any:
        return pa.ListArray.from_arrays(pa.array(ends.astype(np.int32)), pa.array(values))

    return {
        "input_ids": lists(filled.input_ids, filled.bounds),
        "labels": lists(filled.labels, filled.bounds),
        "position_ids": lists(filled.position_ids, filled.bounds),
        "attention_mask": (
            pa.nulls(len(rows), pa.list_(pa.int8())) if mask == "null" else lists(filled.mask, filled.bounds)
        ),
        "seq_lengths": lists(
            samples.lengths[plan.sample_ids[bounds[0] : bounds[-1]]].astype(np.int32), bounds - bounds[0]
        ),
    }
