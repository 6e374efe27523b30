"""Records of several questions about the same images as one sample for each question: `branch_turns`.

    record     {"images": [...], "messages": [user Q0, assistant A0, user Q1, assistant A1], "id": "r"}
    samples    {..., "branch_turn": 0, "id": "r/0"}      {..., "branch_turn": 1, "id": "r/1"}

A sample is its record, images where they were, and the number of its question: nothing is copied. The collator reads
that question and its answer, decodes an image once for all samples of a batch, and answers do not see each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

Branches = Literal["conversation", "turns"]
"""A conversation as one sample, or each of its questions with its answer as a sample of its own."""

BRANCH_COLUMN = "branch_turn"
"""The column that holds the number of a sample's question in its conversation."""

PAIRS_COLUMN = "texts"
"""The column of questions and answers in The Cauldron and FineVision: `[{"user": ..., "assistant": ...}, ...]`."""

DIALOGUES = ("messages", "conversations", "conversation", PAIRS_COLUMN)
"""Columns of several questions and answers."""


def branch_turns(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one sample for each question of a record; a record of one question, or of none, as it is.

    Args:
        record: a conversation of questions and answers in turn, as `VLMCollator` takes it.
    """
    count = num_answers(record)
    if count < 2:
        return [dict(record)]
    name = next((name for name in ("id", "sample_id") if record.get(name) is not None), None)
    ids = [{} if name is None else {name: f"{record[name]}/{turn}"} for turn in range(count)]
    return [{**record, **own_id, BRANCH_COLUMN: turn} for turn, own_id in enumerate(ids)]


def num_answers(record: Mapping[str, Any]) -> int:
    """Count the assistant's turns, or the pairs of `user` and `assistant`; 0: there is no conversation."""
    turns = next((record[name] for name in DIALOGUES if record.get(name) is not None), ())
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        return 0
    turns = [turn for turn in turns if isinstance(turn, Mapping)]
    is_answer = (turn.get("role", turn.get("from")) in ("assistant", "gpt") for turn in turns)
    return sum(a or {"user", "assistant"} <= turn.keys() for a, turn in zip(is_answer, turns, strict=True))
