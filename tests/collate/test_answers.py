"""What is learnt of a conversation whose template is not ChatML: the answers, their end included."""

from functools import partial

import numpy as np
import pytest
from chats import CHATTING, SHOWN, fast_and_slow, learnt, needs, picture, text, user
from fixtures.processors import tiny_processor
from hypothesis import given
from hypothesis import strategies as st

from vlmpack.collate import VLMCollator
from vlmpack.data.messages import read_conversation
from vlmpack.errors import ConfigError, SampleError

ENDS = {
    "gemma3": "<end_of_turn>",
    "gemma4": "<turn|>",
    "internvl": "<|im_end|>",
    "idefics3": "<end_of_utterance>",
    "paddleocr_vl": "<eos>",
    "ernie4_5_vl_moe": "<eos>",
    "aya_vision": "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
    "cohere2_vision": "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
    "llama4": "<|eot|>",
    "gemma4_unified": "<turn|>",
    "kimi_k25": "<|im_end|>",
    "lfm2_vl": "<|im_end|>",
    "mistral3": "</s>",
    "exaone4_5": "<|endofturn|>",
    **dict.fromkeys(("lighton_ocr", "lfm3_vl"), "<|im_end|>"),
    "minicpmv4_6": "<|im_end|>",
    "smolvlm": "<end_of_utterance>",
}
"""What ends an answer in families whose templates mark none."""
NEXT_TURN = dict.fromkeys(("glm4v", "glm4v_moe", "glm46v", "glm_ocr"), "<|user|>")
"""What ends it where a question follows, in families whose templates write nothing after the last answer."""
BEGINNINGS = {"idefics3": " ", "smolvlm": " "}
"""What is written before an answer and is learnt with it."""
MARKED = {"llava": "{} ", "llava_next": "{} ", "llava_onevision": "\n{}"}
"""What the templates of the others mark (`{% generation %}`)."""
BEHIND_MARKS = {"llava": "", "llava_next": "", "llava_onevision": "<|im_end|>"}
"""What ends an answer behind those marks."""
ASK = user("What is the total?")


def say(text, **more):
    return {"role": "assistant", "content": text, **more}


def learnt_of(family, messages, *, processor=None, **settings):
    processor = processor or tiny_processor(family)
    columns = {name: settings.pop(name) for name in ("images",) if name in settings}
    batch = VLMCollator(processor, **settings)([{"messages": messages, **columns}])
    return learnt(processor, batch["labels"][0].numpy())


def expected(family, *answers):
    if family in MARKED:
        return "".join(MARKED[family].format(answer) + BEHIND_MARKS[family] for answer in answers)
    if family in NEXT_TURN:
        return NEXT_TURN[family].join(answers)
    return "".join(f"{BEGINNINGS.get(family, '')}{answer}{ENDS[family]}" for answer in answers)


@pytest.mark.parametrize("family", fast_and_slow(CHATTING, SHOWN))
def test_answers_are_learnt_and_nothing_else(family):
    parts = [{"type": "image"}, text("What is it?")]
    messages = [user(parts), say("A receipt"), ASK, say("75,000 Rp.")]
    assert learnt_of(family, messages, images=[picture()]) == expected(family, "A receipt", "75,000 Rp.")
    if not family.startswith("gemma"):  # their templates write no answer first
        assert learnt_of(family, [say("Hello"), *messages[2:]]) == expected(family, "Hello", "75,000 Rp.")


