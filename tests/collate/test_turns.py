"""Turns: every one says something, in a role that is known, and is learnt unless its own flag says otherwise."""

import pytest
from chats import learnt, processor_of

from vlmpack.collate import VLMCollator
from vlmpack.collate.conversation import ALIASES, read_conversation
from vlmpack.errors import Refusal, SampleError

ASK = {"role": "user", "content": "2 + 2?"}
SAY = {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Be short."}


def refusal(feature):
    with pytest.raises(Refusal) as caught:
        read_conversation(feature)
    assert caught.value.reason == "bad_row"
    return str(caught.value)


def learnt_text(feature, **settings):
    labels = VLMCollator(processor_of(), **settings)([feature])["labels"]
    return learnt(processor_of(), labels[0].numpy())


# ---------------------------------------------------------------------- content


def test_a_message_without_content_is_refused_with_the_keys_it_has():
    message = refusal({"messages": [ASK, {"role": "assistant", "text": "4", "content": None}]})
    assert message.startswith("messages[1] (assistant) has no content, and would be an empty turn; it has the keys")
    assert "role, text, content (None): write what it says under 'content'" in message


@pytest.mark.parametrize("key", ["tool_calls", "reasoning_content"])
def test_an_answer_may_call_tools_or_think_without_content(key):
    row = read_conversation({"messages": [ASK, {"role": "assistant", key: ["x"]}]})
    assert row.messages[1] == {"role": "assistant", "content": "", key: ["x"]}
    refusal({"messages": [ASK, {"role": "assistant", "content": None, key: []}]})


PIC = "a.png"


@pytest.mark.parametrize(
    ("turn", "place", "key"),
    [
        ({"role": "user", "content": "What is this?", "images": [PIC]}, "messages[0]", "images"),
        ({"role": "user", "content": "What is this?", "image": PIC}, "messages[0]", "image"),
        ({"role": "user", "content": "What is said?", "audio": PIC}, "messages[0]", "audio"),
        ({"role": "user", "content": [{"type": "text", "text": "?", "image": PIC}]}, "messages[0].content[0]", "image"),
        ({"role": "user", "content": [{"type": "image", "image": PIC, "text": "?"}]}, "messages[0].content[0]", "text"),
        ({"role": "user", "content": [{"image": PIC, "text": "?"}]}, "messages[0].content[0]", "text"),
        ({"role": "user", "content": [{"type": "image", "image": PIC, "video": [PIC]}]}, "content[0]", "video"),
    ],
)
def test_what_stands_where_no_template_looks_is_refused(turn, place, key):
    assert f"{place} holds {key!r} where no template looks for it" in refusal({"messages": [turn, SAY]})


def test_an_image_beside_a_qwen_turn_is_refused_as_well():
    turns = [{"from": "human", "value": "hi", "image": PIC}, {"from": "gpt", "value": "4"}]
    assert "conversations[0] holds 'image'" in refusal({"conversations": turns})


@pytest.mark.parametrize("key", ["content", "tool_calls", "reasoning_content"])
def test_a_qwen_turn_says_one_thing(key):
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "4", key: "5"}]
    assert f"conversations[1] has {key!r} beside its value" in refusal({"conversations": turns})


@pytest.mark.parametrize("nothing", [None, "", [], {"bytes": None, "path": None}])
def test_keys_that_a_table_gives_to_every_part_may_be_there_empty(nothing):
    turn = {"role": "user", "content": [{"type": "text", "text": "2 + 2?", "image": nothing}], "images": nothing}
    assert read_conversation({"messages": [turn, SAY]}).images == ()


# ---------------------------------------------------------------------- roles


@pytest.mark.parametrize(("alias", "role"), ALIASES.items())
def test_other_names_of_roles_are_understood_in_either_shape(alias, role):
    assert read_conversation({"messages": [{"role": alias, "content": "x"}]}).messages[0]["role"] == role
    assert read_conversation({"conversations": [{"from": alias, "value": "x"}]}).messages[0]["role"] == role


@pytest.mark.parametrize(
    "feature",
    [
        {"messages": [ASK, {"role": "Assistant", "content": "4"}]},
        {"conversations": [{"from": "user", "value": "2 + 2?"}, {"from": "Assistant", "value": "4"}]},
    ],
)
def test_an_unknown_role_is_refused_with_those_seen_and_those_known(feature):
    message = refusal(feature)
    assert "has a turn of the role 'Assistant', which is not known (did you mean 'assistant'?)" in message
    assert "its roles are user, Assistant, and those that can be used system, user, assistant, tool, human" in message


