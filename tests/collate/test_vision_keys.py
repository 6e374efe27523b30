"""The message keys of qwen-vl-utils: the same sizes as the real package gives, key by key, and clear errors."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from cases import slow

from vlmpack.collate.video import check_enlarged, has_keys, image_size, number, video_frame_size
from vlmpack.errors import SampleError

needs_qwen = pytest.mark.skipif(
    importlib.util.find_spec("qwen_vl_utils") is None,
    reason="waits for qwen-vl-utils (pip install vlmpack[qwen]); torchvision is not needed",
)
REFERENCE = Path(__file__).with_name("qwen_reference.py")


def qwen_sizes(cases: list[dict]) -> list:
    """[height, width] of each case by the real package, or the name of its error."""
    run = subprocess.run(
        [sys.executable, str(REFERENCE), "sizes"], input=json.dumps(cases), capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def our_size(case: dict) -> list:
    size, settings = (case["height"], case["width"]), {"factor": 2 * case["patch_size"]}
    try:
        if "num_frames" in case:
            return list(video_frame_size(case["element"], size, num_frames=case["num_frames"], **settings))
        return list(image_size(case["element"], size, **settings))
    except SampleError as error:
        return [error.reason]


def random_shape(rng: random.Random, largest: int) -> dict:
    """Ordinary shapes, tiny ones, and ones on both sides of the aspect ratio of 200."""
    most = rng.choice([largest, 60])
    height, width = rng.randint(1, most), rng.randint(1, most)
    if rng.random() < 0.4:
        height = rng.randint(1, max(1, largest // 200))
        width = max(1, round(height * rng.uniform(20, 210)))
    return dict(zip(("height", "width"), rng.sample([height, width], 2), strict=True))


def random_keys(rng: random.Random, token: int) -> dict:
    keys = {}
    if rng.random() < 0.5:
        keys["min_pixels"] = rng.choice([1, 4, 5.5, 16, 256]) * token
    if rng.random() < 0.5:
        keys["max_pixels"] = rng.choice([1, 7, 64, 400.3, 2000]) * token
    if rng.random() < 0.2:
        keys["resized_height"], keys["resized_width"] = rng.randint(1, 900), rng.randint(1, 900)
    return keys


def image_case(rng: random.Random) -> dict:
    patch = rng.choice([14, 16])
    keys = random_keys(rng, (2 * patch) ** 2) if rng.random() < 0.8 else {}
    return {"element": keys, "patch_size": patch, **random_shape(rng, 4000)}


def video_case(rng: random.Random) -> dict:
    patch = rng.choice([14, 16])
    keys = random_keys(rng, (2 * patch) ** 2 * rng.choice([1, 4])) if rng.random() < 0.8 else {}
    if rng.random() < 0.5:
        keys["total_pixels"] = rng.choice([1, 100, 3000.5, 20480]) * (2 * patch) ** 2
    for key in ("fps", "nframes", "sample_fps", "raw_fps", "min_frames", "max_frames"):
        if rng.random() < 0.1:
            keys[key] = rng.randint(1, 30)
    frames = rng.randint(250, 900) if rng.random() < 0.05 else rng.randint(1, 40)
    return {"element": keys, "patch_size": patch, "num_frames": frames, **random_shape(rng, 800)}


# ---------------------------------------------------------------- against the real package


@needs_qwen
@pytest.mark.parametrize("count", slow(150))
def test_random_shapes_get_the_sizes_of_qwen_vl_utils(count):
    rng, sizes = random.Random(11), {"images": 0, "videos": 0}
    cases = [make(rng) for make in (image_case, video_case) for _ in range(count)]
    for case, answer in zip(cases, qwen_sizes(cases), strict=True):
        ours = our_size(case)
        if isinstance(answer, str):
            assert len(ours) == 1, f"{case}: qwen_vl_utils raises {answer}, ours gives {ours}"
        else:
            assert ours == answer, case
            sizes["videos" if "num_frames" in case else "images"] += 1
    assert all(count / 2 < number < count * 0.95 for number in sizes.values()), sizes


# ---------------------------------------------------------------- by hand


def test_none_is_absent_and_text_is_a_number():
    absent = {"min_pixels": None, "max_pixels": None, "resized_height": None, "resized_width": None}
    assert image_size(absent, (100, 200), factor=28) == image_size({}, (100, 200), factor=28)
    assert not has_keys(absent)
    assert has_keys({"max_pixels": 1})
    assert number({"sample_fps": "1.5"}, "sample_fps", 2.0) == 1.5


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("value", ["many", -1, float("nan"), float("inf"), True, [3], "nan", 10**400])
def test_a_key_must_be_a_number(value):
    with pytest.raises(SampleError, match=r"max_pixels=.* must be a number, finite and not negative") as caught:
        image_size({"max_pixels": value}, (9, 9), factor=28)
    assert caught.value.reason == "vision_key"


@pytest.mark.parametrize(
    ("keys", "shape", "seen"),
    [
        ({"resized_height": 280}, (100, 100), "give both or none"),
        ({"resized_width": 280}, (100, 100), "give both or none"),
        ({"max_pixels": 100}, (100, 100), "max_pixels=100 is below min_pixels=3136 .*set both"),
        ({"max_pixels": 5000}, (1, 199), "1 x 199 pixels .* would leave a side of 0; raise max_pixels"),
        ({}, (3, 700), r"3 x 700 pixels \(height x width\), an aspect ratio of 233.3, more than 200"),
        ({}, (0, 4), "there is nothing in it"),
        ({}, (4, 0), "there is nothing in it"),
    ],
)
def test_a_size_that_cannot_be_made_is_refused_with_what_is_wrong(keys, shape, seen):
    with pytest.raises(SampleError, match=seen):
        image_size(keys, shape, factor=28)


@pytest.mark.parametrize(
    ("made", "given", "num_frames"),
    [
        ((128 * 28, 128 * 28), (1, 1), 1),  # 16,384 tokens
        ((300 * 28, 300 * 28), (300 * 28 - 27, 300 * 28 - 27), 1),  # its own size, rounded
        ((64 * 28, 64 * 28), (9, 9), 16),  # a sixteenth of 65,536
        ((24 * 28, 32 * 28), (9, 9), 10_000),  # 768 tokens, as many as a frame has without keys
    ],
)
def test_a_picture_may_be_enlarged_as_far_as_the_rule_makes_any(made, given, num_frames):
    check_enlarged(made, source=given, factor=28, num_frames=num_frames)
    wider = made[0], made[1] + 28
    with pytest.raises(SampleError, match=r"enlarge it from \d+ x \d+ to \d+ x \d+ pixels .* lower") as caught:
        check_enlarged(wider, source=given, factor=28, num_frames=num_frames)
    assert caught.value.reason == "vision_key"
