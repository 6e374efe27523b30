"""Conversations with accidents in them, in every format: collated with all that they say, or refused.

A row that is accepted holds every turn and text that it had, trains on what the assistant says and on nothing else, and
has a run for every image. What is measured is what is collated.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from chats import gpt, human, picture, processor_of, says, text, user
from mutations import check, edited, outcomes

from vlmpack.collate import VLMCollator
from vlmpack.errors import ConfigError, SampleError

CASES = 400
FAMILIES = ("qwen2_5_vl", "qwen3_vl")
START, END = "<|im_start|>", "<|im_end|>"
RESERVED = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
Row = dict[str, Any]

A, B = picture(61, 43), picture(32, 90, seed=1)
HOLE = {"type": "image"}
SYSTEM = {"role": "system", "content": "if x < 3 and y > 4: a  b\t."}
QUESTION, AGAIN = user([HOLE, text("What is the total of this and "), HOLE, text(" that?")]), user("2 + 2 = 4, <bbox>?")
FIRST, SECOND = says([text("75,000 Rp., <b>bold</b> Ä日本😀")]), says("{'a': 1} assistant")
ROWS: tuple[Row, ...] = (
    {"messages": [SYSTEM, QUESTION, FIRST, AGAIN, SECOND], "images": [A, B]},
    {"messages": [user("<image>What of\n<image>?"), FIRST, AGAIN, SECOND], "images": [A, B], "id": "s 1"},
    {"conversation": [SYSTEM, user([{**HOLE, "image": A}, text("?")]), FIRST, user([{**HOLE, "path": B}]), SECOND]},
    {"conversations": [human("<image>\nWhat of <image>?"), gpt("75,000"), human("2 + 2?"), gpt("4")], "image": [A, B]},
    {"prompt": [SYSTEM, QUESTION, FIRST, AGAIN], "completion": [SECOND], "images": [A, B]},
    {"messages": [user([{"type": "video"}, text("What is seen?")]), FIRST], "videos": [[A, A, A]]},
)


def turns_of(row: Row) -> list[Row]:
    """All turns, those of a prompt and its completion too."""
    names = ("messages", "conversation", "conversations", "prompt", "completion")
    return [turn for name in names for turn in row.get(name) or []]


def said_in(turns: list[Row]) -> Iterator[str]:
    """All that turns say, between the markers."""
    for turn in turns:
        content = turn.get("content", turn.get("value", ""))
        for part in content if isinstance(content, list) else [content]:
            said = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
            yield from (piece.strip() for piece in re.split("<image>|<video>", said or ""))


def is_answer(processor: Any, ids: list[int], at: int) -> bool:
    """Whether a token is of the assistant's turn, its end included, by its text."""
    turn = processor.tokenizer.decode(ids[: at + 1]).rsplit(START, 1)[-1]
    return turn.startswith("assistant\n") and END not in turn.removesuffix(END)


def check_sound(batch: Row, processor: Any, row: Row) -> None:
    ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    written, tokens = processor.tokenizer.decode(ids), processor.tokenizer.convert_ids_to_tokens(ids)
    turns = turns_of(row)
    assert tokens.count(START) == len(turns)
    assert all(label in (-100, token) for label, token in zip(labels, ids, strict=True))
    assert labels[0] == -100
    assert any(label != -100 for label in labels)
    for at, token in enumerate(tokens):
        assert labels[at] == -100 or (is_answer(processor, ids, at) and token not in RESERVED), (at, token)
    for kind, token in (("image", processor.image_token), ("video", processor.video_token)):
        grids = batch.get(f"{kind}_grid_thw", torch.zeros(0, 3, dtype=torch.int64))
        assert tokens.count(token) == int(grids.prod(-1).sum()) // 4
    assert [said for said in said_in(turns) if said not in written] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:samples have columns that nothing reads")
@pytest.mark.filterwarnings("ignore:a user's text holds:UserWarning")
def test_a_conversation_with_an_accident_is_whole_or_refused() -> None:
    collators = [VLMCollator(processor_of(family)) for family in FAMILIES]

    def case(rng: random.Random) -> bool:
        row, collator = rng.choice(ROWS), rng.choice(collators)
        for _ in range(rng.randint(0, 2)):
            row = edited(row, rng)
        try:
            batch = collator([row])
        except (SampleError, ConfigError) as error:
            assert str(error).startswith("sample 0")
            assert getattr(error, "reason", None) != "unexpected", error
            raise
        check_sound(batch, collator.processor, row)
        return collator.measure(row).input_ids.tolist() == batch["input_ids"][0].tolist()

    check(outcomes(CASES, 0, case), cases=CASES)