# ---------------------------------------------------------------------- the column `system`


@pytest.mark.parametrize(
    "turns",
    [
        {"messages": [ASK, SAY]},
        {"messages": [SYSTEM, ASK, SAY]},
        {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
        {"prompt": [ASK], "completion": [SAY]},
    ],
    ids=["messages", "messages that say it too", "Qwen", "prompt and completion"],
)
def test_a_system_column_goes_in_front(turns):
    assert read_conversation({"system": "Be short.", **turns}).messages == (SYSTEM, ASK, SAY)


def test_an_empty_system_column_says_nothing():
    assert read_conversation({"system": "", "messages": [SYSTEM, ASK]}).messages == (SYSTEM, ASK)
    assert read_conversation({"system": "", "messages": [ASK]}).messages == (ASK,)


@pytest.mark.parametrize(
    ("feature", "seen"),
    [
        ({"messages": [SYSTEM, ASK]}, "the column system says 'Talk.' and the system message 'Be short.'; keep one"),
        ({"prompt": "2 + 2?", "completion": "4"}, "a column system, str 'Talk.', which has no place in plain strings"),
    ],
)
def test_a_system_column_that_has_no_place_is_refused(feature, seen):
    assert seen in refusal({"system": "Talk.", **feature})


def test_a_system_column_that_is_no_text_is_refused():
    assert "the column system must be a text, got list" in refusal({"system": [SYSTEM], "messages": [ASK]})


# ---------------------------------------------------------------------- what is learnt

FLAGS = [("weight", 0), ("weight", 0.0), ("loss", False), ("loss", 0), ("train", False)]
ON = [("weight", 1), ("loss", True), ("loss", 1), ("train", True), ("loss", None)]


def two_answers(first=(), second=()):
    answers = [{"role": "assistant", "content": "four", **dict([first] if first else [])}]
    answers += [{"role": "assistant", "content": "six", **dict([second] if second else [])}]
    return {"messages": [ASK, answers[0], {"role": "user", "content": "3 + 3?"}, answers[1]]}


@pytest.mark.parametrize("flag", FLAGS)
def test_an_answer_may_say_that_it_is_not_learnt(flag):
    assert learnt_text(two_answers(first=flag)) == "six<|im_end|>"
    assert learnt_text(two_answers(second=flag)) == "four<|im_end|>"
    turns = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "a", **dict([flag])}]
    assert read_conversation({"conversations": [*turns, {"from": "gpt", "value": "b"}]}).trained_turns == (False, True)


@pytest.mark.parametrize("flag", ON)
def test_or_that_it_is(flag):
    assert read_conversation(two_answers(flag, flag)) == read_conversation(two_answers())
    assert read_conversation(two_answers()).trained_turns is None


def test_flags_hold_within_a_completion_and_do_not_bring_its_prompt_back():
    turns = two_answers(second=("weight", 0))["messages"]
    row = read_conversation({"prompt": [ASK, {**SAY, "weight": 1}, ASK], "completion": turns[1:]})
    assert row.trained_turns == (False, True, False)


def test_flags_do_not_reach_the_template():
    assert [set(message) for message in read_conversation(two_answers(("loss", 0))).messages] == [
        {"role", "content"}
    ] * 4


def test_learning_everything_learns_them_too():
    assert learnt_text(two_answers(first=("weight", 0)), train_on="all") == learnt_text(two_answers(), train_on="all")


def test_with_no_answer_left_there_is_nothing_to_learn():
    with pytest.raises(SampleError) as caught:
        learnt_text(two_answers(("weight", 0), ("weight", 0)))
    assert caught.value.reason == "no_targets"


@pytest.mark.parametrize("value", [2, -1, 0.5, "0", "false", [0], float("nan")])
def test_another_value_is_refused(value):
    assert f"messages[1].weight is {value!r}; it says whether the turn is learnt" in refusal(
        two_answers(first=("weight", value))
    )


def test_flags_that_contradict_each_other_are_refused():
    answer = {**SAY, "weight": 0, "train": True}
    assert "messages[1] has {'weight': 0, 'train': True}, which contradict" in refusal({"messages": [ASK, answer]})


def test_flags_of_other_turns_say_nothing():
    assert read_conversation({"messages": [{**ASK, "weight": 0.5}, SAY]}).messages == (ASK, SAY)
