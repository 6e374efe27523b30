"""Join rows of packed text, as data sets hold them, to the row [1, T] that a model takes (`RowCollator`).

T tokens of a joined row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final, get_args

import numpy as np

from vlmpack.errors import ConfigError, SampleError, check_choice

IGNORE = -100
"""The label that cross-entropy ignores: `vlmpack.layout.batch.IGNORE`, which would import torch."""
LABELS = ("labels", "loss_mask", "completion_mask", "assistant_masks")
"""Columns that mark targets, not shifted; masks hold 0 and 1. A sample has one of them, or all tokens are targets."""
UNREAD = ("loss_weights", "topk_ids", "topk_logprobs")
"""Columns of `VLMCollator` that change the loss."""

PositionRows = Literal[0, 1, 4]
"""First dimension of `position_ids`, see `RowCollator.position_rows`."""
BareRow = Literal["refuse", "one_sample"]
"""What to do with a row without boundaries."""


@final
@dataclass(frozen=True, kw_only=True)
class RowCollator:
    """Joins the rows of a batch into one row [1, T] without padding. Use it as `data_collator` of HF Trainer.

    A model with packing enabled keeps samples apart by their boundaries. A plain transformers model keeps them apart by
    `position_ids` if it uses neither a cache nor a mask; the batch switches both off. This works for attention layers
    only: in models with gated delta layers (Qwen3-Next, Qwen3.5, Qwen4-exp), samples leak into each other silently.

    Raises:
        ConfigError: a setting is unknown.
    """

    position_rows: PositionRows = 1
    """1 for text models, 4 for models with MRoPE such as Qwen-VL; 0: no `position_ids`, because models with packing
    enabled compute them."""
    bare_row: BareRow = "refuse"
    """What to do with a row without `position_ids` and `seq_lengths`. "refuse": raise an error, because trainers remove
    columns that they do not use; "one_sample": take it as one sample, for a data set that was not packed."""

    def __post_init__(self) -> None:
        if self.position_rows not in get_args(PositionRows):
            raise ConfigError(f"position_rows is {self.position_rows!r}; text models take 1, Qwen-VL models 4")
        check_choice("bare_row", self.bare_row, get_args(BareRow))

    def __call__(self, features: Sequence[Any]) -> dict[str, Any]:
        """Join rows.

        Args:
            features: dictionaries with `input_ids`, and with boundaries: `seq_lengths` or `position_ids`.
                `attention_mask` marks padding (on the right). One of `labels`, `loss_mask`, `completion_mask` and
                `assistant_masks`, not shifted, marks what is trained on; without these, all tokens are trained on. With
                `bare_row="one_sample"`, features may also be plain token ids. An empty list (an empty row of a rank)
                gives one token without a target, so that the rank keeps in step with the others.

        Raises:
            SampleError: columns of a row do not fit together or contradict each other; names its index in the batch.
        """
        import torch

        from vlmpack.layout.batch import HostMetadata
        from vlmpack.layout.media import MediaTable
        from vlmpack.layout.row import PackedRow, shift_labels
        from vlmpack.layout.segments import Segments

        features = features or [{"input_ids": [0], "labels": [IGNORE], "seq_lengths": [1]}]
        names = ("attention_mask", "position_ids", "seq_lengths")
        rows = [read_row(feature, index, names, self.bare_row) for index, feature in enumerate(features)]
        input_ids, labels, lengths_of = zip(*rows, strict=True)
        lengths = [length for lengths in lengths_of for length in lengths]
        segments = Segments.from_lengths(lengths)
        shifted_1T = shift_labels(torch.from_numpy(np.concatenate(labels))[None], segments)
        position_1T = segments.position_in_segment()[None]
        row = PackedRow(
            input_ids=torch.from_numpy(np.concatenate(input_ids))[None],
            segments=segments,
            shift_labels=shifted_1T,
            position_ids={0: None, 1: position_1T, 4: position_1T.expand(4, 1, -1)}[self.position_rows],
            metadata=HostMetadata(
                lengths=tuple(lengths), media=MediaTable(), num_targets=int((shifted_1T != IGNORE).sum())
            ),
        )
        return {**row.to_hf(), "use_cache": False}


def read_row(
    feature: Any, index: int, names: Sequence[str], bare_row: BareRow
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Return (token ids, labels, lengths of the samples) of one feature, without its padding."""
    source = feature if isinstance(feature, Mapping) else {"input_ids": feature}
    if unread := [name for name in UNREAD if source.get(name) is not None]:
        raise bad_row(f"the row has {unread[0]}, which VLMCollator reads and rows of text do not; leave it out", index)
    names = ("input_ids", *names, *LABELS)
    columns = {name: vector(source[name], name, index) for name in names if source.get(name) is not None}
    if "input_ids" not in columns:
        raise bad_row(f"the row has no input_ids, but {', '.join(map(str, source))}", index)
    ids, marks = columns["input_ids"], [name for name in LABELS if name in columns]
    for name, column in columns.items():
        if name != "seq_lengths" and len(column) != len(ids):
            raise bad_row(f"the row has {len(ids)} input_ids, but {len(column)} of {name}", index)
        if "mask" in name and ((column != 0) & (column != 1)).any():
            raise bad_row(f"the row has other numbers than 0 and 1 in {name}", index)
    if len(marks) > 1:
        raise bad_row(f"the row has {' and '.join(marks)}, and each marks what is trained on; keep one of them", index)
    if bare_row == "refuse" and not {"position_ids", "seq_lengths"} & columns.keys():
        raise bad_row(
            "the row has neither position_ids nor seq_lengths, so its sample boundaries are unknown. If a trainer "
            "removed these columns, set remove_unused_columns=False (TRL: pack_dataset(..., seq_lengths=True)). If the "
            "row is a single sample, use RowCollator(bare_row='one_sample')",
            index,
        )
    labels = columns[marks[0]] if marks else ids
    labels = labels if marks in ([], ["labels"]) else np.where(labels, ids, IGNORE)
    lengths = _lengths(columns)
    real = sum(lengths)
    is_padding = "attention_mask" in columns or (not marks and "position_ids" in columns)
    is_left_out = "seq_lengths" in columns and not is_padding and (labels[real:] != IGNORE).any()
    if is_left_out or not _agree(columns, lengths):
        seen = {name: columns[name].tolist()[:9] for name in names[1:] if name in columns}
        raise bad_row(
            f"the row has {len(ids)} input_ids and samples of {lengths[:9]} tokens, and columns that contradict that "
            f"or are trained on behind these: {seen}; correct them, and pad on the right",
            index,
        )
    return ids[:real], labels[:real], lengths


