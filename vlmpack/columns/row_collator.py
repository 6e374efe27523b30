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

from vlmpack.columns.learnt import learnt_column, masked_labels, real_tokens
from vlmpack.columns.samples import token_ids_of, vector
from vlmpack.errors import ConfigError, SampleError
from vlmpack.layout import IGNORE, HostMetadata, PackedRow, Segments, shift_labels

PositionRows = Literal[0, 1, 4]
"""How many rows of positions a model takes."""

BareRow = Literal["refuse", "one_sample"]
"""What a row is that comes without boundaries."""

SHOWN = 9
"""Lengths that a message lists."""

NOTHING = {"input_ids": [0], "labels": [IGNORE], "seq_lengths": [1]}
"""Stands in for a batch without rows: a rank that has none keeps in step with the others, at a loss of 0."""


@final
@dataclass(frozen=True, kw_only=True)
class RowCollator:
    """Joins the rows of a batch into one row [1, T] without padding; give it to HF Trainer as `data_collator`.

    A model with packing enabled keeps samples apart by their boundaries. A plain transformers model does so by
    `position_ids`, if it makes no cache and gets no mask: the batch says so. But only its attention layers do: in one
    with gated delta layers (Qwen3-Next, Qwen3.5, Qwen4-exp) samples see each other, and nothing tells.

    Raises:
        ConfigError: a setting that does not exist.
    """

    position_rows: PositionRows = 1
    """1 for text models, 4 for Qwen-VL models, 0: no `position_ids` (models with packing enabled compute them)."""
    bare_row: BareRow = "refuse"
    """What a row without `position_ids` and `seq_lengths` is: an error, as trainers remove columns that they do not
    know; or one sample, if the data set was not packed."""

    def __post_init__(self) -> None:
        if self.position_rows not in get_args(PositionRows):
            raise ConfigError(f"position_rows is {self.position_rows!r}; text models take 1, Qwen-VL models 4")
        if self.bare_row not in get_args(BareRow):
            raise ConfigError(f"bare_row is {self.bare_row!r}; choose from {', '.join(get_args(BareRow))}")

    def __call__(self, features: Sequence[Any]) -> dict[str, Any]:
        """Join rows.

        Args:
            features: dictionaries with `input_ids`, and what tells samples apart: `seq_lengths` or `position_ids`.
                `attention_mask` tells padding (on the right). What is learnt is told by one of `labels`, `loss_mask`,
                `completion_mask` and `assistant_masks`, not shifted; without them all tokens are. Where a bare row is
                one sample, also token ids alone. None at all, as a rank gets whose turn is an empty row, make one
                token and no target.

        Raises:
            SampleError: columns of a row that do not fit together, or contradict each other; names its place in the
                batch.
        """
        rows = [_Row.read(feature, index, self.bare_row) for index, feature in enumerate(features or [NOTHING])]
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
    """A packed row of samples that lie one after the other.

    Args:
        input_ids: [T] int64.
        labels: [T] int64, not shifted.
        lengths: tokens of each sample.
        sample_ids: of each sample.
        position_rows: rows of `position_ids`.
    """
    segments = Segments.from_lengths(lengths)
    shifted_1T = shift_labels(labels[None], segments)
    facts = HostMetadata(
        lengths=tuple(lengths),
        num_targets=int(np.count_nonzero(shifted_1T.numpy() != IGNORE)),
        sample_ids=sample_ids,
        segments=segments,
    )
    return PackedRow(
        input_ids=input_ids[None],
        segments=segments,
        shift_labels=shifted_1T,
        position_ids=_positions(segments, position_rows),
        facts=facts,
    )


def model_inputs(row: PackedRow) -> dict[str, Any]:
    """The row as keywords of a model. Without a cache transformers looks for samples in `position_ids`."""
    return {**row.to_hf(), "use_cache": False}


def _positions(segments: Segments, rows: PositionRows) -> torch.Tensor | None:
    if rows == 0:
        return None
    position_1T = segments.position_in_segment()[None]
    return position_1T if rows == 1 else position_1T.expand(rows, 1, -1)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class _Row:
    """One feature without its padding."""

    input_ids: np.ndarray
    labels: np.ndarray
    lengths: list[int]

    @classmethod
    def read(cls, feature: Any, index: int, bare_row: BareRow) -> _Row:
        columns = feature if isinstance(feature, Mapping) else {}
        learnt = learnt_column(columns, index)
        names = ("position_ids", "attention_mask", "seq_lengths")
        given = {name: vector(columns[name], name, index) for name in names if columns.get(name) is not None}
        input_ids = given["input_ids"] = vector(token_ids_of(feature, index), "input_ids", index)
        if learnt is not None:
            given[learnt] = vector(columns[learnt], learnt, index)
        for name, column in given.items():
            if name != "seq_lengths" and len(column) != len(input_ids):
                raise _bad(f"{len(input_ids)} input_ids, but {len(column)} of {name}", index)
        if bare_row == "refuse" and not {"position_ids", "seq_lengths"} & given.keys():
            raise _bad(
                "neither position_ids nor seq_lengths, so its samples cannot be told apart. If a trainer removed them, "
                "set remove_unused_columns=False, or, for TRL, pack_dataset(..., seq_lengths=True); if it is one "
                "sample, RowCollator(bare_row='one_sample')",
                index,
            )
        lengths = _lengths(given, index)
        real = sum(lengths)
        if not real:
            raise _bad("no tokens; leave it out", index)
        labels = _labels(given, learnt, index)
        if real < len(labels) and "seq_lengths" in given:
            _check_rest(given, labels[real:], learnt, index)
        return cls(input_ids=input_ids[:real], labels=labels[:real], lengths=lengths)


