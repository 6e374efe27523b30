"""Keys and digests: whatever decides lengths is in the key of a sample, and whatever is read in its digest."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chats import chat, picture, processor_of, tokenized
from clips import clip_bytes
from measured import encoded
from PIL import ExifTags, Image
from stores import asked

from vlmpack.collate import VLMCollator
from vlmpack.collate.digests import sample_digest, sample_key, settings_key
from vlmpack.data.images import ImageLimits
from vlmpack.errors import SampleError
from vlmpack.testing import tiny_processor
from vlmpack.testing.processors import CHAT_TEMPLATE

COLLATOR = VLMCollator(processor_of())
LIMITS = ImageLimits()


def key(sample: Any) -> bytes | None:
    return sample_key(sample, b"settings", COLLATOR)


def digest(sample: Any) -> str:
    return sample_digest(sample, COLLATOR)


# ---------------------------------------------------------------------- the key of a sample


def test_an_image_of_the_same_size_is_found_again_wherever_it_lies(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    sources = [
        picture(90, 60),
        encoded(90, 60, seed=1),
        {"bytes": encoded(90, 60, "PNG"), "path": None},
        path,
        str(path),
    ]
    path.write_bytes(encoded(90, 60, "WEBP"))

    assert len({key(chat("?", "a", source)) for source in sources}) == 1


def turned(orientation: int, height: int = 60) -> Image.Image:
    image = picture(90, height)
    image.getexif()[ExifTags.Base.Orientation] = orientation
    return image


TOOL = {"type": "function", "function": {"name": "add", "description": "adds"}}
PLAIN = {"prompt": "2 + 3 = ", "completion": "5"}
BASE = chat("Total?", "75,000", picture(90, 60), tools=[TOOL], chat_template_kwargs={"think": True})
CHANGED = {
    "question": {**BASE, "messages": chat("Total ?", "75,000", picture(90, 60))["messages"]},
    "answer": {**BASE, "messages": chat("Total?", "75,001", picture(90, 60))["messages"]},
    "role": {**BASE, "messages": [BASE["messages"][0], {**BASE["messages"][1], "role": "user"}]},
    "a name": {**BASE, "messages": [{**BASE["messages"][0], "name": "Ann"}, BASE["messages"][1]]},
    "another turn": {**BASE, "messages": [*BASE["messages"], {"role": "user", "content": "thanks"}]},
    "two texts": {**BASE, "messages": [{"role": "user", "content": ["Total", "?"]}, BASE["messages"][1]]},
    "tools": {**BASE, "tools": [TOOL, TOOL]},
    "order in a tool": {**BASE, "tools": [dict(reversed(TOOL.items()))]},
    "template options": {**BASE, "chat_template_kwargs": {"think": False}},
    "width": {**BASE, "images": [picture(91, 60)]},
    "height": {**BASE, "images": [picture(90, 61)]},
    "sides swapped": {**BASE, "images": [picture(60, 90)]},
    "turned": {**BASE, "images": [turned(6, height=50)]},
    "keys": {**BASE, "images": [{"image": picture(90, 60), "max_pixels": 5000}]},
    "other keys": {**BASE, "images": [{"image": picture(90, 60), "max_pixels": 5001}]},
    "plain": PLAIN,
    "a question and its answer in columns": {"question": "2 + 3?", "answer": "5"},
    "plain prompt": {**PLAIN, "prompt": "2 + 3 ="},
    "both its answers are a target": {**BASE, "messages": 2 * BASE["messages"], "images": 2 * [picture(90, 60)]},
    "only its last answer is a target": {
        **BASE,
        "messages": None,
        "prompt": (2 * BASE["messages"])[:3],
        "completion": BASE["messages"][1:],
        "images": 2 * [picture(90, 60)],
    },
    "a video": {**chat("?", "a"), "video": [picture(90, 60)]},
    "a longer video": {**chat("?", "a"), "video": [picture(90, 60)] * 2},
    "a faster video": {**chat("?", "a"), "video": [{"video": [picture(90, 60)], "sample_fps": 4}]},
}


def test_each_part_that_decides_lengths_changes_the_key() -> None:
    keys = {name: key(sample) for name, sample in {"base": BASE, **CHANGED}.items()}
    assert None not in keys.values()
    assert len(set(keys.values())) == len(CHANGED) + 1 > 20


@pytest.mark.parametrize(
    "more", [{"id": "r1"}, {"ground_truth": object()}, {"labels": None}, {"images": [turned(1)]}, {"videos": None}]
)
def test_what_does_not_decide_lengths_is_no_part_of_the_key(more: dict[str, Any]) -> None:
    assert key({**BASE, **more}) == key(copy.deepcopy(BASE))


@pytest.mark.parametrize(
    "sample",
    [
        tokenized("qwen3_vl", "<|im_start|>assistant\n5<|im_end|>"),
        chat("?", "a", b"no image"),
        chat("?", "a", video="film.mp4"),
        chat("?", "a", video=clip_bytes(num_frames=4)),
        chat("?", "a", chat_template_kwargs={"now": object()}),
        {"messages": []},
        7,
    ],
)
def test_what_was_tokenized_cannot_be_read_or_has_no_content_has_no_key(sample: Any) -> None:
    assert key(sample) is None


# ---------------------------------------------------------------------- the key of the settings, and the processor


def with_token() -> Any:
    processor = tiny_processor()
    processor.tokenizer.add_tokens(["<box>"])
    return processor


def unresized() -> Any:
    processor = tiny_processor()
    processor.image_processor.do_resize = False
    return processor


SETTINGS: dict[str, Callable[[], VLMCollator]] = {
    "max_length": lambda: VLMCollator(tiny_processor(), max_length=99),
    "drop": lambda: VLMCollator(tiny_processor(), max_length=99, overlength="drop"),
    "truncate": lambda: VLMCollator(tiny_processor(), max_length=99, overlength="truncate"),
    "train_on": lambda: VLMCollator(tiny_processor(), train_on="all"),
    "vocab_size": lambda: VLMCollator(tiny_processor(), vocab_size=2000),
    "limits": lambda: VLMCollator(tiny_processor(), limits=replace(LIMITS, max_pixels=10**6)),
    "max_pixels": lambda: VLMCollator(tiny_processor(max_pixels=10**5)),
    "min_pixels": lambda: VLMCollator(tiny_processor(min_pixels=10**4)),
    "do_resize": lambda: VLMCollator(unresized()),
    "family": lambda: VLMCollator(tiny_processor("qwen2_5_vl")),
    "template": lambda: VLMCollator(tiny_processor(chat_template=CHAT_TEMPLATE + " ")),
    "vocabulary": lambda: VLMCollator(tiny_processor(vocab_size=700)),
    "a token": lambda: VLMCollator(with_token()),
    "a tokenizer": lambda: VLMCollator(tiny_processor().tokenizer),
}


def test_each_setting_that_decides_lengths_changes_the_key() -> None:
    keys = {name: settings_key(make()) for name, make in SETTINGS.items()}
    keys |= {"base": settings_key(COLLATOR), "marks": settings_key(COLLATOR, has_marks=True)}
    assert len(set(keys.values())) == len(SETTINGS) + 2


def test_settings_that_do_not_decide_lengths_are_no_part_of_the_key(tmp_path: Path) -> None:
    other = VLMCollator(tiny_processor(), layout="packed", on_bad="skip", skip_log=tmp_path / "bad.jsonl")
    other.processor.tokenizer("some text", truncation=True, max_length=1)  # which the tokenizer remembers
    assert settings_key(other) == settings_key(COLLATOR)


# ---------------------------------------------------------------------- the digest of a sample

READ = chat("Total?", "75,000", picture(40, 30, seed=1), id="a", chat_template_kwargs={"think": True})
IDS = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}
VIDEO = chat("?", "a", video=[picture(40, 30, seed=n) for n in range(2)])
OTHERS: dict[str, Any] = {
    "question": {**READ, "messages": chat("Totals?", "75,000", picture(40, 30))["messages"]},
    "answer": {**READ, "messages": chat("Total?", "75,001", picture(40, 30))["messages"]},
    "id": {**READ, "id": "b"},
    "pixels": {**READ, "images": [picture(40, 30, seed=2)]},
    "file": {**READ, "images": [encoded(40, 30, seed=1)]},
    "keys": {**READ, "images": [{"image": picture(40, 30, seed=1), "max_pixels": 5000}]},
    "template options": {**READ, "chat_template_kwargs": {"think": False}},
    "video": VIDEO,
    "frames swapped": {**VIDEO, "video": VIDEO["video"][::-1]},
    "ids": IDS,
    "labels": {**IDS, "labels": [-100, -100, 7]},
    "an array": {**IDS, "input_ids": np.array([5, 6, 7])},
    "other numbers": {**IDS, "input_ids": np.array([5, 7, 6])},
    "tensor": {**IDS, "pixel_values": torch.ones(2, 3)},
    "bfloat16": {**IDS, "pixel_values": torch.ones(2, 3, dtype=torch.bfloat16)},
    "no sample": None,
    "a refusal": SampleError("no", index=0, reason="bad_line"),
    "another refusal": SampleError("no", index=0, reason="bad_row"),
    "nested": {"messages": [[[["deep"]]]]},
    "nested otherwise": {"messages": [[["deep"]]]},
    "missing image": {**READ, "images": [Path("none.png")]},
}


def test_whatever_is_read_of_a_sample_changes_its_digest() -> None:
    found = {name: digest(sample) for name, sample in {"base": READ, **OTHERS}.items()}
    assert len(set(found.values())) == len(OTHERS) + 1
    assert {len(each) for each in found.values()} == {32}
    assert digest(copy.deepcopy(READ)) == found["base"]
    assert digest({**READ, "difficulty": 3}) == found["base"]  # which nothing reads
    endless: list[Any] = []
    endless.append(endless)
    assert digest({"messages": endless}) != digest({"messages": []})


def test_a_file_counts_by_its_bytes_wherever_they_are(tmp_path: Path) -> None:
    data = encoded(40, 30)
    (tmp_path / "a.jpg").write_bytes(data)
    sources = [data, {"bytes": data, "path": None}, tmp_path / "a.jpg", str(tmp_path / "a.jpg")]
    assert len({digest(chat("?", "a", source)) for source in sources}) == 1
    clip, path = clip_bytes(), tmp_path / "clip.mp4"
    path.write_bytes(clip)
    videos = [clip, {"path": str(path), "bytes": None}, clip_bytes(num_frames=21)]
    one, two, other = (digest(asked({"type": "video", "video": video})) for video in videos)
    assert one == two != other
