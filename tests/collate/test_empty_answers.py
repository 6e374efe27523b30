"""Answers without text: a sample that would learn the end of a turn alone is refused, whatever encodes it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chats import chat, learnt, needs, processor_of

from vlmpack.collate import VLMCollator
from vlmpack.collate.conversation import check_answered, read_conversation
from vlmpack.data import open_dataset
from vlmpack.errors import SampleError

pytestmark = pytest.mark.every_family
USER = {"role": "user", "content": "2 + 2?"}
BLANKS = ("", "  ", "\n\t")
ENCODERS = ["qwen3_vl", *(pytest.param(family, marks=needs(family)) for family in ("gemma3", "llava"))]


def answered(*answers: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [turn for answer in answers for turn in (USER, {"role": "assistant", **answer})], **more}


def shapes(blank: str) -> dict[str, dict[str, Any]]:
    turns = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": blank}]
    reply = {"role": "assistant", "content": blank}
    return {
        "messages": chat("2 + 2?", blank),
        "parts": answered({"content": [{"type": "text", "text": blank}]}),
        "no parts": answered({"content": []}),
        "two answers": answered({"content": blank}, {"content": blank}),
        "ShareGPT": {"conversations": turns},
        "pairs": {"texts": [{"user": "2 + 2?", "assistant": blank}]},
        "completion": {"prompt": "2 + 2 =", "completion": blank},
        "completion of messages": {"prompt": [USER], "completion": [reply]},
        "unlearnt beside it": answered({"content": "4", "weight": 0}, {"content": blank}),
        "of one question": answered({"content": "4"}, {"content": blank}, branch_turn=1),
    }


def refused(feature: dict[str, Any], family: str = "qwen3_vl", **settings: Any) -> SampleError:
    collator = VLMCollator(processor_of(family), **settings)
    with pytest.raises(SampleError) as caught:
        collator.collate([feature])
    with pytest.raises(SampleError) as measured:
        collator.measure(feature)
    assert caught.value.reason == measured.value.reason
    return caught.value


@pytest.mark.parametrize("family", ENCODERS)
def test_an_empty_answer_is_refused_as_it_has_no_targets(family: str) -> None:
    for name, feature in shapes("  ").items():
        error = refused(feature, family)
        assert (name, error.reason) == (name, "no_targets")
        assert "needs an assistant turn or a completion with text in it" in str(error)


@pytest.mark.parametrize("blank", BLANKS)
def test_blanks_of_any_kind_are_no_text(blank: str) -> None:
    assert {refused(feature).reason for feature in shapes(blank).values()} == {"no_targets"}


@pytest.mark.parametrize("row", [{"query": "2 + 2?", "response": ""}, {"response": " "}])
def test_query_and_response(row: dict[str, str], tmp_path: Any) -> None:
    path = tmp_path / "swift.jsonl"
    path.write_text(json.dumps(row))
    assert refused(open_dataset(path)[0]).reason == "no_targets"


@pytest.mark.parametrize("family", ENCODERS)
def test_an_empty_answer_beside_one_with_text_is_kept(family: str) -> None:
    collator = VLMCollator(processor_of(family))
    whole, alone = (collator.measure(answered({"content": "4"}, *more)) for more in ([{"content": ""}], []))
    assert whole.num_targets > alone.num_targets > 1


@pytest.mark.parametrize(
    "answer",
    [
        {"content": "", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}]},
        {"content": "", "reasoning_content": "it is 4"},
        {"content": ["", {"type": "text", "text": "4"}]},
        {"content": [{"type": "text", "text": "4"}]},
    ],
)
def test_answers_of_parts_and_of_tool_calls_are_none_without_text(answer: dict[str, Any]) -> None:
    check_answered(read_conversation(answered(answer)))


def test_where_all_is_learnt_a_question_is_enough() -> None:
    row = VLMCollator(processor_of(), train_on="all").collate([chat("2 + 2?", "")])
    assert "2 + 2?" in learnt(processor_of(), row.labels)
