"""Chat templates as they are published: what is trained on of conversations of several turns, thoughts among them."""

import copy
import re
from itertools import groupby

import pytest
from chats import says, user
from fixtures.processors import tiny_processor

from vlmpack.collate import VLMCollator
from vlmpack.data import branch_turns
from vlmpack.errors import SampleError

trl = pytest.importorskip("trl.chat_template_utils", reason="TRL's templates are read")

SPECIAL = re.compile(r"<[|｜][^<>\s'\"]{1,40}?[|｜]>|<\|turn>|<turn\|>|\[gMASK\]|<sop>|<(?:start|end)_of_\w+>")
"""Special tokens of these templates."""
ASK, ASK_AGAIN = user("2 + 2?"), user("3 + 3?")
FOUR, SIX = says("It is 4."), says("It is 6.")
TALK = [ASK, FOUR, ASK_AGAIN, SIX]


def thinking(key):
    thoughts = ["Two twos.", "Two threes."]
    if key == "content":
        said = [
            f"<think>\n{thought}\n</think>\n\n{a['content']}" for thought, a in zip(thoughts, TALK[1::2], strict=True)
        ]
        return [ASK, {**FOUR, "content": said[0]}, ASK_AGAIN, {**SIX, "content": said[1]}]
    return [ASK, {**FOUR, key: thoughts[0]}, ASK_AGAIN, {**SIX, key: thoughts[1]}]


def tokenizer_of(template):
    tokenizer = copy.deepcopy(tiny_processor("glm4v").tokenizer)
    tokenizer.add_tokens(sorted({*SPECIAL.findall(template), "<|endoftext|>"}), special_tokens=True)
    tokenizer.bos_token, tokenizer.eos_token = "<s>", "<|endoftext|>"
    tokenizer.chat_template = template
    return tokenizer


def targets(template, messages, **columns):
    tokenizer = tokenizer_of(template)
    labels = VLMCollator(tokenizer).collate([{"messages": messages, **columns}]).labels[0].tolist()
    runs = (list(run) for is_trained, run in groupby(labels, lambda label: label != -100) if is_trained)
    return [tokenizer.decode(run) for run in runs]


DEEPSEEK, CHATML = "<｜end▁of▁sentence｜>", "<|im_end|>"
FINAL, ANALYSIS = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>Two threes.<|end|><|start|>assistant"
STOCK = {
    "deepseekv3": ("It is 4." + DEEPSEEK, "It is 6." + DEEPSEEK),
    "deepseek_r1_distill": ("It is 4." + DEEPSEEK, "It is 6." + DEEPSEEK),
    "phi3": ("It is 4.<|end|>", "It is 6.<|end|>\n<|endoftext|>"),
    "phi3_5": ("It is 4.<|end|>", "It is 6.<|end|>\n<|endoftext|>"),
    "gptoss": (f"{FINAL}It is 4.<|end|>", f"{FINAL}It is 6.<|return|>"),
    "glm4moe": ("It is 4.<|user|>", "It is 6."),
    "gemma3": ("It is 4.<end_of_turn>", "It is 6.<end_of_turn>"),
    "gemma4": ("It is 4.<turn|>", "It is 6.<turn|>"),
    "diffusion_gemma": ("It is 4.<turn|>", "It is 6.<turn|>"),
    "llama3": ("It is 4.<|eot_id|>", "It is 6.<|eot_id|>"),
    "nemotron_3_nano": ("It is 4." + CHATML, "It is 6." + CHATML),
    "qwen3": ("It is 4." + CHATML, "It is 6." + CHATML),
    "qwen3_5_think": ("It is 4." + CHATML, "It is 6." + CHATML),
}
"""What is trained on of two plain answers: an empty thought that a template writes by itself is not."""
THOUGHTFUL = {
    ("glm4moe", "reasoning_content"): ("It is 4.<|user|>", "\n<think>Two threes.</think>\nIt is 6."),
    ("glm4moe", "content"): ("It is 4.<|user|>", "\n<think>Two threes.</think>\nIt is 6."),
    ("gptoss", "thinking"): (f"{FINAL}It is 4.<|end|>", f"{ANALYSIS}{FINAL}It is 6.<|return|>"),
    ("qwen3", "content"): ("It is 4." + CHATML, "<think>\nTwo threes.\n</think>\n\nIt is 6." + CHATML),
    ("qwen3_5_think", "content"): ("It is 4." + CHATML, "Two threes.\n</think>\n\nIt is 6." + CHATML),
    ("diffusion_gemma", "reasoning_content"): (
        "It is 4.<turn|>",
        "<|channel>thought\nTwo threes.\n<channel|>It is 6.<turn|>",
    ),
}
"""The same of answers with thoughts, which templates leave out of all but the last; an opening that the generation
prompt writes is not trained on."""


