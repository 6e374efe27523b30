"""One question and its answer out of a conversation, its images with it; records of several as one sample for each."""

from __future__ import annotations

import json

import pytest
from chats import chat, gpt, human, learnt, picture, processor_of

from vlmpack.collate import SharePrefixes, VLMCollator
from vlmpack.collate.encoded import Encoded
from vlmpack.data import branch_turns, open_dataset
from vlmpack.data.messages import read_conversation
from vlmpack.errors import ConfigError, SampleError

FIRST, SECOND = picture(), picture(seed=1)


def image(source=None) -> dict:
    return {"type": "image"} if source is None else {"type": "image", "image": source}


def say(text: str) -> dict:
    return {"type": "text", "text": text}


def dialogue(*turns, **columns) -> dict:
    """Questions and answers in turn."""
    roles = ["user", "assistant"] * len(turns)
    messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
    return {"messages": messages, **columns}


def written(record: dict) -> list[tuple]:
    """Of each branch: contents of its messages, and its images."""
    branches = [read_conversation(branch) for branch in branch_turns(record)]
    return [([m["content"] for m in b.messages], [ref.source for ref in b.media["image"]]) for b in branches]


INLINE = dialogue([image(FIRST), say("Q0")], "A0", "Q1", "A1", [say("Q2"), image(SECOND)], "A2")
EXPECTED = [
    ([[image(), say("Q0")], "A0"], [FIRST]),
    ([[image(), say("Q1")], "A1"], [FIRST]),
    ([[image(), say("Q2"), image()], "A2"], [FIRST, SECOND]),
]


PAIRS = [{"user": f"Q{i}", "assistant": f"A{i}", "source": "x"} for i in range(2)]
COLUMN = dialogue([image(), say("Q0")], "A0", "Q1", "A1", [say("Q2"), image()], "A2", images=[FIRST, SECOND])
BRANCHED = {
    "images of the first question and its own": (INLINE, EXPECTED),
    "images of a column at their placeholders": (COLUMN, EXPECTED),
    "an image of a column without placeholders": (dialogue("Q0", "A0", "Q1", "A1", image=FIRST), EXPECTED[:2]),
    "markers": (
        {"conversations": [human("<image>\nQ0"), gpt("A0"), human("Q1"), gpt("A1")], "image": FIRST},
        EXPECTED[:2],
    ),
    "pairs": ({"texts": PAIRS, "images": [FIRST]}, EXPECTED[:2]),
    "a first question as it is written": (
        dialogue([say("Q0"), image(FIRST)], "A0", "Q1", "A1"),
        [([[say("Q0"), image()], "A0"], [FIRST]), EXPECTED[1]],
    ),
}


@pytest.mark.parametrize(("record", "branches"), BRANCHED.values(), ids=BRANCHED)
def test_each_question_is_a_sample_with_its_images(record, branches):
    assert written(record) == branches


def test_system_messages_and_their_images_stand_in_front_of_all():
    record = dialogue("Q0", "A0", "Q1", "A1")
    record["messages"].insert(0, {"role": "system", "content": [say("Look"), image(SECOND)]})
    system = [say("Look"), image()]
    assert written(record) == [([system, "Q0", "A0"], [SECOND]), ([system, "Q1", "A1"], [SECOND])]
    assert written(dialogue("Q0", "A0", "Q1", "A1", system="Be brief"))[1][0] == ["Be brief", "Q1", "A1"]


def test_an_answer_that_is_not_learnt_is_not_learnt_alone_either():
    record = dialogue("Q0", "A0", "Q1", "A1")
    record["messages"][3]["weight"] = 0
    weights = [read_conversation(branch).turn_weights for branch in branch_turns(record)]
    assert weights == [None, ((("", 0),),)]


def test_a_branch_is_the_sample_of_that_question_alone():
    maker = VLMCollator(processor_of())
    record = dialogue([image(), say("Q0")], "A0", "Q1", "A1", images=[FIRST], id="r")
    branches = [maker.measure(branch) for branch in branch_turns(record)]
    alone = [maker.measure(chat(f"Q{i}", f"A{i}", FIRST)) for i in range(2)]
    assert [branch.sample_id for branch in branches] == ["r/0", "r/1"]
    for branch, sample in zip(branches, alone, strict=True):
        assert isinstance(branch, Encoded)
        assert branch.input_ids.tolist() == sample.input_ids.tolist()
        assert branch.labels.tolist() == sample.labels.tolist()
    row = VLMCollator(processor_of(), layout="packed", share_prefixes=SharePrefixes(min_shared=2)).collate(
        branch_turns(record)
    )
    assert (row.tree.parents, len(row.metadata.media.in_tree(row.tree).images)) == ((-1, 0, 0), 1)