def _lengths(columns: Mapping[str, np.ndarray]) -> list[int]:
    """Return the tokens of each sample of a row.

    Padding has position 0 at every token, like samples of one token. Without a mask, such tokens at the end of a row
    are taken for padding, because they have nothing to predict; a row that has only such tokens keeps one.
    """
    mask, positions = columns.get("attention_mask"), columns.get("position_ids")
    real = len(columns["input_ids"]) if mask is None else int(mask.sum())
    if "seq_lengths" in columns:
        return columns["seq_lengths"].tolist()
    if positions is None:
        return [real]
    lengths = np.diff(np.flatnonzero(positions[:real] == 0), append=real).tolist()
    while mask is None and len(lengths) > 1 and lengths[-1] == 1:
        lengths.pop()
    return lengths


def _agree(columns: Mapping[str, np.ndarray], lengths: Sequence[int]) -> bool:
    """Return whether a row has tokens, and its mask and positions match its samples."""
    width, total = len(columns["input_ids"]), sum(lengths)
    if not 0 < total <= width or min(lengths) < 1:
        return False
    mask, positions = columns.get("attention_mask"), columns.get("position_ids")
    if mask is not None and not np.array_equal(mask, np.arange(width) < total):
        return False
    if positions is None:
        return True
    counts_on = mask is None and (np.diff(positions[total - 1 :]) == 1).any()  # positions on padding must not rise
    return not counts_on and np.array_equal(positions[:total], positions_of(lengths))


def vector(values: Any, what: str, index: int) -> np.ndarray:
    """Return one sample's numbers as int64 [n]."""
    try:
        numbers = np.asarray(values)
    except (TypeError, ValueError, RuntimeError):  # ragged lists; a tensor on a device
        numbers = np.asarray(None)
    if numbers.ndim != 1 or (len(numbers) and numbers.dtype.kind not in "iub"):
        raise bad_row(f"the {what} are not a vector of whole numbers: {type(values).__name__} {values!r:.60}", index)
    return numbers.astype(np.int64)


def positions_of(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *map(np.arange, lengths)])


def bad_row(fault: str, index: int) -> SampleError:
    return SampleError(fault, index=index, reason="bad_tokens")