@pytest.mark.parametrize("name", STOCK)
def test_answers_of_several_turns_are_found(name):
    assert targets(getattr(trl, f"{name}_chat_template"), TALK) == list(STOCK[name])


@pytest.mark.parametrize(("name", "key"), THOUGHTFUL)
def test_thoughts_are_trained_on_where_the_template_writes_them(name, key):
    assert targets(getattr(trl, f"{name}_chat_template"), thinking(key)) == list(THOUGHTFUL[name, key])


@pytest.mark.parametrize("name", ["glm4moe", "gptoss", "qwen3"])
def test_each_answer_as_a_sample_keeps_its_thoughts(name):
    """In the whole conversation the template leaves the first answer's out."""
    key = "thinking" if name == "gptoss" else "reasoning_content"
    template, record = getattr(trl, f"{name}_chat_template"), {"messages": thinking(key)}
    first, second = (targets(template, **sample) for sample in branch_turns(record, branches="answers"))
    assert len(first) == len(second) == 1
    assert "Two twos." in first[0]
    assert "Two threes." in second[0]


@pytest.mark.parametrize("name", ["deepseekv3", "deepseek_r1_distill"])
def test_a_template_that_drops_the_last_thoughts_too_is_refused(name):
    with pytest.raises(SampleError, match=r"thinks 'Two threes.', which the chat template does not write") as caught:
        targets(getattr(trl, f"{name}_chat_template"), thinking("content"))
    assert "trl.chat_template_utils.get_training_chat_template" in str(caught.value)


def test_an_empty_thought_is_trained_on_if_the_sample_wrote_it():
    wrote = [ASK, {**FOUR, "content": "<think>\n\n</think>\n\nIt is 4."}]
    for name in ("qwen3", "nemotron_3_nano", "qwen3_5_nothink"):
        (said,) = targets(getattr(trl, f"{name}_chat_template"), wrote)
        assert said.endswith("</think>\n\nIt is 4." + CHATML)


ADDED = re.compile(r"^(<｜Assistant｜>|<\|start\|>assistant(?=<\|channel))|\s*<think>\s*</think>\s*|(?<=>)\n$")
"""What TRL's marks have beside answers: a turn's header, an empty thought and a line break behind its end."""


@pytest.mark.parametrize("name", [name for name in STOCK if f"{name}_training_chat_template" in vars(trl)])
def test_trl_s_training_templates_are_taken_at_their_word(name):
    """They train on the same answers; GLM's ends its last answer too."""
    said = [ADDED.sub("", text) for text in targets(getattr(trl, f"{name}_training_chat_template"), TALK)]
    assert said == [text + "<|user|>" * (text == "It is 6.") for text in STOCK[name]]


@pytest.mark.parametrize("name", [name for name in STOCK if f"{name}_training_chat_template" in vars(trl)])
def test_only_a_turn_s_own_marks_are_trained_on(name):
    read = [ASK, {**FOUR, "weight": 0}, ASK_AGAIN, SIX]
    for kind in ("", "_training"):
        template = getattr(trl, f"{name}{kind}_chat_template")
        assert targets(template, read) == targets(template, TALK)[1:]
