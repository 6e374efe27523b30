"""Processors as they are published: ids and labels token by token those of their own `apply_chat_template`.

`VLMPACK_REAL_PROCESSORS` names the folder that holds theirs; without it these tests are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers_videos import is_installed

from vlmpack import VLMCollator
from vlmpack.data import load_processor
from vlmpack.errors import FamilyError, SampleError
from vlmpack.layout import PackedRow

FOLDER = os.environ.get("VLMPACK_REAL_PROCESSORS")
pytestmark = pytest.mark.skipif(not FOLDER, reason="VLMPACK_REAL_PROCESSORS names no folder")
ENDS = {
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "internvl", "minicpmv4_6"), "<|im_end|>"),
    "idefics3": "<|end_of_text|>",
    "pixtral": "</s>",
    "llava": None,
}
"""By folder, the token that ends an answer; None: the template writes its answers in ways of its own."""
CLASSES = {
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "internvl": "InternVLProcessor",
    "minicpmv4_6": "MiniCPMV4_6Processor",
    "idefics3": "Idefics3Processor",
    "pixtral": "PixtralProcessor",
    "llava": "LlavaProcessor",
}
SIZES = ((300, 200), (61, 143), (500, 400), (1400, 600), (32, 40), (900, 1300))
UNICODE = "Ünïcödé 👩‍👩‍👧 你好 é"
CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "Stadt, 城市"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": '<&> "quoted"', "parameters": CITY}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def image(at: int = 0) -> dict[str, Any]:
    return {"type": "image", "image": Image.linear_gradient("L").resize(SIZES[at]).convert("RGB")}


def chat(*turns: Any, **columns: Any) -> dict[str, Any]:
    """Turns of user and assistant, as parts; a turn that is a message stays one."""
    parts = ([text(turn)] if isinstance(turn, str) else turn for turn in turns)
    messages = [
        turn if isinstance(turn, dict) else {"role": ("user", "assistant")[at % 2], "content": turn}
        for at, turn in enumerate(parts)
    ]
    return {"messages": messages, **columns}


CASES = {
    "one image": chat([image(), text("What is it?")], "A dog."),
    "no image": chat("2 + 2?", "4"),
    "strings": {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]},
    "several images": chat([image(), text("one, "), image(2), text("two, "), image(4), text("alike?")], "No."),
    "an image behind its text": chat([text("Look at "), image()], "I did."),
    "a thought in the answer": chat("What is it?", "<think>\nFour legs.\n</think>\n\nA dog."),
    "a system message": {
        "messages": [{"role": "system", "content": [text("Be terse.")]}, *chat([image(1)], "Pasta.")["messages"]]
    },
    "several turns": chat([image(), text("What is it?")], "A dog.", "Its color?", "Brown,\nI think.", "Sure?", "Yes."),
    "images in several turns": chat([image(), text("One.")], "Seen.", [text("Two: "), image(1)], "Seen too."),
    "all scripts": chat([image(), text(UNICODE)], UNICODE + " ✅", "再说一遍", "好的。\n\n" + UNICODE),
    "a tool that is not called": chat([image(), text("What is it?")], "A dog.", tools=[TOOL]),
    "a tool that is called": chat(
        *("Weather?", {"role": "assistant", "content": "", "tool_calls": [CALL]}),
        *({"role": "tool", "name": "weather", "content": '{"t": 21}'}, {"role": "assistant", "content": "21 °C."}),
        tools=[TOOL],
    ),
    "a thought beside the answer": chat(
        "What is it?", {"role": "assistant", "content": "A dog.", "reasoning_content": "Legs."}
    ),
}
THOUGHTS = ("a thought in the answer", "a thought beside the answer")
TOOLS = ("a tool that is not called", "a tool that is called")
REFUSED = {
    *((name, case) for name in ENDS if name not in ("qwen3_vl", "minicpmv4_6") for case in TOOLS),
    *((name, "a thought beside the answer") for name in ENDS if name != "minicpmv4_6"),
    ("pixtral", "a system message"),  # written before the last question alone, and so not in the place of its message
}
"""What a template leaves out: the sample is refused."""


@cache
def processor_of(name: str) -> Any:
    if not Path(str(FOLDER), name).is_dir():
        pytest.skip(f"there is no {name}")
    try:
        return load_processor(Path(str(FOLDER), name))
    except FamilyError as error:
        if "needs torchvision" not in str(error):
            raise
        pytest.skip(f"{name} needs torchvision")


@pytest.mark.filterwarnings("ignore:the chat template writes no special token after an answer")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ENDS)
def test_ids_and_labels_are_those_of_the_processors_own_template(name: str, case: str) -> None:
    processor, sample = processor_of(name), CASES[case]
    if (name, case) in REFUSED:
        with pytest.raises(SampleError, match="which the chat template does not write"):
            VLMCollator(processor)([sample])
        return
    batch = VLMCollator(processor)([sample])
    ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    tools = {"tools": sample["tools"]} if "tools" in sample else {}
    stock = processor.apply_chat_template(
        [sample["messages"]], tokenize=True, return_dict=True, return_tensors="pt", **tools
    )
    assert ids == stock["input_ids"][0].tolist()
    assert all(label in (-100, token) for label, token in zip(labels, ids, strict=True))
    if (end := ENDS[name]) is None:
        return
    runs = [[*run] for is_trained, run in groupby(labels, lambda label: label != -100) if is_trained]
    said = [message for message in sample["messages"] if message["role"] == "assistant"]
    learned = [processor.tokenizer.decode(run) for run in runs]
    assert len(learned) == len(said)
    for written, message in zip(learned, said, strict=True):
        content = message["content"]
        answer = content if isinstance(content, str) else content[0]["text"]
        if name == "minicpmv4_6" and case in THOUGHTS:  # the prompt opens the thought
            thought = message.get("reasoning_content") or "Four legs."
            answer = f"{thought}\n</think>\n\nA dog."
        assert written == answer + end or ("tool_calls" in message and "Zürich" in written and written.endswith(end))


@pytest.mark.parametrize("name", ENDS)
def test_images_of_any_size_are_measured_as_they_are_made(name: str) -> None:
    collator = VLMCollator(processor_of(name), layout="packed", add_stop="</s>" if name == "llava" else None)
    samples = [chat([image(at), text("?")], "A dog.") for at in range(len(SIZES))]
    row = collator.collate(samples)
    assert isinstance(row, PackedRow)
    assert [collator.measure(sample).num_tokens for sample in samples] == list(row.segments.lengths)


@pytest.mark.parametrize("name", CLASSES)
def test_the_class_is_the_one_that_the_files_name(name: str) -> None:
    assert type(processor_of(name)).__name__ == CLASSES[name]


@pytest.mark.slow
@pytest.mark.skipif(is_installed(), reason="they ran in this process")
def test_processors_that_need_torchvision_are_the_same_with_a_stand_in_for_it() -> None:
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-k", "minicpmv4_6", __file__]
    run = f"import sys, transformers_videos as v, pytest; v.stand_in(); sys.exit(pytest.main({options}))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-2000:]
