"""Records of several questions as one sample for each."""

from __future__ import annotations

import json
from itertools import chain

import pytest

from vlmpack.data import branch_turns, open_dataset
from vlmpack.errors import ConfigError, SampleError


def dialogue(count: int, **columns) -> dict:
    turns = [({"from": "human", "value": f"Q{i}"}, {"from": "gpt", "value": f"A{i}"}) for i in range(count)]
    return {"conversations": list(chain(*turns)), **columns}


RECORDS = [dialogue(3, id="r", image="a.png"), dialogue(1, image="b.png"), dialogue(2, image="c.png")]
TURNS = [0, 1, 2, None, 0, 1]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, RECORDS)))
    return path


def test_each_question_is_a_sample(file):
    samples = open_dataset(file, branches="turns")
    assert len(samples) == 6
    assert [sample.get("branch_turn") for sample in samples] == TURNS
    assert [sample["id"] for sample in samples] == ["r/0", "r/1", "r/2", 3, 4, 5]
    assert [sample["image"] for sample in samples][:4] == [str(file.parent / f"{name}.png") for name in "aaab"]
    assert samples[-1] == samples[5]
    assert [sample["id"] for sample in samples[2:4]] == ["r/2", 3]


def test_each_answer_that_is_trained_on_is_a_sample(tmp_path):
    roles = ("user", "assistant", "user", "function_call", "tool", "assistant", "tool_call")
    turns = [{"role": role, "content": "{}"} for role in roles]
    flagged = [*turns[:1], {**turns[1], "weight": 0}, *turns[2:]]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps({"messages": messages}) for messages in (turns, flagged, turns[:2])))
    samples = open_dataset(path, branches="answers")
    assert [sample.get("answer_turn") for sample in samples] == [0, 1, 2, 1, 2, None]


def test_num_counts_questions(file):
    assert len(open_dataset(file, branches="turns", num=5)) == 5
    with pytest.raises(ConfigError, match=r"num is 7, but .* holds 6"):
        open_dataset(file, branches="turns", num=7)


def test_of_stored_rows_only_conversations_are_read_to_count(tmp_path):
    datasets = pytest.importorskip("datasets")
    pairs = [[{"user": f"Q{i}", "assistant": "A"} for i in range(count)] for count in (2, 1, 3)]
    datasets.Dataset.from_dict({"texts": pairs, "images": [["a.png"]] * 3}).to_parquet(tmp_path / "train.parquet")
    samples = open_dataset(tmp_path / "train.parquet", branches="turns")
    assert [sample.get("branch_turn") for sample in samples] == [0, 1, None, 0, 1, 2]
    assert samples[5]["images"] == [str(tmp_path / "a.png")]
    assert len(open_dataset(tmp_path / "train.parquet")) == 3


def test_a_record_that_cannot_be_read_is_one_bad_sample(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join([json.dumps(RECORDS[0]), "[1]", json.dumps(RECORDS[2])]))
    samples = open_dataset(path, branches="turns")
    assert len(samples) == 6
    with pytest.raises(SampleError, match="sample 3") as caught:
        samples[3]
    assert caught.value.reason == "row_unreadable"
    path.write_text("\n".join([json.dumps(dialogue(1, id="r", image="a.png" + "x" * 400)), "[1]", "{}"]))
    with pytest.raises(SampleError):
        samples[2]


def test_sources_without_questions_are_refused(tmp_path):
    path = tmp_path / "ids.jsonl"
    path.write_text(json.dumps({"input_ids": [1, 2, 3]}))
    with pytest.raises(ConfigError, match="holds none of messages, conversations, conversation; leave branches"):
        open_dataset(path, branches="turns")
    with pytest.raises(ConfigError, match="branches must be one of conversation, turns, answers, got 'turn'"):
        open_dataset(path, branches="turn")


def test_a_record_of_one_question_or_none_stays_as_it_is():
    for record in (RECORDS[1], {"input_ids": [1]}, {"messages": "text"}, {"messages": None}):
        assert branch_turns(record) == [record]
    assert [branch["sample_id"] for branch in branch_turns(dialogue(2, sample_id=7))] == ["7/0", "7/1"]
