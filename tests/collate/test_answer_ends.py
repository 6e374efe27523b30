"""What ends an answer is learnt: a token of its own, the beginning of the next speaker's turn, or one that is added."""

import warnings

import pytest
from chats import learnt, needs, picture, says, user
from fixtures.processors import tiny_processor
from fixtures.templates import LLAVA_TEMPLATE

from vlmpack.collate import VLMCollator
from vlmpack.errors import ConfigError

ASK, ASK_AGAIN = user("2 + 2?"), user("3 + 3?")
FOUR, SIX = says("It is 4"), says("It is 6")
TALK = [ASK, FOUR, ASK_AGAIN, SIX]
GLM_TEXT = (
    "[gMASK]<sop>{% for m in messages %}{{ {'tool': '<|observation|>'}[m.role] or '<|' + m.role + '|>' }}\n"
    "{{ m.content }}{% for call in m.tool_calls or [] %}\n<tool_call>{{ call.function.name }}"
    "{% for key, value in call.function.arguments.items() %}<arg>{{ key }}={{ value }}</arg>{% endfor %}"
    "</tool_call>{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""The form of GLM-4-MoE's template: no turn has an end, and tools speak as `<|observation|>`."""


def glm_tokenizer():
    tokenizer = tiny_processor("glm4v").tokenizer
    tokenizer.add_tokens(["<|observation|>"], special_tokens=True)
    tokenizer.chat_template = GLM_TEXT
    return tokenizer


def targets(processor, messages, **settings):
    batch = VLMCollator(processor, **settings)([{"messages": messages}])
    return getattr(processor, "tokenizer", processor).decode([i for i in batch["labels"][0].tolist() if i != -100])


def said_once(collator, feature):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            collator.collate([feature])
            collator.measure(feature)
    return [str(warning.message) for warning in said]


# ---------------------------------------------------------------------- the next turn


CALL = says("", tool_calls=[{"function": {"name": "add", "arguments": {"a": 1}}}])
TOOL = {"role": "tool", "content": "4"}
FOLLOWED = {
    "the user's next turn": (TALK, "It is 4<|user|>It is 6"),
    "what a tool answers": ([ASK, CALL, TOOL, FOUR], "<tool_call>add<arg>a=1</arg></tool_call><|observation|>It is 4"),
    "after an empty answer": ([ASK, says(""), ASK_AGAIN, SIX], "<|user|>It is 6"),
    # generation stops where a user or a tool speaks: `<|system|>` and `<|assistant|>` stop nothing
    "nothing before a system turn": ([ASK, FOUR, {"role": "system", "content": "?"}, ASK_AGAIN, SIX], "It is 4It is 6"),
    "nothing before an answer": ([ASK, FOUR, says("Or IV"), ASK_AGAIN, SIX], "It is 4Or IV<|user|>It is 6"),
}


@pytest.mark.parametrize(("messages", "said"), FOLLOWED.values(), ids=FOLLOWED)
def test_the_turn_of_whoever_answers_ends_an_answer(messages, said):
    assert targets(glm_tokenizer(), messages) == said


def test_a_token_that_begins_in_an_answer_and_says_who_speaks_next_is_not_learnt():
    """As in LLaVA's vocabulary, in which the blank behind an answer and the next turn's "US" are one token."""
    processor = tiny_processor("internvl", chat_template=LLAVA_TEMPLATE)
    processor.tokenizer.add_tokens([" US"])
    batch = VLMCollator(processor)([{"messages": TALK}])
    assert processor.tokenizer.get_vocab()[" US"] in batch["input_ids"]
    assert learnt(processor, batch["labels"]) == "It is 4It is 6 "


@pytest.mark.parametrize("family", ["qwen3_vl", "internvl"])
def test_a_token_that_begins_in_the_header_is_not_learnt(family):
    processor = tiny_processor(family)
    processor.tokenizer.add_tokens(["\n\n"])
    batch = VLMCollator(processor)([{"messages": [ASK, says("\n\n4")]}])
    assert learnt(processor, batch["labels"]) == "\n4<|im_end|>"


# ---------------------------------------------------------------------- the last answer

ENDLESS = {"glm4v": "<|user|>", "llava": "<eos>"}
"""Families whose templates write nothing after the last answer, with the token that the warning proposes."""


@pytest.mark.parametrize(("family", "token"), ENDLESS.items())
def test_an_answer_without_an_end_is_warned_of_once_with_the_remedy(family, token):
    (said,) = said_once(VLMCollator(tiny_processor(family)), {"messages": TALK})
    assert said.startswith("the chat template writes no special token after an answer")
    assert f"VLMCollator(add_stop={token!r}) writes one after the last answer of a sample" in said


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "internvl", "llava_onevision"])
def test_a_template_that_ends_its_answers_is_not_warned_of_and_gets_no_other_end(family):
    processor = tiny_processor(family)
    assert said_once(VLMCollator(processor), {"messages": TALK}) == []
    stops = (None, processor.tokenizer.pad_token)
    plain, added = (VLMCollator(processor, add_stop=stop)([{"messages": TALK}]) for stop in stops)
    assert added["input_ids"].equal(plain["input_ids"])
    assert added["labels"].equal(plain["labels"])


@pytest.mark.parametrize("train_on", ["assistant", "all"])
@pytest.mark.parametrize(("family", "token"), ENDLESS.items())
def test_a_stop_is_added_after_the_last_answer_and_learnt(family, token, train_on):
    processor = tiny_processor(family)
    feature = {"messages": TALK, "images": [picture()]}
    collator = VLMCollator(processor, add_stop=token, train_on=train_on)
    without = VLMCollator(processor, train_on=train_on)([feature])
    batch = collator([feature])
    stop = processor.tokenizer.convert_tokens_to_ids(token)
    assert batch["input_ids"].tolist() == [[*without["input_ids"][0].tolist(), stop]]
    assert batch["labels"].tolist() == [[*without["labels"][0].tolist(), stop]]
    assert said_once(collator, feature) == []


@pytest.mark.parametrize("messages", [TALK[:3], [*TALK[:3], {**SIX, "weight": 0}]], ids=["a question", "not learnt"])
@pytest.mark.parametrize(("family", "token"), ENDLESS.items())
def test_none_is_added_where_the_last_message_is_no_answer_that_is_learnt(family, token, messages):
    processor = tiny_processor(family)
    plain, added = (VLMCollator(processor, add_stop=stop)([{"messages": messages}]) for stop in (None, token))
    assert added["input_ids"].equal(plain["input_ids"])
    assert added["labels"].equal(plain["labels"])


@needs("llava")
def test_a_stop_has_to_be_a_special_token():
    with pytest.raises(ConfigError, match=r"add_stop='<stop>' is no special token .* as '<eos>' is"):
        VLMCollator(tiny_processor("llava"), add_stop="<stop>")
