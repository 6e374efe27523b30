"""A processor written to a folder and read back does what it did before, without torchvision."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from cases import families, pairs
from chats import BEYOND, CHATTING, FAMILIES, SHOWN, chat, picture, says, text, user
from fixtures.processors import missing_packages, tiny_config, tiny_processor

from vlmpack.collate import VLMCollator
from vlmpack.data import load_processor, save_processor
from vlmpack.errors import ConfigError, FamilyError
from vlmpack.testing.processors import CHAT_TEMPLATE


def same_batches(processor: Any, other: Any, sample: Any) -> None:
    assert processor.chat_template == other.chat_template
    ours, theirs = (VLMCollator(each)([sample]) for each in (processor, other))
    assert sorted(ours) == sorted(theirs)
    tensors = [name for name in ours if name != "vlmpack"]
    assert tensors
    assert all(ours[name].tolist() == theirs[name].tolist() for name in tensors)


def loads_again(folder: Path, processor: Any) -> None:
    again = load_processor(str(folder))
    assert again.chat_template == processor.chat_template
    assert again.tokenizer.get_vocab() == processor.tokenizer.get_vocab()
    assert again.image_processor.to_dict() == processor.image_processor.to_dict()


@pytest.mark.parametrize("family", families(lambda family: family.model_type in FAMILIES))
def test_a_loaded_processor_is_saved_and_loaded_without_its_model(family: str, tmp_path: Path) -> None:
    processor = tiny_processor(family)
    tiny_config(family, processor=processor).save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    loaded = load_processor(str(tmp_path / "model"))
    assert type(loaded.tokenizer) is type(processor.tokenizer)
    same_batches(processor, loaded, chat())
    for name, saved in (("alone", processor), ("again", loaded)):
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
    save_processor(tiny_processor("qwen3_vl"), tmp_path / "none")
    saved = [json.loads((path / "processor_config.json").read_text()) for path in (folder, tmp_path / "none")]
    assert [settings["video_processor"] for settings in saved] == [VIDEOS, None]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
def test_a_copy_saves_itself_and_not_what_it_was_copied_from(copied: Any, tmp_path: Path) -> None:
    processor = copied(tiny_processor())
    processor.tokenizer.add_tokens(["<|mine|>"])
    processor.chat_template = "{{- messages -}}"
    tiny_config(processor=processor).save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
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
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        if name == "processor_config.json":  # beside the settings of the parts
            content = json.dumps({**json.loads((tmp_path / name).read_text()), **json.loads(content)})
        (tmp_path / name).write_text(content)
    return tmp_path


@pairs(
    file=["chat_template.jinja", "chat_template.json", "processor_config.json", None],
    of_tokenizer=[OF_TOKENIZER, None],
    family=["qwen2_5_vl", "qwen3_vl", "llava"],
)
def test_the_processor_s_own_template_comes_before_the_tokenizer_s(
    family: str, of_tokenizer: str | None, file: str | None, tmp_path: Path
) -> None:
    folder = folder_with(tmp_path, family, TEMPLATE_FILES[file] if file else {}, of_tokenizer=of_tokenizer)
    processor = load_processor(folder)
    assert processor.chat_template == (OWN if file else of_tokenizer)
    save_processor(processor, tmp_path)
    loads_again(tmp_path, processor)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # transformers' own
def test_several_templates_by_name_are_loaded_and_saved_again(tmp_path: Path) -> None:
    files = {"chat_template.jinja": OWN, "additional_chat_templates/tool_use.jinja": "{{- tools -}}"}
    processor = load_processor(folder_with(tmp_path, "qwen3_vl", files, of_tokenizer=None))
    assert processor.chat_template == {"default": OWN, "tool_use": "{{- tools -}}"}
    tiny_config("qwen3_vl", processor=processor).save_pretrained(tmp_path / "again")
    save_processor(processor, tmp_path / "again")
    loads_again(tmp_path / "again", processor)


@pytest.mark.parametrize(
    ("file", "text", "error", "expected"),
    [
        ("config.json", '{"model_type": "llama"}', FamilyError, "a llama; there are qwen2_vl, qwen2_5_vl, qwen3_vl"),
        ("processor_config.json", '{"processor_class": "BlipProcessor"}', FamilyError, "holds a BlipProcessor, which"),
        ("processor_config.json", "{}", ConfigError, "no file in .* names the processor's class; copy the config.json"),
        ("preprocessor_config.json", "{", ConfigError, "preprocessor_config.json cannot be read .*save the processor"),
        ("preprocessor_config.json", "[]", ConfigError, "preprocessor_config.json holds a list.*save the processor"),
    ],
)
def test_folders_that_hold_no_processor_are_refused(
    file: str, text: str, error: type[Exception], expected: str, tmp_path: Path
) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(error, match=expected):
        load_processor(tmp_path)


# ---------------------------------------------------------------------- beyond Qwen's

OTHERS = families(lambda family: family.model_type in BEYOND, always=SHOWN)


def sample_of(family: str) -> dict[str, Any]:
    marker = "<image>"
    if family not in CHATTING:
        return {"prompt": f"{marker}Total?", "completion": "5", "images": [picture(90, 61)]}
    content = [{"type": "image", "image": picture(90, 61)}, text("Total?")]
    return {"messages": [user(content), says("5")]}


@pytest.mark.parametrize("family", OTHERS)
@pytest.mark.parametrize("way", ["save_processor", "save_pretrained"])
def test_a_saved_processor_is_loaded_with_its_settings(family: str, way: str, tmp_path: Path) -> None:
    processor = tiny_processor(family)
    if way == "save_processor":
        save_processor(processor, tmp_path)
    else:
        processor.save_pretrained(tmp_path)
    loaded = load_processor(tmp_path)
    assert type(loaded) is type(processor)
    same_batches(loaded, pickle.loads(pickle.dumps(processor)), sample_of(family))


@pytest.mark.skipif(not missing_packages("cohere2_vision"), reason="torchvision is installed")
def test_a_saved_processor_that_needs_torchvision_is_refused_without(tmp_path: Path) -> None:
    """Of another family, whose files name classes that exist for torchvision only."""
    save_processor(tiny_processor("aya_vision"), tmp_path)
    names = {"AyaVisionProcessor": "Cohere2VisionProcessor", "GotOcr2ImageProcessor": "Cohere2VisionImageProcessor"}
    for file in tmp_path.glob("*_config.json"):
        text = file.read_text()
        for before, after in names.items():
            text = text.replace(before, after)
        file.write_text(text)
    with pytest.raises(FamilyError, match="needs torchvision, even for images; install it"):
        load_processor(tmp_path)