@pytest.mark.parametrize("family", [pytest.param(family, marks=needs(family)) for family in MARKED])
def test_marked_answers_are_those_of_transformers_and_what_ends_them_behind_the_marks(family):
    processor = tiny_processor(family)
    messages = [
        {"role": role, "content": [{"type": "text", "text": text}]}
        for role, text in (("user", "2 + 2?"), ("assistant", "It is 4"), ("user", "3?"), ("assistant", "5"))
    ]
    out = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
    )
    batch = VLMCollator(processor)([{"messages": messages}])
    assert batch["input_ids"].tolist() == out["input_ids"].tolist()
    marked = np.asarray(out["assistant_masks"])
    end = processor.tokenizer.convert_tokens_to_ids(BEHIND_MARKS[family]) if BEHIND_MARKS[family] else None
    behind = (np.roll(marked, 1, axis=1) == 1) & (batch["input_ids"].numpy() == end)
    assert (batch["labels"] != -100).long().tolist() == (marked | behind).tolist()
    assert behind.sum() == (2 if BEHIND_MARKS[family] else 0)
    assert marked.any()


# ---------------------------------------------------------------------- any texts

WORDS = st.sampled_from(["4", "a", "user", "model", "assistant", 'It\'s "so"', "{}", "x\ny", "probe 1:", "\\n"])
SAID = st.tuples(st.sampled_from(["", " ", "\n\n"]), WORDS, st.sampled_from(["", "  ", "\n"])).map("".join)
WITHOUT_MARKS = [family for family in SHOWN if family not in MARKED and family not in NEXT_TURN]


def added(processor, messages, at):
    """What an answer adds to the text before it, by writing the conversation turn by turn."""
    write = partial(processor.apply_chat_template, tokenize=False)
    question, whole = write(messages[:at], add_generation_prompt=True), write(messages)
    answer = write(messages[: at + 1])
    assert whole.startswith(answer)
    assert answer.startswith(question)
    return len(question), len(answer.rstrip())


@pytest.mark.parametrize("family", WITHOUT_MARKS)
@given(texts=st.lists(SAID, min_size=2, max_size=6))
def test_answers_lie_where_they_lie_turn_by_turn_whatever_texts_say(family, texts):
    processor = tiny_processor(family)
    texts = texts[: len(texts) // 2 * 2]
    roles = ("user", "assistant") * len(texts)
    rows = [
        {"role": role, "content": [{"type": "text", "text": text}]} for role, text in zip(roles, texts, strict=False)
    ]
    encoder = VLMCollator(processor).encoder
    conversation = read_conversation({"messages": rows})
    found = encoder._template.answers(conversation, encoder._template.render(conversation))
    assert found == [added(processor, rows, at) for at in range(1, len(rows), 2)]
    assert found


# ---------------------------------------------------------------------- refused


def refusal(messages, template, *, family="internvl", **settings):
    with pytest.raises((SampleError, ConfigError)) as caught:
        learnt_of(family, messages, processor=tiny_processor(family, chat_template=template), **settings)
    return str(caught.value)


UNCLEAR = {
    "messages[1]": ("{% if not loop.last %}{{ 'once said ' }}{% endif %}", ""),
    "messages[:1] and its prompt": ("", "in short: "),
}
"""What a template writes otherwise than alone, by what it writes before an answer, and where it asks for one."""


@pytest.mark.parametrize(("written", "before", "prompt"), [(name, *texts) for name, texts in UNCLEAR.items()])
def test_a_template_that_begins_an_answer_otherwise_than_it_asks_for_it_is_refused_by_name(written, before, prompt):
    template = (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ':' }}"
        "{% if message['role'] == 'assistant' %}" + before + "{% endif %}{{ message['content'] + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant:" + prompt + "' }}{% endif %}"
    )
    message = refusal([ASK, say("4"), ASK, say("5")], template)
    assert f"the chat template writes {written} otherwise alone than before other messages" in message
    assert "it is not known which tokens are messages[1]" in message


def test_a_template_that_marks_other_turns_than_answers_is_refused():
    marks_all = (
        "{% for message in messages %}{{ message['role'] + ':' }}"
        "{% generation %}{{ message['content'] }}{% endgeneration %}{% endfor %}"
    )
    assert "marks 2 answers of its 1 assistant messages" in refusal([ASK, say("4")], marks_all)
