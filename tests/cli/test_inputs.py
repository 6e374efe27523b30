"""What is named on the command line: a data set, and a processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vlmpack.cli.inputs import InputOptions, Inputs, named_processor, open_inputs
from vlmpack.data import save_processor
from vlmpack.errors import ConfigError, FamilyError, SampleError
from vlmpack.testing import tiny_config, tiny_processor

CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


def opened(dataset: str, **options: Any) -> Inputs:
    return open_inputs(InputOptions(dataset=dataset, **options))


@pytest.fixture
def chats(tmp_path: Path) -> str:
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{json.dumps({'messages': CHAT})}\n" * 3)
    return str(path)


def test_the_built_in_processor_is_that_of_a_family() -> None:
    assert type(named_processor("tiny")).__name__ == "Qwen3VLProcessor"
    assert type(named_processor("tiny:qwen2_5_vl")).__name__ == "Qwen2_5_VLProcessor"


def test_receipts_for_it_are_small() -> None:
    inputs = opened("synthetic", processor="tiny", num=2, seed=5)
    assert len(inputs.dataset) == 2
    assert inputs.dataset[0]["conversation"][0]["content"][0]["image"].width < 500
    assert inputs.collator.measure(inputs.dataset[0]).num_tokens > 100


def test_receipts_have_no_paths(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--image-root .*: synthetic receipts have no paths; leave it out"):
        opened("synthetic", processor="tiny", image_root=tmp_path)


def test_each_question_can_be_a_sample(tmp_path: Path) -> None:
    turns = [{"role": role, "content": f"{role} {i}"} for i in range(3) for role in ("user", "assistant")]
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": turns, "id": "r"}))
    assert len(opened(str(file), processor="tiny:qwen3").dataset) == 1
    branches = opened(str(file), processor="tiny:qwen3", branches="turns").dataset
    assert [sample["id"] for sample in branches] == ["r/0", "r/1", "r/2"]
    with pytest.raises(ConfigError, match="--columns: synthetic receipts have the names that are read"):
        opened("synthetic", processor="tiny", columns=["{}"])
    with pytest.raises(ConfigError, match="--branches turns: synthetic receipts have one question each"):
        opened("synthetic", processor="tiny", branches="turns")


@pytest.mark.parametrize("processor", ["tiny", "tiny:qwen3"])
def test_texts_go_with_a_vision_model_and_with_a_text_model(chats: str, processor: str) -> None:
    inputs = opened(chats, processor=processor)
    outlines = [inputs.collator.measure(inputs.dataset[at]) for at in range(3)]
    assert all(outline.num_targets > 0 for outline in outlines)


def test_a_folder_of_a_vision_model_and_one_of_a_text_model(tmp_path: Path) -> None:
    processor = tiny_processor()
    for name in ("seeing", "blind"):
        (tmp_path / name).mkdir()
    tiny_config("qwen3_vl", processor=processor).save_pretrained(tmp_path / "seeing")
    save_processor(processor, tmp_path / "seeing")
    tiny_config("qwen3").save_pretrained(tmp_path / "blind")
    named_processor("tiny:qwen3").save_pretrained(tmp_path / "blind")
    assert type(named_processor(str(tmp_path / "seeing"))) is type(processor)
    (tmp_path / "seeing" / "config.json").unlink()
    assert type(named_processor(str(tmp_path / "seeing"))) is type(processor)
    assert "<|im_start|>assistant" in named_processor(str(tmp_path / "blind")).apply_chat_template(CHAT, tokenize=False)


def test_the_most_tokens_of_a_sample(chats: str) -> None:
    inputs = opened(chats, processor="tiny", max_length=5)
    with pytest.raises(SampleError, match="max_length=5"):
        inputs.collator.measure(inputs.dataset[0])


def test_keys_of_messages_are_left_out_and_a_stop_is_added_where_that_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": [{**turn, "at": "noon"} for turn in CHAT]}))
    with pytest.raises(SampleError, match=r"has at, which the chat template does not write"):
        (refusing := opened(str(file), processor="tiny:glm4v")).collator.measure(refusing.dataset[0])
    inputs = opened(str(file), processor="tiny:glm4v", ignored_keys=["at"], add_stop="<|user|>")
    measured = inputs.collator.measure(inputs.dataset[0])
    stop = inputs.collator.processor.tokenizer.convert_tokens_to_ids("<|user|>")
    assert measured.labels[-1] == measured.input_ids[-1] == stop


def test_the_largest_area_of_an_image_is_the_processors_own_or_the_one_given(chats: str) -> None:
    """64 squares of 32 x 32 pixels; what is measured is what is cut."""
    free, bound = (opened("synthetic", processor="tiny", num=1, max_pixels=area) for area in (None, 64 * 32**2))
    tokens = [int((one.collator.measure(one.dataset[0]).types != 0).sum()) for one in (free, bound)]
    assert tokens[1] <= 64 < tokens[0]
    pixels = bound.collator.collate([bound.dataset[0]]).media.pixel_values
    assert pixels is not None
    assert len(pixels) == 4 * tokens[1]
    with pytest.raises(ConfigError, match="--max-pixels 9: the processor enlarges images to 4096 pixels at least"):
        opened(chats, processor="tiny", max_pixels=9)
    with pytest.raises(ConfigError, match="--max-pixels 9: a text model has no images"):
        opened(chats, processor="tiny:qwen3", max_pixels=9)


def test_what_is_not_there_is_refused(chats: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--processor .*nowhere: nothing there can be read"):
        opened(chats, processor=str(tmp_path / "nowhere"))
    with pytest.raises(FamilyError, match="mamba: unknown family"):
        named_processor("tiny:mamba")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"--processor .*config.json is a file; give its folder: {tmp_path}$"):
        named_processor(str(tmp_path / "config.json"))


def test_foreign_columns_are_named(tmp_path: Path) -> None:
    file = tmp_path / "qa.jsonl"
    file.write_text('{"question": "2 + 2?", "answer": "4"}\n')
    names = '{"question": "query", "answer": "response"}'
    (sample,) = opened(str(file), processor="tiny:qwen3", columns=[names]).dataset
    assert [message["content"] for message in sample["messages"]] == ["2 + 2?", "4"]
