"""Places of media in texts and parts: each is the place of its medium, or the sample is refused; none is trained on."""

from __future__ import annotations

import io
import json
import tarfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vlmpack.collate import VLMCollator
from vlmpack.collate.conversation import read_conversation
from vlmpack.data import open_dataset
from vlmpack.errors import Refusal, SampleError
from vlmpack.families.registry import FAMILIES
from vlmpack.testing import tiny_processor

SAY = {"role": "assistant", "content": "A dog."}
SOUNDS = [
    np.random.default_rng(at).normal(scale=0.1, size=size).astype(np.float32) for at, size in enumerate((9000, 4000))
]
IMAGES = [Image.new("RGB", size, "red") for size in ((64, 64), (128, 64))]
HEARING = "qwen3_omni_moe_thinker"
hearing = pytest.mark.skipif(HEARING not in FAMILIES, reason="this transformers has no Qwen3-Omni")


@lru_cache
def collator_of(family: str = "qwen3_vl", **settings: Any) -> VLMCollator:
    return VLMCollator(tiny_processor(family), **settings)


def asked(content: Any, **columns: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, SAY], **columns}


def refusal(sample: dict[str, Any], **settings: Any) -> Refusal:
    with pytest.raises(Refusal) as seen:
        read_conversation(sample, **settings)
    return seen.value


# ---------------------------------------------------------------------- audio

PART = {"type": "audio"}
SPOKEN = {
    "one": ("What is <audio>, please?", ["What is ", PART, ", please?"], 1),
    "two": ("<audio> or <audio>?", [PART, " or ", PART, "?"], 2),
}
WRITTEN = {
    "messages": lambda text, audios: asked(text, audios=audios),
    "parts": lambda text, audios: asked([{"type": "text", "text": text}], audios=audios),
    "one column": lambda text, audios: asked(text, audio=audios),
    "prompt and completion": lambda text, audios: {
        "prompt": [{"role": "user", "content": text}],
        "completion": [SAY],
        "audios": audios,
    },
}


@hearing
@pytest.mark.parametrize("form", WRITTEN)
@pytest.mark.parametrize("name", SPOKEN)
def test_audio_stands_where_its_marker_stands(form: str, name: str) -> None:
    text, parts, count = SPOKEN[name]
    collator = collator_of(HEARING)
    messages = [
        {"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]},
        SAY,
    ]
    written = collator.processor.apply_chat_template(messages, tokenize=False)
    plain = collator.processor(text=[written], audio=SOUNDS[:count], return_tensors="pt")["input_ids"]
    sample = WRITTEN[form](text, SOUNDS[:count])
    assert torch.equal(collator.collate([sample]).input_ids, plain)
    assert torch.equal(torch.from_numpy(collator.measure(sample).input_ids), plain[0])


@hearing
def test_turns_of_from_and_value_have_the_same_places() -> None:
    turns = [{"from": "human", "value": "<audio>What is it?"}, {"from": "gpt", "value": "A dog."}]
    ids = collator_of(HEARING).collate([{"conversations": turns, "audios": SOUNDS[:1]}]).input_ids
    assert torch.equal(ids, collator_of(HEARING).collate([asked("<audio>What is it?", audios=SOUNDS[:1])]).input_ids)


@hearing
def test_a_plain_prompt_has_them_too() -> None:
    collator = collator_of(HEARING)
    metadata = collator.metadata
    ids = collator.collate([{"prompt": "Hear <audio>:", "completion": "A dog.", "audio": SOUNDS[:1]}]).input_ids[0]
    written = f"Hear {metadata.audio_start}{metadata.audio_token}{metadata.audio_end}:"
    plain = collator.processor(text=[written], audio=SOUNDS[:1], return_tensors="pt")["input_ids"][0]
    assert torch.equal(ids[: len(plain)], plain)


@pytest.mark.parametrize("lost", [None, [], "", [None]])
def test_a_marker_whose_audio_was_lost_is_refused(lost: Any) -> None:
    for has_audio in (True, False):
        seen = refusal(asked("<audio>What is it?", audios=lost), has_audio=has_audio)
        assert seen.reason == "media_count_mismatch"
        assert "holds '<audio>' 1 time(s), but the sample has no audio to put there" in seen.message


def test_more_markers_than_audios_are_refused() -> None:
    assert refusal(asked("<audio><audio>?", audios=SOUNDS[:1]), has_audio=True).reason == "ambiguous_media"


def test_a_marker_without_a_column_of_audio_is_a_word_and_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="a user's text holds '<audio>', but its sample has no column audio or audios"):
        VLMCollator(tiny_processor()).measure(asked("What is the tag <audio>?"))


def test_the_remedy_for_audio_that_cannot_be_heard_is_not_to_train_on_its_marker() -> None:
    message = refusal(asked("<audio>What is it?", audios=["a.wav"])).message
    assert "cannot hear; leave the sample out, or the column if its text needs no audio" in message


@pytest.mark.parametrize("column", ["audio_path", "sound", "speech_file", "file_name"])
def test_audio_in_a_column_that_nothing_reads_is_not_left_out_in_silence(column: str) -> None:
    with pytest.raises(SampleError, match=f"it has a column {column}, which looks like its audio") as seen:
        collator_of().measure(asked("What is it?", **{column: "a.wav"}))
    assert seen.value.reason == "unread_column"


