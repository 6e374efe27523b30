"""A processor written to a folder and read back does what it did before, without torchvision."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import pairs
from chats import FAMILIES, chat, needs_torchvision
from PIL import Image
from transformers import AutoProcessor, Trainer, TrainingArguments

from vlmpack import enable_packing
from vlmpack.collate import VLMCollator
from vlmpack.data import load_processor, save_processor
from vlmpack.errors import ConfigError, FamilyError
from vlmpack.testing import tiny_config, tiny_model, tiny_processor
from vlmpack.testing.processors import CHAT_TEMPLATE


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_is_what_is_loaded(family: str, tmp_path: Path) -> None:
    before = tiny_processor(family)
    tiny_config(family, processor=before).save_pretrained(tmp_path)
    save_processor(before, tmp_path)
    after = load_processor(str(tmp_path))
    assert type(after) is type(before)
    assert type(after.tokenizer) is type(before.tokenizer)
    assert after.chat_template == before.chat_template

    content = [{"type": "image"}, {"type": "text", "text": "What is the total?"}]
    messages = [{"role": "user", "content": content}]
    image = Image.effect_noise((123, 77), 50).convert("RGB")
    batches = [
        processor(text=[processor.apply_chat_template(messages)], images=[image], return_tensors="np")
        for processor in (before, after)
    ]
    assert set(batches[0]) == set(batches[1])
    for name in batches[0]:
        np.testing.assert_array_equal(batches[0][name], batches[1][name])


def test_another_family_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(FamilyError, match="a llama; there are qwen2_vl, qwen2_5_vl, qwen3_vl"):
        load_processor(str(tmp_path))


def loads_again(folder: Path, processor: Any) -> None:
    again = load_processor(str(folder))
    assert again.chat_template == processor.chat_template
    assert again.tokenizer.get_vocab() == processor.tokenizer.get_vocab()
    assert again.image_processor.to_dict() == processor.image_processor.to_dict()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_processor_is_saved_and_loaded_without_its_model(family: str, tmp_path: Path) -> None:
    processor = tiny_processor(family)
    tiny_config(family, processor=processor).save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    for name, saved in (("alone", processor), ("again", load_processor(tmp_path / "model"))):
        saved.save_pretrained(tmp_path / name)
        assert not (tmp_path / name / "config.json").exists()
        assert type(load_processor(tmp_path / name)) is type(processor)
        loads_again(tmp_path / name, processor)


VIDEOS = {
    "video_processor_type": "Qwen3VLVideoProcessor",
    "fps": 3,
    "size": {"shortest_edge": 4096, "longest_edge": 9**7},
}
"""Settings of a video processor of another class than AutoProcessor chooses by the image processor."""


def saved_again(folder: Path) -> Path:
    """A folder with a processor that was loaded from a model's folder with settings of videos."""
    processor = tiny_processor("qwen3_vl")
    tiny_config("qwen3_vl", processor=processor).save_pretrained(folder / "model")
    save_processor(processor, folder / "model")
    (folder / "model" / "video_preprocessor_config.json").write_text(json.dumps(VIDEOS))
    save_processor(load_processor(folder / "model"), folder / "again")
    return folder / "again"


def test_settings_of_videos_are_saved_again(tmp_path: Path) -> None:
    folder = saved_again(tmp_path)
    assert json.loads((folder / "video_preprocessor_config.json").read_text()) == VIDEOS
    save_processor(tiny_processor("qwen3_vl"), tmp_path / "none")
    assert not (tmp_path / "none" / "video_preprocessor_config.json").exists()


@needs_torchvision
def test_autoprocessor_loads_the_video_processor_that_was_saved(tmp_path: Path) -> None:
    loaded = AutoProcessor.from_pretrained(saved_again(tmp_path))
    save_processor(loaded, tmp_path / "with_part")
    for processor in (loaded, AutoProcessor.from_pretrained(tmp_path / "with_part")):
        assert type(processor.video_processor).__name__ == "Qwen3VLVideoProcessor"
        assert processor.video_processor.fps == 3
        assert processor.video_processor.size["longest_edge"] == 9**7
    loads_again(tmp_path / "with_part", loaded)
    loaded.save_pretrained(tmp_path / "nested")  # transformers' own way: one file of all parts
    assert not (tmp_path / "nested" / "preprocessor_config.json").exists()
    loads_again(tmp_path / "nested", loaded)
    assert load_processor(tmp_path / "nested").video_settings["fps"] == 3


def test_a_class_that_no_file_names_is_asked_for(tmp_path: Path) -> None:
    tiny_processor("qwen3_vl").save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["processor_class"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"no file in .* names the processor's class; copy the config"):
        load_processor(tmp_path)


