"""Conversations of several answers as one sample for each: `branch_turns`.

    record     {"images": [...], "messages": [user Q0, assistant A0, user Q1, assistant A1], "id": "r"}
    turns      {..., "branch_turn": 0, "id": "r/0"}      {..., "branch_turn": 1, "id": "r/1"}     Q0 A0      Q1 A1
    answers    {..., "answer_turn": 0, "id": "r/0"}      {..., "answer_turn": 1, "id": "r/1"}     Q0 A0      Q0 A0 Q1 A1

A sample is its record, images where they were, and the number of its answer: nothing is copied. The collator decodes an
image once for all samples of a batch. Of "turns" it reads that question and its answer: answers do not see each other.
Of "answers" it reads the conversation up to that answer, which alone is trained on: the template writes the turns
before as at inference, and the answer with its thoughts, which it may leave out as soon as another turn follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from vlmpack.data.tool_calls import CALLING

Branches = Literal["conversation", "turns", "answers"]
"""A conversation as one sample, or one for each question with its answer, or one for each answer with all before it."""

BRANCH_COLUMN = "branch_turn"
"""The column that holds the number of a sample's question in its conversation."""

ANSWER_COLUMN = "answer_turn"
"""The column that holds the number of the answer with which a sample ends."""

FACTORS = ("weight", "loss_scale", "loss_weight")
"""Keys of the weight of an answer, or of a text in it: of OpenAI, ms-swift and LLaMA-Factory."""
FLAGS = (*FACTORS, "loss", "loss_mask", "train", "training", "trainable")
"""The same and keys by which it is trained on or not: of ms-swift, axolotl and Tinker."""

PAIRS_COLUMN = "texts"
"""The column of questions and answers in The Cauldron and FineVision: `[{"user": ..., "assistant": ...}, ...]`."""

DIALOGUES = ("messages", "conversations", "conversation", PAIRS_COLUMN)
"""Columns of several questions and answers."""
_ANSWERING = ("assistant", "gpt", *CALLING)


def branch_turns(record: Mapping[str, Any], *, branches: Branches = "turns") -> list[dict[str, Any]]:
    """Return one sample for each answer of a record; a record of one answer, or of none, as it is.

    Args:
        record: a conversation, as `VLMCollator` takes it; for "turns" of questions and answers in turn.
        branches: "turns" or "answers", see above; of the latter answers that their own flag does not train on are no
            samples.
    """
    answers = _answers(record, branches)
    numbers = [at for at, is_sample in enumerate(answers) if is_sample]
    if len(answers) < 2 or not numbers:
        return [dict(record)]
    column = BRANCH_COLUMN if branches == "turns" else ANSWER_COLUMN
    name = next((name for name in ("id", "sample_id") if record.get(name) is not None), None)
    ids = [{} if name is None else {name: f"{record[name]}/{turn}"} for turn in numbers]
    return [{**record, **own_id, column: turn} for turn, own_id in zip(numbers, ids, strict=True)]


def num_branches(record: Mapping[str, Any], branches: Branches) -> int:
    """Count the answers of a record that are samples; 0: there is no conversation."""
    return sum(_answers(record, branches))


def _answers(record: Mapping[str, Any], branches: Branches) -> list[bool]:
    """Whether each of a record's answers is a sample: the assistant's turns, or pairs of `user` and `assistant`."""
    turns = next((record[name] for name in DIALOGUES if record.get(name) is not None), ())
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        return []
    turns = [turn for turn in turns if isinstance(turn, Mapping)]
    answers, before = [], None
    for turn in turns:
        role = turn.get("role", turn.get("from"))
        is_call = branches == "answers" and role in CALLING and before not in _ANSWERING
        if role in ("assistant", "gpt") or is_call or {"user", "assistant"} <= turn.keys():
            answers.append(branches == "turns" or all(turn.get(flag) not in (0, False) for flag in FLAGS))
        before = role
    return answers