def test_audio_of_llama_factorys_dataset_info_is_the_place_of_its_markers(tmp_path: Path) -> None:
    """As in its mllm_audio_demo: files are refused later, as audio is read from arrays alone; markers are places."""
    turns = [{"role": "user", "content": "<audio>What is it?"}, SAY]
    (tmp_path / "demo.json").write_text(json.dumps([{"messages": turns, "audios": ["demo/1.mp3"]}]))
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "messages", "audios": "audios"}
    entry = {"file_name": "demo.json", "formatting": "sharegpt", "columns": columns, "tags": tags}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"demo": entry}))
    sample = open_dataset(tmp_path / "demo.json", columns=tmp_path / "dataset_info.json")[0]
    read = read_conversation(sample, has_audio=True)
    assert read.messages[0]["content"] == [{"type": "audio"}, {"type": "text", "text": "What is it?"}]
    assert [ref.source for ref in read.audios] == ["demo/1.mp3"]


def test_audio_in_a_shard_is_audio(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "<audio>What is it?"}, {"from": "gpt", "value": "A dog."}]
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, data in (("0.wav", b"RIFF"), ("0.json", json.dumps({"conversations": turns}).encode())):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    sample = open_dataset(tmp_path / "a.tar")[0]
    assert sample["audio"] == {"bytes": b"RIFF", "path": "0.wav"}
    assert "cannot hear" in refusal(sample).message


# ---------------------------------------------------------------------- other libraries' places


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("<img>dog.jpg</img>What is it?", "image"),
        ("Picture 1: <img>images/dog.jpg</img>\nWhat is it?", "image"),
        ("<image>dog.jpg</image>What?", "image"),
        ("<video>clip.mp4</video>What?", "video"),
        ("<audio>a.wav</audio>What?", "audio"),
    ],
)
@pytest.mark.parametrize("columns", [{}, {"images": []}, {"images": IMAGES[:1]}])
def test_a_path_inside_a_text_is_refused(text: str, kind: str, columns: dict[str, Any]) -> None:
    for sample in (
        asked(text, **columns),
        asked([{"type": "text", "text": text}], **columns),
        {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "A dog."}], **columns},
        {"texts": [{"user": text, "assistant": "A dog."}], **columns},
        {"prompt": text, "completion": "A dog.", **columns},
    ):
        seen = refusal(sample)
        assert seen.reason == "media_in_text"
        assert f"write <{kind}> there and the path into a column {kind}s" in seen.message


@pytest.mark.parametrize(
    "text",
    ["<image_1>What?", "What is in <ImageHere>?", "<|image_1|>\nWhat?", "See <image 1>.", "<|image|>?", "<IMAGE>?"],
)
def test_another_librarys_place_is_not_learnt_beside_an_image_in_front(text: str) -> None:
    seen = refusal(asked(text, images=IMAGES[:1]))
    assert seen.reason == "ambiguous_media"
    assert "is no place of the image(s) in the sample's column here; write <image>" in seen.message


def test_what_is_meant_as_text_is_text() -> None:
    for text in ("<img>a.jpg</img>", "<image_1>?", "<audio>?", "<image>?"):
        assert text in "".join(read_conversation(asked(text, images=IMAGES[:1]), markers="text").texts())
    for text in ('<img src="a.jpg"/>', "<img></img>", "<image_1>", "List<image>", "<video controls>"):
        assert text in "".join(read_conversation(asked(text)).texts())
    answer = {"role": "assistant", "content": "<img>a.jpg</img>"}
    assert read_conversation({"messages": [{"role": "user", "content": "Write HTML."}, answer]}).messages[1] == answer
    assert read_conversation(asked("<img>a.jpg</img>"), has_vision=False).images == ()


# ---------------------------------------------------------------------- parts by their index


def test_parts_take_the_images_that_their_index_names() -> None:
    parts = [{"type": "image", "index": 1}, {"type": "image", "index": 0}, {"type": "text", "text": "?", "index": None}]
    assert [ref.source for ref in read_conversation(asked(parts, images=IMAGES)).images] == IMAGES[::-1]


@pytest.mark.parametrize("indices", [(0, 0), (1, 2), (None, 0), ("a", 0)])
def test_an_index_of_no_image_is_refused(indices: tuple[Any, Any]) -> None:
    parts = [{"type": "image", "index": index} for index in indices]
    assert refusal(asked(parts, images=IMAGES)).reason == "ambiguous_media"


# ---------------------------------------------------------------------- columns with nothing in them


@pytest.mark.parametrize("nothing", ["", [], [""], [None], [{"bytes": None, "path": None}]])
@pytest.mark.parametrize("column", ["image", "images", "video", "videos"])
def test_a_column_with_nothing_in_it_has_no_media(nothing: Any, column: str) -> None:
    read = read_conversation(asked("2 + 2?", **{column: nothing}))
    assert (read.images, read.videos) == ((), ())


def test_an_image_that_is_missing_among_others_is_refused() -> None:
    seen = refusal(asked("?", images=[IMAGES[0], None]))
    assert (seen.reason, seen.message[:33]) == ("image_missing", "image 1 of the 2 in its column is")


# ---------------------------------------------------------------------- captions


def test_the_caption_of_an_audio_is_the_answer_to_it(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"audio": [0.25, 0.5], "response": "A dog."}))
    read = read_conversation(open_dataset(tmp_path / "rows.jsonl")[0], has_audio=True)
    assert read.messages == ({"role": "user", "content": [{"type": "audio"}]}, SAY)
    assert [ref.source for ref in read.audios] == [[0.25, 0.5]]
