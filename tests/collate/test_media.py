"""Outlines: what headers tell of images and videos is what the processor makes of them; patches are cut later."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chats import chat, picture, processor_of, says, user
from PIL import Image
from stores import encoded
from transformers import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from vlmpack.collate import VLMCollator
from vlmpack.collate.encode import Encoder
from vlmpack.collate.encoded import Encoded, Visual
from vlmpack.collate.media import MediaReader
from vlmpack.collate.processor_metadata import read_processor
from vlmpack.data.images import ImageLimits
from vlmpack.data.messages import MediaRef
from vlmpack.errors import ConfigError, SampleError
from vlmpack.testing import tiny_processor

HOLE = "<|vision_start|><|image_pad|><|vision_end|>"
SETTINGS = (("qwen2_vl", 4, 16), ("qwen2_5_vl", 4, 2000), ("qwen3_vl", 1, 5), ("qwen3_5", 20, 24))
"""Family, and the fewest and most tokens of an image."""
SIZES = 100
"""Of each of them."""


def reader_of(processor: Any, limits: ImageLimits | None = None) -> MediaReader:
    return Encoder(
        processor=processor, metadata=read_processor(processor), limits=limits or ImageLimits(), train_on="all"
    ).media


def measured(reader: MediaReader, source: Any, kind: Any = "image", **options: Any) -> Visual:
    (visual,) = reader.measure_each([MediaRef(source=source, options=options, kind=kind)])
    return visual


def cut(reader: MediaReader, source: Any, kind: Any = "image", **options: Any) -> Visual:
    (visual,) = reader.load_each([MediaRef(source=source, options=options, kind=kind)])
    return visual


def random_sizes(count: int, unit: int, seed: int) -> list[tuple[int, int]]:
    """Widths and heights: tiny, thin (up to 200 : 1), on the edges where rounding turns, and any others."""
    random = np.random.default_rng(seed)
    sizes = []
    while len(sizes) < count:
        area, ratio = math.exp(random.uniform(0, math.log(60_000))), math.exp(random.uniform(0, math.log(200)))
        sides = [max(1, round(math.sqrt(area * ratio))), max(1, round(math.sqrt(area / ratio)))]
        if len(sizes) % 5 == 0:
            sides = [max(1, round(side / unit * 2)) * unit // 2 for side in sides]
        width, height = sides if random.random() < 0.5 else sides[::-1]
        if max(sides) <= 200 * min(sides):
            sizes.append((width, height))
    return sizes


def check_equal(ours: Any, truth: Any) -> None:
    """Two batches are the same, to the last bit of the last pixel."""
    ours, truth = ours.to_hf(), truth.to_hf()
    assert ours.keys() == truth.keys()
    for name, value in truth.items():
        same = torch.equal(ours[name], value) if isinstance(value, torch.Tensor) else ours[name] == value
        assert same, name


# ---------------------------------------------------------------------- headers tell the processor's own sizes


@pytest.mark.parametrize(("family", "fewest", "most"), SETTINGS)
def test_image_tokens_are_those_of_the_processor_on_random_sizes(family: str, fewest: int, most: int) -> None:
    unit = (28 if family.startswith("qwen2") else 32) ** 2
    processor = tiny_processor(family, min_pixels=fewest * unit, max_pixels=most * unit)
    reader, grids = reader_of(processor), set()
    for size in random_sizes(SIZES, math.isqrt(unit), seed=most):
        image = Image.new("RGB", size)
        out = processor(images=[image], text=HOLE, return_tensors="pt")
        grid = measured(reader, image).grid
        assert grid == tuple(out["image_grid_thw"][0].tolist()), size
        assert math.prod(grid) // 4 == int((out["input_ids"] == processor.image_token_id).sum()), size
        grids.add(grid)
    assert len(grids) > 4
    assert {min(grid[1:]) for grid in grids} >= {2}


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_an_image_sized_by_keys_is_measured_as_it_is_cut(family: str) -> None:
    reader, random, grids = reader_of(processor_of(family)), np.random.default_rng(0), set()
    for width, height in random_sizes(60, 32, seed=1):
        keys: dict[str, Any] = {
            "min_pixels": int(random.integers(1, 9000)),
            "max_pixels": int(random.integers(9000, 50_000)),
        }
        if random.random() < 0.3:
            keys = {"resized_height": int(random.integers(1, 200)), "resized_width": int(random.integers(30, 200))}
        image = Image.new("RGB", (width, height))
        try:
            expected = cut(reader, image, **keys).grid
        except SampleError as refusal:
            with pytest.raises(SampleError) as caught:
                measured(reader, image, **keys)
            assert (caught.value.reason, caught.value.detail) == (refusal.reason, refusal.detail)
            continue
        assert measured(reader, image, **keys).grid == expected
        grids.add(expected)
    assert len(grids) > 10


@pytest.mark.parametrize(("width", "height", "fits"), [(64, 96, True), (65, 64, False), (48, 48, False)])
def test_a_processor_that_does_not_resize_takes_only_what_it_can_cut(width: int, height: int, fits: bool) -> None:
    processor = tiny_processor()
    processor.image_processor.do_resize = False
    reader, image = reader_of(processor), picture(width, height)
    if fits:
        assert measured(reader, image).grid == cut(reader, image).grid == (1, height // 16, width // 16)
        return
    for read in (measured, cut):
        with pytest.raises(SampleError) as caught:
            read(reader, image)
        assert caught.value.reason == "image_processing"


# ---------------------------------------------------------------------- a processor with a rule of its own


class ShrinksOtherwise(Qwen2VLImageProcessorPil):
    """Keeps to the rule but for images that are too large, which it brings to one token."""

    def resize(self, image: Any, size: Any, resample: Any, factor: int, **kwargs: Any) -> Any:
        if image.shape[-1] * image.shape[-2] > size.longest_edge:
            return np.zeros((3, factor, factor), image.dtype)
        return super().resize(image, size=size, resample=resample, factor=factor, **kwargs)


def test_a_processor_with_a_rule_of_its_own_is_not_trusted() -> None:
    processor = tiny_processor()
    processor.image_processor = ShrinksOtherwise(patch_size=16, max_pixels=10**6)
    collator = VLMCollator(processor)
    with pytest.raises(ConfigError, match=r"ShrinksOtherwise.*where Qwen's rule gives"):
        collator.measure(chat("?", "a", picture()))
    assert collator.measure(chat("?", "a")).num_tokens


@pytest.mark.filterwarnings("ignore:Passing .min_pixels. and .max_pixels.:FutureWarning")
@pytest.mark.parametrize("bounds", [{"max_pixels": 9 * 1024}, {"min_pixels": 25 * 1024, "max_pixels": 49 * 1024}])
def test_bounds_that_are_set_on_the_processor_later_hold_for_measuring_too(bounds: dict[str, int]) -> None:
    processor = tiny_processor()
    for key, value in bounds.items():
        setattr(processor.image_processor, key, value)
    collator = VLMCollator(processor)
    for size in ((400, 300), (61, 40)):
        plain = processor.image_processor(images=[picture(*size)], return_tensors="pt")["image_grid_thw"]
        (image,) = collator.measure(chat("?", "a", picture(*size))).images
        assert image.grid == tuple(plain[0].tolist())
    if len(bounds) == 2:  # transformers before 5.23 takes them together only
        assert 25 <= math.prod(image.grid) // 4 <= 49


def asked_of_frames(**keys: Any) -> dict[str, Any]:
    return {"messages": [user("<video>?"), says("a")], "videos": [{"video": [picture(64, 64)] * 4, **keys}]}


@pytest.mark.parametrize(
    ("keys", "indices", "fps"),
    [
        ({"fps": 4.0}, [0, 1, 2, 3], 4.0),
        ({"sample_fps": 4, "nframes": None, "video_start": None}, [0, 1, 2, 3], 4.0),
        ({"fps": 30.0, "frames_indices": [0, 30, 90, 300]}, [0, 30, 90, 300], 30.0),
        ({"timestamps": [0.5, 4, 9, 20]}, [1, 8, 18, 40], 2.0),
    ],
)
def test_times_of_frames_are_those_of_qwen3s_processor(keys: dict[str, Any], indices: list[int], fps: float) -> None:
    expected = Qwen3VLProcessor._calculate_timestamps(None, indices, fps, 2)  # pyright: ignore[reportArgumentType]
    collator = VLMCollator(tiny_processor())
    video = collator.measure(asked_of_frames(**keys)).videos[0]
    assert list(video.timestamps) == expected
    text = collator.processor.tokenizer.decode(collator([asked_of_frames(**keys)])["input_ids"][0])
    assert all(f"<{time:.1f} seconds>" in text for time in expected)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"fps": 1, "timestamps": [0, 1, 2, 3]}, "timestamps and fps beside its frames: give"),
        ({"frames_indices": [0, 1, 2, 3]}, "frames_indices beside its frames: give timestamps, or fps and"),
        ({"timestamps": [0, 1]}, r"timestamps=\[0, 1\] must be a rising list of numbers, one for each of its 4"),
        ({"timestamps": [0, 2, 1, 3]}, "must be a rising list"),
        ({"fps": 0}, "fps=0 frames per second has no meaning"),
        *(({key: 2}, f"video 0: {key}=2 .*is not read: .* leave it") for key in ("nframes", "video_start")),
        ({"total_num_frames": 9}, "video 0: total_num_frames=9 .*is not read: .* leave it"),
    ],
)
def test_keys_that_say_nothing_of_when_frames_are_are_refused(keys: dict[str, Any], expected: str) -> None:
    collator = VLMCollator(processor_of())
    for read in (collator.measure, lambda feature: collator.collate([feature])):
        with pytest.raises(SampleError, match=expected) as seen:
            read(asked_of_frames(**keys))
        assert seen.value.reason == "vision_key"


# ---------------------------------------------------------------------- decode(outline) is collate


# ---------------------------------------------------------------------- what only pixels tell


def changed(tmp_path: Path, collator: VLMCollator) -> Encoded:
    """The outline of a sample whose image is replaced afterwards."""
    path = tmp_path / "image.png"
    picture(90, 60).save(path)
    outline = collator.measure(chat("?", "a", path, id="r17"))
    picture(200, 60).save(path)
    return outline


def damaged() -> bytes:
    whole = encoded(picture(90, 60))
    return whole[: len(whole) // 2]


def test_an_image_keeps_its_number_when_truncation_removes_those_before_it(tmp_path: Path) -> None:
    sources = [picture(90, 60), tmp_path / "second.png"]
    picture(90, 60).save(sources[1])
    turns = chat("first?", "one", *sources[:1])["messages"] + chat("second?", "two", *sources[1:])["messages"]
    collator = VLMCollator(processor_of(), max_length=25, overlength="truncate_start")
    outline = collator.measure({"messages": turns, "images": sources})
    assert len(outline.images) == 1
    picture(200, 60).save(sources[1])
    with pytest.raises(SampleError, match=r"image 1 was measured as 1 x 4 x 6"):
        collator.decode([outline])
    sources[1].write_bytes(damaged())
    with pytest.raises(SampleError, match=r"image 1 \(.*second\.png\): .* are damaged or cut short"):
        collator.decode([outline])
    sources[1].unlink()
    with pytest.raises(SampleError, match=r"image 1: there is no image file"):
        collator.decode([outline])


def test_damage_behind_a_header_is_found_when_it_is_cut_and_counted(tmp_path: Path) -> None:
    skip_log = tmp_path / "bad.jsonl"
    collator = VLMCollator(processor_of(), layout="packed", on_bad="skip", skip_log=skip_log)
    sound = [chat("Total?", "75,000", picture(90, 61, seed=1), id="a"), chat("2 + 2?", "4", id="c")]
    outlines = [collator.measure(sample) for sample in (sound[0], chat("?", "b", damaged(), id="b"), sound[1])]
    outlines.append(changed(tmp_path, collator))
    assert collator.skip_log.received == 0
    row = collator.decode(outlines)
    assert row.metadata.sample_ids == ("a", "c")
    assert dict(collator.skip_log.reasons) == {"image_undecodable": 1, "image_changed": 1}
    assert (collator.skip_log.received, collator.skip_log.used) == (4, 2)
    assert '"id": "b"' in skip_log.read_text()
    check_equal(row, VLMCollator(processor_of(), layout="packed").collate(sound))


def test_media_that_were_cut_off_are_not_looked_at_again() -> None:
    turns = chat("first?", "one", picture())["messages"] + chat("second?", "two", picture())["messages"]
    sample = {"messages": turns, "images": [picture(90, 60), damaged()]}
    collator = VLMCollator(processor_of(), max_length=30, overlength="truncate")
    assert collator.decode([collator.measure(sample)]).metadata.num_targets
    with pytest.raises(SampleError, match="damaged"):
        collator.collate([sample])


# ---------------------------------------------------------------------- refusals


REFUSED = {
    "bad_row": 7,
    "no_targets": {"messages": [user("?")]},
    "image_undecodable": chat("?", "a", b"no image"),
    "image_aspect_ratio": chat("?", "a", Image.new("RGB", (2001, 10))),
    "vision_key": chat("?", "a", {"image": picture(), "resized_height": 3}),
    "overlength": chat("word " * 100, "a"),
    "video_missing": chat("?", "a", video="film.mp4"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_collate_refuses_an_outline_refuses_with_the_same_words(reason: str) -> None:
    collator = VLMCollator(processor_of(), max_length=60, on_bad="skip")
    with pytest.raises(SampleError) as ours:
        collator.measure(REFUSED[reason], 0)
    with pytest.raises(SampleError) as truth:
        VLMCollator(processor_of(), max_length=60).collate([REFUSED[reason]])
    assert (ours.value.reason, str(ours.value)) == (reason, str(truth.value))
    assert collator.skip_log.received == 0


# ---------------------------------------------------------------------- text models


@pytest.mark.parametrize("medium", [{"images": [picture()]}, {"video": [picture()]}])
def test_a_tokenizer_alone_refuses_what_it_cannot_see(medium: dict[str, Any]) -> None:
    processor = tiny_processor()
    processor.tokenizer.chat_template = processor.chat_template
    collator = VLMCollator(processor.tokenizer)
    for read in (collator.measure, lambda sample: collator.collate([sample])):
        with pytest.raises(SampleError, match="a tokenizer reads text only") as caught:
            read({**chat("?", "a"), **medium})
        assert caught.value.reason == "no_vision"


# ---------------------------------------------------------------------- what is not made


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pixels of each picture that is resized."""
    sizes: list[int] = []
    resize = Image.Image.resize

    def counted(image: Image.Image, size: tuple[int, int], *rest: Any, **more: Any) -> Image.Image:
        sizes.append(size[0] * size[1])
        return resize(image, size, *rest, **more)

    monkeypatch.setattr(Image.Image, "resize", counted)
    return sizes


