"""Special tokens in a text: those of the processor and the chat template are refused, any other one is learnt."""

import pytest
from chats import chat, learnt, needs, picture, says, user
from fixtures.processors import tiny_processor

from vlmpack.collate import VLMCollator
from vlmpack.errors import SampleError

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # transformers' own
]
GROUNDING = ("<ref>", "</ref>", "<box>", "</box>")
ANSWER = "<ref>the dog</ref><box>[[10, 20]]</box>"
FAMILIES = ("qwen3_vl", "internvl", "gemma3", "idefics3", "llava", "glm4v", "aya_vision")


def grounding_processor(family):
    processor = tiny_processor(family)
    processor.tokenizer.add_tokens(list(GROUNDING), special_tokens=True)
    return processor


def refused(processor, feature):
    with pytest.raises(SampleError) as caught:
        VLMCollator(processor)([feature])
    assert caught.value.reason == "reserved_token_in_text"
    return caught.value.detail


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_that_a_user_added_are_learnt_like_words(family):
    processor = grounding_processor(family)
    feature = chat("Where is <ref>the dog</ref>?", ANSWER, picture())
    batch = VLMCollator(processor)([feature])
    assert ANSWER in learnt(processor, batch["labels"])
    ids = processor.tokenizer.convert_tokens_to_ids(list(GROUNDING))
    assert [(batch["input_ids"] == i).sum() for i in ids] == [2, 2, 1, 1]
    said = [{**turn, "content": parts(turn)} for turn in feature["messages"]]
    said[0]["content"][0]["image"] = feature["images"][0]
    truth = processor.apply_chat_template(said, tokenize=True, return_dict=True, return_tensors="pt")
    assert batch["input_ids"].tolist() == truth["input_ids"].tolist()


def parts(turn):
    content = turn["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else [dict(part) for part in content]


def test_an_answer_that_closes_with_such_a_token_is_not_taken_to_be_ended_by_it():
    """GLM's next turn ends it, or a stop that is added."""
    processor = grounding_processor("glm4v")
    talk = chat("Where?", ANSWER)["messages"]
    batch = VLMCollator(processor, add_stop="<|user|>")([{"messages": talk * 2}])
    assert learnt(processor, batch["labels"]) == f"{ANSWER}<|user|>" * 2


RESERVED = [
    ("qwen3_vl", "<|endoftext|>"),
    ("internvl", "<IMG_CONTEXT>"),
    ("internvl", "</img>"),
    ("internvl", "<video>"),
    ("gemma3", "<end_of_image>"),
    ("gemma3", "<end_of_turn>"),
    ("gemma3", "<bos>"),
    ("idefics3", "<row_1_col_2>"),
    ("idefics3", "<row_6_col_6>"),
    ("idefics3", "<fake_token_around_image>"),
    ("llava", "<image>"),
    ("llava", "<eos>"),
    ("glm4v", "<|user|>"),
    ("glm4v", "<|system|>"),
    ("glm4v", "<|begin_of_image|>"),
    ("aya_vision", "<|END_RESPONSE|>"),
    pytest.param("kimi_k25", "<|im_user|>", marks=needs("kimi_k25")),
]
"""Placeholders, what stands around images, ends of turns and of texts, and tokens that a template joins from pieces."""


@pytest.mark.parametrize(("family", "token"), RESERVED)
@pytest.mark.parametrize("who", ["user", "assistant"])
@pytest.mark.filterwarnings("ignore:a user's text holds '<(image|video)>':UserWarning")
def test_what_the_processor_or_the_template_writes_is_refused(family, token, who):
    question, answer = (f"What {token if who == speaker else ''}" for speaker in ("user", "assistant"))
    message = refused(grounding_processor(family), chat(question, answer))
    assert f"its text holds {token!r}, which only the processor and the chat template may write" in message


def test_a_text_is_no_token_without_its_brackets_and_a_name_is_one_that_a_template_writes_as_xml():
    processor = tiny_processor("llava")
    batch = VLMCollator(processor)([chat("eos", "image")])
    assert learnt(processor, batch["labels"]).startswith("image")
    call = {"type": "function", "function": {"name": "image", "arguments": {}}}
    refused(processor, {"messages": [user("Go."), says("", tool_calls=[call])]})


def test_a_tokenizer_s_template_tells_what_is_reserved():
    tokenizer = tiny_processor("internvl").tokenizer
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{{ 'assistant\n' }}{% endif %}"
    )
    batch = VLMCollator(tokenizer)([chat("An <img>?", "No <img>")])
    assert "No <img><|im_end|>" in tokenizer.decode(batch["input_ids"][0])
    refused(tokenizer, chat("An end <|im_end|>?", "No"))


# ---------------------------------------------------------------------- prompt and completion


@needs("deepseek_ocr2")
def test_a_completion_may_hold_the_model_s_own_marks():
    processor = tiny_processor("deepseek_ocr2")
    marks = ["<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>"]
    processor.tokenizer.add_tokens(marks, special_tokens=True)
    completion = "<|ref|>title<|/ref|><|det|>[[1, 2]]<|/det|>"
    batch = VLMCollator(processor)([{"prompt": "<image>\nRead.", "completion": completion, "images": [picture()]}])
    assert learnt(processor, batch["labels"]) == f"{completion}<eos>"
    refused(processor, {"prompt": "<image>\nRead.", "completion": "An <image>", "images": [picture()]})