def _labels(given: Mapping[str, np.ndarray], learnt: str | None, index: int) -> np.ndarray:
    """Of every token of a row, padding included."""
    if learnt is None or learnt == "labels":
        return given[learnt or "input_ids"]
    return masked_labels(given["input_ids"], given[learnt], learnt, index)


def _lengths(given: Mapping[str, np.ndarray], index: int) -> list[int]:
    """Tokens of each sample of a row; columns that tell of them have to agree."""
    width, mask = len(given["input_ids"]), given.get("attention_mask")
    real = None if mask is None else real_tokens(mask, index)
    if "seq_lengths" in given:
        lengths = given["seq_lengths"]
        told = int(lengths.sum())
        if lengths.min(initial=1) < 1 or told > width:
            raise _bad(f"seq_lengths {lengths.tolist()[:SHOWN]}, but {width} input_ids", index)
        if real not in (None, told):
            raise _bad(
                f"seq_lengths {lengths.tolist()[:SHOWN]} of {told} tokens, but an attention_mask of {real}; leave out "
                "the column that is wrong",
                index,
            )
        if "position_ids" in given:
            _check_positions(given["position_ids"], lengths, index, padding_told=real is not None)
        return lengths.tolist()
    if "position_ids" not in given:
        return [width if real is None else real]
    lengths = _restarts(given["position_ids"][:real], index)
    return lengths.tolist() if real is not None else _without_padding(lengths)


def _restarts(positions: np.ndarray, index: int) -> np.ndarray:
    """The lengths that positions tell of: each sample begins at 0."""
    runs_on = np.diff(positions) == 1
    if len(positions) and not (positions[0] == 0 and (runs_on | (positions[1:] == 0)).all()):
        raise _bad("position_ids that neither count on nor restart at 0", index)
    return np.diff(np.flatnonzero(positions == 0), append=len(positions))


def _check_positions(positions: np.ndarray, lengths: np.ndarray, index: int, *, padding_told: bool) -> None:
    """Refuse positions unless those of each sample count from 0 and, where no mask tells of it, padding counts nothing.

    Place by place: in a total, a boundary missing in one sample would make up for one too many in the padding.
    """
    ends = lengths.cumsum()
    told = int(ends[-1]) if len(ends) else 0
    own = np.arange(told) - np.repeat(ends - lengths, lengths)
    counts_on = not padding_told and (np.diff(positions[max(told - 1, 0) :]) == 1).any()
    if counts_on or not np.array_equal(positions[:told], own):
        seen = positions[:told] if padding_told else positions
        raise _bad(
            f"seq_lengths {lengths.tolist()[:SHOWN]}, but position_ids of samples of "
            f"{_restarts(seen, index).tolist()[:SHOWN]} tokens; leave out the column that is wrong",
            index,
        )


def _check_rest(given: Mapping[str, np.ndarray], labels: np.ndarray, learnt: str | None, index: int) -> None:
    """Refuse tokens behind the last of `seq_lengths`, unless something says that they are padding.

    A mask that agreed has said so, and so have positions where no column tells what is learnt.
    """
    if "attention_mask" in given or (learnt is None and "position_ids" in given):
        return
    if count := int(np.count_nonzero(labels != IGNORE)):
        raise _bad(
            f"{count} tokens to be learnt behind the last of seq_lengths {given['seq_lengths'].tolist()[:SHOWN]}; give "
            "the lengths of all samples, or labels of -100 on padding",
            index,
        )


def _without_padding(lengths: np.ndarray) -> list[int]:
    """Padding has position 0 at every token, as samples of one token have. Those at the end of a row have nothing to
    predict and are taken for padding; a row of nothing else keeps one."""
    longer = np.flatnonzero(lengths > 1)
    return lengths[: 1 + (int(longer[-1]) if len(longer) else 0)].tolist()


def _bad(fault: str, index: int) -> SampleError:
    return SampleError(f"the row has {fault}", index=index, reason="bad_row")