def test_an_answer_with_all_before_it_is_the_conversation_that_ends_there():
    record = dialogue([image(FIRST), say("Q0")], "A0", "Q1", "A1", [say("Q2"), image(SECOND)], "A2", id="r")
    collator = VLMCollator(processor_of(), train_on="last")
    exploded = branch_turns(record, branches="answers")
    for number, sample in enumerate(exploded):
        alone = collator([{"messages": record["messages"][: 2 * number + 2]}])
        batch = VLMCollator(processor_of())([sample])
        assert sample["id"] == f"r/{number}"
        assert all(batch[name].equal(alone[name]) for name in ("input_ids", "labels", "pixel_values"))
        assert learnt(processor_of(), batch["labels"]) == f"A{number}<|im_end|>"
    assert len(exploded) == 3


def test_only_the_last_answer_is_trained_on():
    processor = processor_of()
    record = dialogue("Q0", "A0", "Q1", "A1", "Q2")
    flagged = {"messages": [*record["messages"][:3], {**record["messages"][3], "weight": 0}]}
    every, last = VLMCollator(processor), VLMCollator(processor, train_on="last")
    ids = every.collate([record]).input_ids
    for sample in (record, {"input_ids": ids[0].tolist()}):
        labels = last.collate([sample]).labels
        assert learnt(processor, labels) == "A1<|im_end|>"
        assert learnt(processor, every.collate([sample]).labels) == "A0<|im_end|>A1<|im_end|>"
    with pytest.raises(SampleError, match="none of its"):
        last.collate([flagged])


@pytest.mark.parametrize(
    ("feature", "fault"),
    [
        ({**dialogue("Q0", "A0"), "answer_turn": 1}, "its answer_turn is 1, but it has 1 answers, numbered from 0"),
        ({**dialogue("Q0", "A0"), "branch_turn": 1}, "its branch_turn is 1, but it has 1 questions"),
        ({**dialogue("Q0", "A0"), "branch_turn": -1}, "its branch_turn is -1"),
        ({**dialogue("Q0", "A0"), "branch_turn": "0"}, "its branch_turn is '0'"),
        ({**dialogue("Q0", "A0", "Q1"), "branch_turn": 0}, "its turns are user, assistant, user; questions"),
        ({"messages": dialogue("Q0", "A0")["messages"][::-1], "branch_turn": 0}, "its turns are assistant, user;"),
        ({"prompt": "Q", "completion": "A", "branch_turn": 0}, "it has 0 questions"),
        ({"texts": [{"user": "Q", "assistant": None}]}, "texts[0], which needs a text for user and assistant"),
        ({"texts": [{"user": "Q", "assistant": "A"}], **dialogue("Q", "A")}, "it has texts and messages"),
    ],
)  # fmt: skip
def test_other_conversations_are_refused(feature, fault):
    with pytest.raises(SampleError) as caught:
        read_conversation(feature)
    assert fault in caught.value.detail
    assert caught.value.reason == "bad_row"


def test_tokenized_samples_have_no_questions_to_tell_apart():
    for column in ("branch_turn", "answer_turn"):
        with pytest.raises(SampleError, match=f"input_ids and {column}"):
            VLMCollator(processor_of()).collate([{"input_ids": [1, 2, 3], column: 0}])


# ---------------------------------------------------------------------- data sets

RECORDS = [
    dialogue("Q0", "A0", "Q1", "A1", "Q2", "A2", id="r", image="a.png"),
    dialogue("Q0", "A0", image="b.png"),
    dialogue("Q0", "A0", "Q1", "A1", image="c.png"),
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, RECORDS)))
    return path


def test_each_question_is_a_sample(file):
    samples = open_dataset(file, branches="turns")
    assert len(samples) == 6
    assert [sample.get("branch_turn") for sample in samples] == [0, 1, 2, None, 0, 1]
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


def test_a_record_that_cannot_be_read_is_one_bad_sample(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join([json.dumps(RECORDS[0]), "[1]", json.dumps(RECORDS[2])]))
    samples = open_dataset(path, branches="turns")
    assert len(samples) == 6
    with pytest.raises(SampleError, match="sample 3") as caught:
        samples[3]
    assert caught.value.reason == "row_unreadable"
    path.write_text("\n".join([json.dumps(dialogue("Q0", "A0", id="r", image="a.png" + "x" * 400)), "[1]", "{}"]))
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
    assert [branch["sample_id"] for branch in branch_turns(dialogue("Q0", "A0", "Q1", "A1", sample_id=7))] == [
        "7/0",
        "7/1",
    ]
