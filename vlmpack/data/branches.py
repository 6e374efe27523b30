"""Records of several questions about the same images as one sample for each question: `branch_turns`.

    record     {"images": [...], "messages": [user Q0, assistant A0, user Q1, assistant A1], "id": "r"}
    samples    {..., "branch_turn": 0, "id": "r/0"}      {..., "branch_turn": 1, "id": "r/1"}

A sample is its record, images where they were, and the number of its question: nothing is copied. The collator reads
that question and its answer, decodes an image once for all samples of a batch, and answers do not see each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np

from vlmpack.data.foreign import ForeignRows
from vlmpack.data.readers import Rows, StoredRows
from vlmpack.errors import ConfigError, SampleError

Branches = Literal["conversation", "turns"]
"""A conversation as one sample, or each of its questions with its answer as a sample of its own."""

BRANCH_COLUMN = "branch_turn"
"""The column that holds the number of a sample's question in its conversation."""

PAIRS_COLUMN = "texts"
"""The column of questions and answers in The Cauldron and FineVision: `[{"user": ..., "assistant": ...}, ...]`."""

DIALOGUES = ("messages", "conversations", "conversation", PAIRS_COLUMN)
"""Columns of several questions and answers."""
ANSWERING = ("assistant", "gpt")
"""Roles of answers."""


def branch_turns(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one sample for each question of a record; a record of one question, or of none, as it is.

    Args:
        record: a conversation of questions and answers in turn, as `VLMCollator` takes it.
    """
    count = _num_answers(record)
    if count < 2:
        return [dict(record)]
    name = next((name for name in ("id", "sample_id") if record.get(name) is not None), None)
    ids = [{} if name is None else {name: f"{record[name]}/{turn}"} for turn in range(count)]
    return [{**record, **own_id, BRANCH_COLUMN: turn} for turn, own_id in enumerate(ids)]


def _num_answers(record: Mapping[str, Any]) -> int:
    turns = next((record[name] for name in DIALOGUES if record.get(name) is not None), ())
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        return 0
    return sum(_is_answer(turn) for turn in turns if isinstance(turn, Mapping))


def _is_answer(turn: Mapping[str, Any]) -> bool:
    """One of the assistant's turns, or a pair of `user` and `assistant`."""
    return turn.get("role", turn.get("from")) in ANSWERING or {"user", "assistant"} <= turn.keys()


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class BranchedRows:
    """Rows of which each question is a row of its own; a row that cannot be read stays one."""

    rows: Rows
    """The records."""
    starts: np.ndarray
    """int64 [records + 1]: place of each record's first sample."""

    @classmethod
    def of(cls, rows: Rows, name: str) -> BranchedRows:
        """Count the questions of all records: conversations are read once, images are not.

        Raises:
            ConfigError: no record has a conversation.
        """
        each = (_count_in(rows, at) for at in range(len(rows)))
        if isinstance(rows, StoredRows):
            counts = _stored_counts(rows)
        elif isinstance(rows, ForeignRows) and isinstance(rows.rows, StoredRows):
            counts = [_num_answers(row) for row in rows.batches()]
        else:
            counts = list(each)
        if not any(counts):
            raise ConfigError(
                f"branches='turns' makes a sample of each question of a conversation, and {name} holds none of "
                f"{', '.join(DIALOGUES)}; leave branches out"
            )
        return cls(rows=rows, starts=np.append(0, np.cumsum(np.maximum(counts, 1))))

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The sample of one question.

        Raises:
            SampleError: its record cannot be read.
        """
        record = int(np.searchsorted(self.starts, index, side="right")) - 1
        try:
            branches = branch_turns(self.rows[record])
        except SampleError as error:
            raise SampleError(error.detail, index=index, reason=error.reason) from error
        turn = index - int(self.starts[record])
        if turn >= len(branches):
            message = f"its record {record} had more questions when it was opened; open the data set again"
            raise SampleError(message, index=index, reason="row_unreadable")
        return branches[turn]


def _count_in(rows: Rows, at: int) -> int:
    try:
        return _num_answers(rows[at])
    except SampleError:
        return 0


def _stored_counts(rows: StoredRows) -> list[int]:
    """Of stored rows no other column is read than those of conversations."""
    columns = [name for name in DIALOGUES if name in rows.columns]
    return [_num_answers(row) for row in rows.only(columns, "").batches()] if columns else []
