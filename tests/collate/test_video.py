"""Frames to patches: equal to the still image, to a plain loop, to qwen-vl-utils and to transformers' times."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from vlmpack.collate.video import VideoReader, patchify, read_frames
from vlmpack.data.images import load_image
from vlmpack.errors import SampleError

needs_qwen = pytest.mark.skipif(
    importlib.util.find_spec("qwen_vl_utils") is None,
    reason="waits for qwen-vl-utils (pip install vlmpack[qwen]); torchvision is not needed",
)
REFERENCE = Path(__file__).with_name("qwen_reference.py")


def image_processor(**options):
    return transformers.Qwen2VLImageProcessorPil(**{"patch_size": 14, "max_pixels": 16384 * 784, **options})


def reader_of(part):
    parts = SimpleNamespace(tokenizer=None, image_processor=part, get_attributes=list)
    return VideoReader(processor=parts, metadata=SimpleNamespace(frame_timestamps=True, by_processor=False))


def noise_frames(count: int, height: int = 112, width: int = 168, seed: int = 0) -> list[Image.Image]:
    pixels = np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), dtype=np.uint8)
    return [Image.fromarray(frame) for frame in pixels]


# ---------------------------------------------------------------- patches


@pytest.mark.parametrize("patch_size", [14, 16])
@pytest.mark.parametrize("count", [1, 2])
def test_a_still_video_equals_the_still_image_bit_for_bit(patch_size, count):
    processor = image_processor(patch_size=patch_size)
    frame = noise_frames(1, 4 * 2 * patch_size, 6 * 2 * patch_size)[0]
    still = processor([frame], return_tensors="pt")
    video = reader_of(processor).load({"video": [frame] * count, "min_pixels": 4 * 32 * 32 * 4})
    assert video.grid == tuple(still["image_grid_thw"][0].tolist())
    assert video.pixels.dtype == torch.float32
    assert torch.equal(video.pixels, still["pixel_values"])


@pytest.mark.parametrize("flags", [{"do_rescale": False}, {"do_normalize": False}])
def test_a_processor_that_leaves_out_a_step_is_followed(flags):
    processor = image_processor(**flags)
    frame = noise_frames(1)[0]
    pixels = torch.from_numpy(np.array(frame)).permute(2, 0, 1)[None]
    patches = patchify(pixels, processor)
    assert torch.equal(patches, processor([frame], return_tensors="pt")["pixel_values"].float())


# ---------------------------------------------------------------- sizes


@needs_qwen
@pytest.mark.slow
def test_pixels_rates_and_times_are_those_of_qwen_vl_utils(tmp_path):
    cases = [
        {"patch_size": 14, "element": {"video": noise_frames(4, 90, 130)}},
        {"patch_size": 14, "element": {"video": noise_frames(3, 61, 200), "max_pixels": 64 * 784 * 4, "sample_fps": 1}},
        {"patch_size": 16, "element": {"video": noise_frames(2, 64, 64), "resized_height": 90, "resized_width": 70}},
        {"patch_size": 16, "element": {"video": noise_frames(5), "total_pixels": 64 * 1024, "raw_fps": 30}},
    ]
    for case, answer in zip(cases, qwen_videos(cases, tmp_path), strict=True):
        part, count = image_processor(patch_size=case["patch_size"]), len(case["element"]["video"])
        video = reader_of(part).load(case["element"])
        patches = patchify(torch.from_numpy(answer["video"][:count]).byte(), part)
        assert torch.equal(video.pixels, patches)
        metadata = VideoMetadata(**answer["metadata"])
        assert video.grid[0] * 2 == len(answer["video"])
        assert video.seconds == 2 / answer["sample_fps"]
        assert video.seconds == pytest.approx(2 / metadata.sampled_fps)
        times = Qwen3VLProcessor._calculate_timestamps(None, list(metadata.frames_indices), metadata.fps, 2)
        assert list(video.timestamps) == times


def qwen_videos(cases: list[dict], folder: Path) -> list[dict]:
    """What the real `fetch_video` returns for each case."""
    (folder / "cases").write_bytes(pickle.dumps(cases))
    command = [sys.executable, str(REFERENCE), "pixels", str(folder / "cases"), str(folder / "answers")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return pickle.loads((folder / "answers").read_bytes())


# ---------------------------------------------------------------- times


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("video", ["film.mp4", b"mp4", None, 3, torch.zeros(2, 3, 4, 4)])
def test_what_is_no_list_of_frames_is_refused(video):
    with pytest.raises(SampleError, match=r"give its file .* or a list of its frames as images") as caught:
        read_frames(video, load_image)
    assert caught.value.reason == "video_source"