def test_a_processor_of_another_class_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "BlipProcessor"}))
    with pytest.raises(FamilyError, match=r"holds a BlipProcessor, which .* there are Qwen2VLProcessor, "):
        load_processor(tmp_path)


def test_a_checkpoint_of_trainer_holds_the_processor(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="waits for accelerate (extra [train])")
    processor = tiny_processor()
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=1,
        save_steps=1,
        remove_unused_columns=False,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    Trainer(
        model=enable_packing(tiny_model(processor=processor)),
        args=arguments,
        data_collator=VLMCollator(processor, layout="packed"),
        train_dataset=[chat(), chat()],  # pyright: ignore[reportArgumentType]
        processing_class=processor,
    ).train()
    loads_again(tmp_path / "checkpoint-1", processor)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
def test_a_copy_saves_itself_and_not_what_it_was_copied_from(copied: Any, tmp_path: Path) -> None:
    processor = copied(tiny_processor())
    processor.tokenizer.add_tokens(["<|mine|>"])
    processor.chat_template = "{{- messages -}}"
    tiny_config(processor=processor).save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    loads_again(tmp_path, processor)


def test_a_processor_without_a_template_is_saved_too(tmp_path: Path) -> None:
    processor = tiny_processor()
    processor.chat_template = None
    tiny_config(processor=processor).save_pretrained(tmp_path)
    save_processor(processor, tmp_path)
    loads_again(tmp_path, processor)


OWN, OF_TOKENIZER = CHAT_TEMPLATE + "{{- 'own' -}}", CHAT_TEMPLATE + "{{- 'of the tokenizer' -}}"
TEMPLATE_FILES = {
    "chat_template.jinja": {"chat_template.jinja": OWN},
    "chat_template.json": {"chat_template.json": json.dumps({"chat_template": OWN})},
    "processor_config.json": {"processor_config.json": json.dumps({"chat_template": OWN})},
}


def folder_with(tmp_path: Path, family: str, files: dict[str, str], *, of_tokenizer: str | None) -> Path:
    """A processor as it is published: the tokenizer's template in its configuration, the processor's in `files`."""
    processor = tiny_processor(family)
    processor.chat_template = None
    tiny_config(family, processor=processor).save_pretrained(tmp_path)
    save_processor(processor, tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    if of_tokenizer is not None:
        settings["chat_template"] = of_tokenizer
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pairs(
    file=["chat_template.jinja", "chat_template.json", "processor_config.json"],
    of_tokenizer=[OF_TOKENIZER, None],
    family=["qwen2_5_vl", "qwen3_vl", "llava"],
)
def test_the_processor_s_own_template_comes_before_the_tokenizer_s(
    family: str, of_tokenizer: str | None, file: str, tmp_path: Path
) -> None:
    folder = folder_with(tmp_path, family, TEMPLATE_FILES[file], of_tokenizer=of_tokenizer)
    assert load_processor(folder).chat_template == OWN


def test_the_tokenizer_s_template_is_taken_where_there_is_no_other(tmp_path: Path) -> None:
    assert (
        load_processor(folder_with(tmp_path, "qwen2_5_vl", {}, of_tokenizer=OF_TOKENIZER)).chat_template == OF_TOKENIZER
    )


def test_a_template_is_autoprocessor_s(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "llava", TEMPLATE_FILES["chat_template.json"], of_tokenizer=OF_TOKENIZER)
    assert load_processor(folder).chat_template == AutoProcessor.from_pretrained(folder).chat_template


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # transformers' own
def test_several_templates_by_name_are_loaded_and_saved_again(tmp_path: Path) -> None:
    files = {"chat_template.jinja": OWN, "additional_chat_templates/tool_use.jinja": "{{- tools -}}"}
    processor = load_processor(folder_with(tmp_path, "qwen3_vl", files, of_tokenizer=None))
    assert processor.chat_template == {"default": OWN, "tool_use": "{{- tools -}}"}
    tiny_config("qwen3_vl", processor=processor).save_pretrained(tmp_path / "again")
    save_processor(processor, tmp_path / "again")
    loads_again(tmp_path / "again", processor)


def test_it_is_not_sent_to_the_hub_while_it_is_saved(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="call push_to_hub of the processor"):
        tiny_processor().save_pretrained(tmp_path, push_to_hub=True)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_settings_that_cannot_be_read_are_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(
        ConfigError, match=r"preprocessor_config.json (cannot be read|holds a list).*save the processor"
    ):
        load_processor(tmp_path)
