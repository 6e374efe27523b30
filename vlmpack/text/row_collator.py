"""RowCollator: rows of a packed data set, or samples, as one row for models with packing enabled, and for plain ones of
attention alone.

input_ids      7 7 7 8 8 . .       two rows of a data set
position_ids   0 1 2 0 1 0 0
               9 9 9 9 . . .
               0 1 2 3 0 0 0

input_ids      7 7 7 8 8 9 9 9 9   one row for the model: the padding is left out
cu_seqlens_q   [0, 3, 5, 9]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final, get_args

import numpy as np
import torch

from vlmpack.errors import ConfigError, SampleError, check_choice
from vlmpack.layout.batch import HostMetadata
from vlmpack.layout.row import IGNORE, PackedRow, shift_labels
from vlmpack.layout.segments import Segments, ranges
from vlmpack.text.samples import learnt_column, masked_labels, real_tokens, token_ids_of, vector

PositionRows = Literal[0, 1, 4]
"""Number of rows of positions that a model takes."""

BareRow = Literal["refuse", "one_sample"]
"""The treatment of a row without boundaries."""

SHOWN = 9
"""Lengths that a message lists."""

NO_ROWS = {"input_ids": [0], "labels": [IGNORE], "seq_lengths": [1]}
"""Stands in for a batch without rows: a rank that has none keeps in step with the others, at a loss of 0."""


@final
@dataclass(frozen=True, kw_only=True)
class RowCollator:
    """Joins the rows of a batch into one row [1, T] without padding; give it to HF Trainer as `data_collator`.

    A model with packing enabled keeps samples apart by their boundaries. A plain transformers model does so by
    `position_ids`, if it makes no cache and gets no mask: the batch switches both off. But only its attention layers
    do: in one with gated delta layers (Qwen3-Next, Qwen3.5, Qwen4-exp) samples see each other, silently.

    Raises:
        ConfigError: a setting that does not exist.
    """

    position_rows: PositionRows = 1
    """1 for text models, 4 for Qwen-VL models, 0: no `position_ids` (models with packing enabled compute them)."""
    bare_row: BareRow = "refuse"
    """A row without `position_ids` and `seq_lengths` is an error, as trainers remove columns that they do not use; or
    one sample, if the data set was not packed."""

    def __post_init__(self) -> None:
        if self.position_rows not in get_args(PositionRows):
            raise ConfigError(f"position_rows is {self.position_rows!r}; text models take 1, Qwen-VL models 4")
        check_choice("bare_row", self.bare_row, get_args(BareRow))

    def __call__(self, features: Sequence[Any]) -> dict[str, Any]:
        """Join rows.

        Args:
            features: dictionaries with `input_ids`, and with the boundaries: `seq_lengths` or `position_ids`.
                `attention_mask` marks padding (on the right). One of `labels`, `loss_mask`, `completion_mask` and
                `assistant_masks`, not shifted, marks what is learnt; without them all tokens are. Where a bare row is
                one sample, also token ids alone. None at all, as a rank gets whose turn is an empty row, make one
                token and no target.

        Raises:
            SampleError: columns of a row that do not fit together, or contradict each other; names its place in the
                batch.
        """
        rows = [_Row.read(feature, index, self.bare_row) for index, feature in enumerate(features or [NO_ROWS])]
        row = joined_row(
            torch.from_numpy(np.concatenate([row.input_ids for row in rows], dtype=np.int64)),
            torch.from_numpy(np.concatenate([row.labels for row in rows], dtype=np.int64)),
            lengths=[n for row in rows for n in row.lengths],
            position_rows=self.position_rows,
        )
        return model_inputs(row)


def joined_row(
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    *,
    lengths: Sequence[int],
    sample_ids: tuple[int, ...] = (),
    position_rows: PositionRows = 1,
) -> PackedRow:
    """Make a packed row of samples that lie one after the other.

    Args:
        input_ids: [T] int64.
        labels: [T] int64, not shifted.
        lengths: tokens of each sample.
        sample_ids: of each sample.
        position_rows: rows of `position_ids`.
    """
    segments = Segments.from_lengths(lengths)
    shifted_1T = shift_labels(labels[None], segments)
    position_1T = segments.position_in_segment()[None]
    return PackedRow(
        input_ids=input_ids[None],
        segments=segments,
        shift_labels=shifted_1T,
        position_ids={0: None, 1: position_1T, 4: position_1T.expand(4, 1, -1)}[position_rows],
        metadata=HostMetadata(
            lengths=tuple(lengths),
            num_targets=int(np.count_nonzero(shifted_1T.numpy() != IGNORE)),
            sample_ids=sample_ids,
        ),
    )


def model_inputs(row: PackedRow) -> dict[str, Any]:
    """The row as keywords of a model. Without a cache transformers looks for samples in `position_ids`."""
    return {**row.to_hf(), "use_cache": False}


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class _Row:
    """One feature without its padding."""

    input_ids: np.ndarray
    labels: np.ndarray
    lengths: list[int]

    @classmethod
    def read(cls, feature: Any, index: int, bare_row: BareRow) -> _Row:
        source = feature if isinstance(feature, Mapping) else {}
        learnt = learnt_column(source, index)
        names = ("position_ids", "attention_mask", "seq_lengths", *([learnt] if learnt else ()))
        columns = {name: vector(source[name], name, index) for name in names if source.get(name) is not None}
        input_ids = columns["input_ids"] = vector(token_ids_of(feature, index), "input_ids", index)
        for name, column in columns.items():
            if name != "seq_lengths" and len(column) != len(input_ids):
                raise _bad(f"{len(input_ids)} input_ids, but {len(column)} of {name}", index)
        if bare_row == "refuse" and not {"position_ids", "seq_lengths"} & columns.keys():
            raise _bad(
                "neither position_ids nor seq_lengths, so its samples cannot be told apart. If a trainer removed them, "
                "set remove_unused_columns=False, or, for TRL, pack_dataset(..., seq_lengths=True); if it is one "
                "sample, RowCollator(bare_row='one_sample')",
                index,
            )
        lengths = _lengths(columns, index)
        real = sum(lengths)
        if not real:
            raise _bad("no tokens; leave it out", index)
        labels = columns[learnt or "input_ids"]
        if learnt not in (None, "labels"):
            labels = masked_labels(input_ids, labels, learnt, index)
        if "seq_lengths" in columns:
            _check_rest(columns, labels[real:], learnt, index)
        return cls(input_ids=input_ids[:real], labels=labels[:real], lengths=lengths)


def _lengths(columns: Mapping[str, np.ndarray], index: int) -> list[int]:
    """Tokens of each sample of a row; columns that hold or imply them have to agree."""
    width, mask = len(columns["input_ids"]), columns.get("attention_mask")
    real = None if mask is None else real_tokens(mask, index)
    if not {"seq_lengths", "position_ids"} & columns.keys():
        return [width if real is None else real]
    if "seq_lengths" not in columns:
        lengths = _restarts(columns["position_ids"][:real], index)
        return lengths.tolist() if real is not None else _without_padding(lengths)
    lengths = columns["seq_lengths"]
    total, listed = int(lengths.sum()), lengths.tolist()[:SHOWN]
    if lengths.min(initial=1) < 1 or total > width:
        raise _bad(f"seq_lengths {listed}, but {width} input_ids", index)
    if real not in (None, total):
        fault = f"seq_lengths {listed} of {total} tokens, but an attention_mask of {real}"
        raise _bad(f"{fault}; leave out the column that is wrong", index)
    if "position_ids" in columns:
        _check_positions(columns["position_ids"], lengths, index, masked=real is not None)
    return lengths.tolist()


def _restarts(positions: np.ndarray, index: int) -> np.ndarray:
    """The lengths that positions imply: each sample begins at 0."""
    counts_on = np.diff(positions) == 1
    if len(positions) and not (positions[0] == 0 and (counts_on | (positions[1:] == 0)).all()):
        raise _bad("position_ids that neither count on nor restart at 0", index)
    return np.diff(np.flatnonzero(positions == 0), append=len(positions))


def _check_positions(positions: np.ndarray, lengths: np.ndarray, index: int, *, masked: bool) -> None:
    """Refuse positions unless those of each sample count from 0 and, where no mask marks it, padding counts nothing.

    Place by place: in a total, a boundary missing in one sample would make up for one too many in the padding.
    """
    total = int(lengths.sum())
    counts_on = not masked and (np.diff(positions[max(total - 1, 0) :]) == 1).any()
    if counts_on or not np.array_equal(positions[:total], ranges(0, lengths)):
        restarts = _restarts(positions[:total] if masked else positions, index).tolist()[:SHOWN]
        fault = f"seq_lengths {lengths.tolist()[:SHOWN]}, but position_ids of samples of {restarts} tokens"
        raise _bad(f"{fault}; leave out the column that is wrong", index)


def _check_rest(columns: Mapping[str, np.ndarray], labels: np.ndarray, learnt: str | None, index: int) -> None:
    """Refuse tokens behind the last of `seq_lengths`, unless a column marks them as padding.

    A mask that agreed does so, and so do positions where no column marks what is learnt.
    """
    if "attention_mask" in columns or (learnt is None and "position_ids" in columns):
        return
    if count := int(np.count_nonzero(labels != IGNORE)):
        raise _bad(
            f"{count} tokens to be learnt behind the last of seq_lengths {columns['seq_lengths'].tolist()[:SHOWN]}; "
            "give the lengths of all samples, or labels of -100 on padding",
            index,
        )


def _without_padding(lengths: np.ndarray) -> list[int]:
    """Leave padding out, which has position 0 at every token, as samples of one token have.

    Those at the end of a row have nothing to predict and are taken for padding; a row of nothing else keeps one.
    """
    longer = np.flatnonzero(lengths > 1)
    return lengths[: 1 + (int(longer[-1]) if len(longer) else 0)].tolist()


def _bad(fault: str, index: int) -> SampleError:
    return SampleError(f"the row has {fault}", index=index, reason="bad_row")
