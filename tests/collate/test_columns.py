"""What a sample is told whose columns are not those that are read: what it has, and which remedy is its own."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from chats import chat, picture, processor_of, says
from fixtures.processors import tiny_processor
from PIL import Image

from vlmpack.collate import VLMCollator
from vlmpack.data.messages import check_unread, read_conversation
from vlmpack.errors import SampleError

DROPPED = "set TrainingArguments(remove_unused_columns=False)"


@pytest.mark.parametrize(
    ("feature", "remedy"),
    [
        ({}, DROPPED),
        ({"images": [0], "id": 5}, "TRL's trainers keep only messages, prompt, completion, image and images"),
        ({"image_id": 5}, DROPPED),
        ({"labels": [1]}, DROPPED),
        ({"prompt": "a", "completon": "b"}, "'completon': did you mean 'completion'? Rename the column"),
        ({"Message": []}, "'Message': did you mean 'messages'?"),
        ({"prompt": "a"}, "A prompt needs its completion: give both"),
        ({"ask": "a", "reply": "b"}, "Rename the column with the conversation to messages, or make messages of your"),
        ({f"c{i}": "x" for i in range(10, 30)}, "it has: c10, c11, c12, c13, c14, c15, c16, c17, c18, c19, c20, c21"),
    ],
)  # fmt: skip
def test_a_sample_without_text_is_told_its_own_remedy(feature: dict[str, Any], remedy: str) -> None:
    with pytest.raises(SampleError) as caught:
        read_conversation(feature)
    said = str(caught.value)
    assert caught.value.reason == "no_columns"
    assert "of the columns input_ids, messages, conversations, conversation, prompt (with completion); it has" in said
    assert remedy in said
    assert (DROPPED in said) == (DROPPED in remedy or "TRL" in remedy)


JPG, WAV = "a.jpg", "a.wav"
REFUSED = {
    **{f"a column {name}": {name: JPG} for name in ("image_path", "img", "IMAGE_URL", "photos")},
    "addresses": {"picture": ["https://a/b"]},
    "a stored image": {"video_path": {"bytes": b"1", "path": None}},
    **{f"files in {name}": {name: ["images/0001.JPG"]} for name in ("file_name", "path", "frames")},
    "pictures": {"anything": [picture()]},
    "an encoded image": {"screenshot": b"\xff\xd8\xff\xe0"},
    "several": {"screenshot": [b"\x89PNG"]},
    "a data URL": {"screenshot": "data:image/png;base64,aa"},
    **{f"audio in {name}": {name: WAV} for name in ("audio_path", "sound", "speech_file", "file_name")},
}


@pytest.mark.parametrize("more", REFUSED.values(), ids=REFUSED)
def test_a_column_that_looks_like_the_only_medium_is_not_left_out_in_silence(more: dict[str, Any]) -> None:
    (name,) = more
    with pytest.raises(
        SampleError, match=f"it has a column {name}, which looks like its image, video or aud"
    ) as caught:
        check_unread(chat(**more), has_media=False)
    assert caught.value.reason == "unread_column"
    assert check_unread(chat(**more), has_media=True) == (name,)


@pytest.mark.parametrize("name", ["image_id", "num_images", "image_width", "topic"])
def test_a_note_about_an_image_is_none(name: str) -> None:
    notes = {name: "a.jpg", "img": None, "pics": [], "file_name": "main.py"}
    assert check_unread(chat(**notes), has_media=False) == (name, "file_name")


WEIGHING = (
    *({"rejected_response": "no"}, {"chosen": [says("yes")]}, {"rejected_images": ["a.jpg"]}, {"label": False}),
    *({"loss_scale": [1.0, 0.5]}, {"sample_weight": np.array([0.0, 1.0])}),
)
NOTES = ({"label": 3}, {"loss_scale": 1.0}, {"loss_scale": [1, 1]}, {"weight": 80})


@pytest.mark.parametrize("more", [*WEIGHING, *NOTES], ids=str)
def test_preferences_and_weights_are_not_left_out_in_silence(more: dict[str, Any]) -> None:
    (name,) = more
    if more in NOTES:
        assert check_unread(chat(**more), has_media=True) == (name,)
        return
    with pytest.raises(SampleError, match=f"it has a column {name}, which weights samples or") as caught:
        check_unread(chat(**more), has_media=True)
    assert caught.value.reason == "unread_column"


BOXES = {"ref": ["a dog"], "bbox": [[20, 30, 10, 15], [40, 60]]}
SHARES = {**BOXES, "bbox": [[0.125, 0.25, 0.25, 0.5], [0.5, 1]], "bbox_type": "norm1", "image_id": [0, 0]}
THOUSANDTHS = "<|box_start|>(125,250),(250,500)<|box_end|> and <|box_start|>(500,1000)<|box_end|>"
RESIZED = "<|box_start|>(14,21),(28,42)<|box_end|> and <|box_start|>(56,84)<|box_end|>"
ASKED = chat("Where is <ref-object>?", "<bbox> and <bbox>", Image.new("RGB", (80, 60)))


@pytest.mark.parametrize("objects", [BOXES, SHARES], ids=["pixels", "shares"])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "qwen2_5_vl"])
def test_names_and_boxes_of_ms_swift_are_written_as_the_model_takes_them(family: str, objects: dict[str, Any]) -> None:
    collator = VLMCollator(tiny_processor(family, min_pixels=112 * 84, max_pixels=112 * 84))
    written = "".join(text for text, _ in collator.text_parts({**ASKED, "objects": objects}))
    assert "Where is <|object_ref_start|>a dog<|object_ref_end|>?" in written
    assert f"{RESIZED if family == 'qwen2_5_vl' else THOUSANDTHS}<|im_end|>" in written
    as_json = chat("Find all.", '{"bbox_2d": <bbox>, "label": "<ref-object>"} <bbox>', Image.new("RGB", (80, 60)))
    written = "".join(text for text, _ in collator.text_parts({**as_json, "objects": objects}))
    corners = "[14, 21, 28, 42]" if family == "qwen2_5_vl" else "[125, 250, 250, 500]"
    assert f'{{"bbox_2d": {corners}, "label": "a dog"}} [' in written


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("qwen3_vl", {"bbox": [[1, 2]]}, "hold '<bbox>' 2 time(s), and its objects fill 1"),
        ("qwen3_vl", {"ref": ["<|im_end|>"]}, "its text holds '<|im_end|>'"),
        ("qwen3_vl", {"image_id": [0, 1]}, "have a bbox in image 1, but it has 1 image(s)"),
        ("qwen3_vl", {"image_id": [0]}, "it must hold ref (texts), bbox"),
        ("qwen3_vl", {"bbox": [[1, 2], [0, 0, 90, 9]]}, "[0.0, 0.0, 90.0, 9.0] (real) in image 0 of 80 x 60 (width"),
        ("qwen3_vl", {"bbox": [[1, 2], [0, 0, 9]]}, "bbox (x, y or x1, y1, x2, y2 each)"),
        ("internvl", {}, "how models with a InternVLProcessor write"),
    ],
)  # fmt: skip
def test_objects_that_cannot_be_written_are_refused(family: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SampleError, match=re.escape(said)):
        VLMCollator(tiny_processor(family)).measure({**ASKED, "objects": {**BOXES, **changes}})


def test_objects_without_places_in_the_text_are_named_as_unread() -> None:
    assert read_conversation(chat(objects=BOXES)).unread == ("objects",)
    assert read_conversation(chat(objects={"ref": [], "bbox": []})).unread == ()
    assert read_conversation(chat("At <bbox>?")).objects is None


def test_other_columns_are_named_once() -> None:
    collator = VLMCollator(processor_of(), on_bad="skip")
    rows = [chat(topic="a", note="b", source="c", id=7), chat(topic="d", prompt="What?"), chat(mood=None)]
    rows.append(chat("<image>?", "5", {"image": picture(), "caption": "a cat", "text": None, "min_pixels": 4096}))
    with pytest.warns(UserWarning) as warned:
        collator(rows)
    assert "nothing reads: topic, note" in str(warned[0].message)
    collator(rows)
    assert collator.skip_log.unread == ("topic", "note", "prompt", "caption beside images")
    assert collator.skip_log.refused == 0


def test_a_collator_refuses_what_is_left_out_of_any_kind_of_sample() -> None:
    tokens = {"input_ids": [1, 2, 3], "labels": [1, 2, 3]}
    rows = [chat(img="a.png"), {"prompt": "a", "completion": "b", "chosen": "c"}, {**tokens, "rejected_ids": [4]}]
    collator = VLMCollator(processor_of(), on_bad="skip")
    collator(rows)
    assert collator.skip_log.reasons == {"unread_column": 3}