def keyed(kind: str, frames: int = 3, **keys: Any) -> dict[str, Any]:
    """A part with an image or video of 64 x 64 pixels."""
    return {"type": kind, kind: picture(64, 64) if kind == "image" else [picture(64, 64)] * frames, **keys}


def shown(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [user("?"), says("5"), user(list(parts)), says("5")]}


BETWEEN = {"min_pixels": 1e8, "max_pixels": 2e8}


@pytest.mark.parametrize(
    ("kind", "keys"),
    [("image", BETWEEN), ("video", BETWEEN), ("video", {"resized_height": 10_000, "resized_width": 10_000})],
)
def test_a_small_picture_that_asks_to_be_huge_is_refused_before_it_is_made(
    kind: str, keys: dict[str, Any], made: list[int]
) -> None:
    collator = VLMCollator(processor_of())
    for use in (collator.measure, lambda row: collator([row])):  # in this order: what is measured is not made
        with pytest.raises(SampleError, match="the keys beside it enlarge it from 64 x 64 to") as caught:
            use(shown(keyed(kind, **keys)))
        assert caught.value.reason == "vision_key"
    assert made == []


@pytest.mark.parametrize("kind", ["image", "video"])
def test_media_beyond_max_length_by_their_size_alone_are_not_made(kind: str, made: list[int]) -> None:
    row = shown(keyed(kind, resized_height=640, resized_width=640))  # 400 tokens, 800 as a video
    for overlength in ("drop", "error"):
        collator = VLMCollator(processor_of(), max_length=300, overlength=overlength, on_bad="skip")
        collator([row])
        assert dict(collator.skip_log.reasons) == {"overlength": 1}
    assert 640 * 640 not in made


def test_truncating_leaves_out_unmade_what_no_cut_could_keep(made: list[int]) -> None:
    small, large = (keyed("image", resized_height=side, resized_width=side) for side in (64, 640))
    collator = VLMCollator(processor_of(), max_length=60, overlength="truncate")
    batch = collator.collate([shown(small, large, small)])
    outlined = collator.decode([collator.measure(shown(small, large, small), 0)])
    assert batch.metadata.media.images[0].grid == (1, 4, 4)
    assert torch.equal(batch.input_ids, outlined.input_ids)
    assert torch.equal(batch.media.pixel_values, outlined.media.pixel_values)
    assert made.count(64 * 64) == 2
    assert 640 * 640 not in made
