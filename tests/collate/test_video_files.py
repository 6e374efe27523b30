"""Files of videos in samples: sampled, sized and cut as transformers' video processors do it, measured by headers."""

from __future__ import annotations

import ast
import math
import pickle
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases import slow_cases
from chats import chat, processor_of, says, text, user
from clips import CODECS, clip_bytes, write_clip
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vlmpack import VLMCollator
from vlmpack.collate import FrameSampling
from vlmpack.collate.video import VideoReader, sample_frames
from vlmpack.errors import ConfigError, SampleError
from vlmpack.lengths import measure_lengths

REFERENCE = Path(__file__).parents[1] / "transformers_videos.py"


@pytest.fixture(scope="module")
def clip() -> bytes:
    """20 frames at 10 per second."""
    return clip_bytes()


def asked(video: Any, **keys: Any) -> dict[str, Any]:
    return {"messages": [user([{"type": "video", "video": video, **keys}, text("What happens?")]), says("It counts.")]}


def collator_of(family: str = "qwen3_vl", **options: Any) -> VLMCollator:
    return VLMCollator(processor_of(family), layout="packed", **options)


def refusal(sample: dict[str, Any], **options: Any) -> SampleError:
    """By `measure` and by `collate` in the same words."""
    collator = collator_of(**options)
    with pytest.raises(SampleError) as by_header:
        collator.measure(sample, 0)
    with pytest.raises(SampleError) as by_pixels:
        collator.collate([sample])
    assert str(by_header.value) == str(by_pixels.value)
    return by_header.value


# ---------------------------------------------------------------- which frames


def transformers_rule(family: str) -> Any:
    """`sample_frames` of transformers' video processor, out of its source: importing the class needs torchvision."""
    spec = find_spec(f"transformers.models.{family}.video_processing_{family}")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    (rule,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "sample_frames"]
    for argument in [*rule.args.args, *rule.args.kwonlyargs]:
        argument.annotation = None
    rule.args.kwarg = ast.arg("_")
    names: dict[str, Any] = {"torch": torch, "np": np, "math": math}
    exec(compile(ast.unparse(rule), spec.origin, "exec"), names)
    return names["sample_frames"]


RULES = {"linspace": transformers_rule("qwen3_vl"), "arange": transformers_rule("qwen2_vl")}


@settings(deadline=None, max_examples=60)
@example(spacing="arange", total=90, rate=10.0, fps=1.0, num_frames=None, least=2, most=800)  # nine are no pairs
@given(
    spacing=st.sampled_from(sorted(RULES)),
    total=st.integers(2, 3000),
    rate=st.sampled_from([10.0, 23.976023976023978, 25.0, 29.97002997002997, 1 / 3, 240.0]),
    fps=st.sampled_from([0.5, 1.0, 2, 7.3, 100.0]),
    num_frames=st.none() | st.integers(2, 64),
    least=st.integers(2, 6),
    most=st.integers(8, 800),
)
def test_frames_are_those_that_transformers_takes(
    spacing: Any, total: int, rate: float, fps: float, num_frames: int | None, least: int, most: int
) -> None:
    metadata = SimpleNamespace(total_num_frames=total, fps=rate)
    numbers = {"fps": None if num_frames else fps, "num_frames": num_frames, "min_frames": least, "max_frames": most}
    holder = SimpleNamespace(temporal_patch_size=2, **numbers)
    sampling = FrameSampling(**numbers)
    try:
        frames = sample_frames(total, rate, sampling=sampling, spacing=spacing, depth=2)
    except SampleError as error:
        assert error.reason == "video_frames"
        return
    expected = RULES[spacing](holder, metadata, fps=holder.fps, num_frames=num_frames).tolist()
    count = len(frames)
    assert frames == expected[:count]
    assert expected[count:] in ([], [total])  # by its rounding arange may name a frame that is not there


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({"fps": 2, "nframes": 4}, "fps=2 and num_frames=4: only one can hold"),
        ({"fps": 0}, "fps=0 takes no frames"),
        ({"nframes": 2.5}, "nframes=2.5 must be a whole number"),
        ({"nframes": 1}, "num_frames"),
        ({"nframes": 21}, "21 frames are to be taken of 20"),
        ({"min_frames": 9, "max_frames": 4}, "max_frames"),
        ({"sample_fps": 2}, "sample_fps=2 beside it is not read: a file's frames"),
        ({"raw_fps": "30"}, "raw_fps='30' beside it is not read: a file's frames"),
        ({"video_start": 1.5, "video_end": 1.0}, "between video_start=1.5 and video_end=1 seconds lie fewer than 2"),
        ({"video_start": -1}, "video_start=-1 must be a number, finite and not negative"),
        ({"timestamps": [0.5, 4]}, "timestamps=[0.5, 4] beside it is not read: a file's frames have their times in it"),
        ({"frames_indices": [0, 30]}, "frames_indices=[0, 30] beside it is not read: a file's frames have their times"),
        ({"n_frames": 4}, "the key 'n_frames' beside an image or video is unknown; did you mean 'nframes'?"),
    ],
)
def test_keys_that_mean_nothing_are_refused_by_name(keys: dict[str, Any], fault: str, clip: bytes) -> None:
    error = refusal(asked(clip, **keys))
    assert error.reason in ("vision_key", "video_frames")
    assert fault in str(error)


def test_metadata_of_a_file_in_a_column_are_refused_by_name(clip: bytes) -> None:
    sample = {**chat("What happens?", "It counts."), "videos": [{"video": clip, "video_metadata": {"fps": 9}}]}
    assert "video_metadata={'fps': 9} beside it is not read: a file's frames have" in str(refusal(sample))


def test_a_video_of_one_frame_is_refused() -> None:
    error = refusal(asked(clip_bytes(num_frames=1)))
    assert error.reason == "video_frames"
    assert "give the frame as an image" in str(error)


@pytest.mark.parametrize(
    "wrong", [{"fps": 0.0}, {"num_frames": 4}, {"min_frames": 9, "max_frames": 3}, {"fps": math.inf}]
)
def test_settings_that_contradict_each_other_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        FrameSampling(**wrong)


# ---------------------------------------------------------------- the same as transformers

TRANSFORMERS: dict[str, dict[str, Any]] = {
    "Qwen3-VL as it is": {"is_per_clip": True, "settings": {}},
    "Qwen3-VL on the hub": {
        "is_per_clip": True,
        "settings": {"size": {"shortest_edge": 4096, "longest_edge": 25165824}, "cap_pixels_per_frame": True},
    },
    "Qwen3-VL, shrunk": {"is_per_clip": True, "settings": {"size": {"shortest_edge": 1024, "longest_edge": 20000}}},
    "Qwen3-VL, eight frames": {"is_per_clip": True, "settings": {"num_frames": 8, "fps": None}},
    "Qwen2-VL": {"is_per_clip": False, "settings": {"fps": 2.0}},
    "Qwen2-VL, capped": {
        "is_per_clip": False,
        "settings": {
            "fps": 4.0,
            "cap_pixels_per_frame": True,
            "max_video_tokens": 40,
            "size": {"shortest_edge": 784, "longest_edge": 9000},
        },
    },
}


@pytest.mark.slow
def test_pixels_grids_and_times_are_those_of_transformers_video_processors(tmp_path: Path) -> None:
    cases = []
    for name in CODECS:
        write_clip(tmp_path / name, num_frames=37, fps=12)
        if name.endswith((".mp4", ".mov", ".avi")):  # transformers counts frames by the header alone
            all_cases = [{**case, "path": str(tmp_path / name), "call": {}} for case in TRANSFORMERS.values()]
            cases += all_cases if name.endswith(".mp4") else all_cases[:1]
    (tmp_path / "cases").write_bytes(pickle.dumps(cases))
    command = [sys.executable, str(REFERENCE), str(tmp_path / "cases"), str(tmp_path / "answers")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    answers = pickle.loads((tmp_path / "answers").read_bytes())
    assert len(answers) == len(cases) == 8
    for case, expected in zip(cases, answers, strict=True):
        values = expected["settings"]
        processor = SimpleNamespace(
            tokenizer=None,
            image_processor=None,
            get_attributes=lambda: ["video_processor"],
            video_processor=SimpleNamespace(**{"fps": None, "num_frames": None, **values}),
        )
        metadata = SimpleNamespace(frame_timestamps=case["is_per_clip"], by_processor=False)
        reader = VideoReader(processor=processor, metadata=metadata)
        video, measured = (reader.load({"video": case["path"]}, is_measured=x) for x in (False, True))
        assert video.grid == measured.grid == expected["grid"], case
        assert video.seconds == measured.seconds == expected["seconds"]
        assert list(video.timestamps) == list(measured.timestamps) == expected["timestamps"]
        torch.testing.assert_close(video.pixels, expected["pixels"], rtol=0, atol=1e-6)


# ---------------------------------------------------------------- in samples


OTHERS = [("qwen2_vl", "h264.mp4"), ("qwen3_5", "h264.mp4")]
OTHERS += [("qwen3_vl", name) for name in CODECS if name != "h264.mp4"]


@pytest.mark.parametrize(
    ("family", "name"), [("qwen2_5_vl", "h264.mp4"), ("qwen3_vl", "h264.mp4"), *slow_cases(*OTHERS)]
)
def test_what_is_measured_is_what_is_decoded(family: str, name: str, tmp_path: Path) -> None:
    write_clip(tmp_path / name)
    collator = collator_of(family)
    for keys in (
        {},
        {"nframes": 6, "min_pixels": 4000, "max_pixels": 31360},
        {"fps": "4", "video_start": 0.3, "video_end": 1.6},
    ):
        sample = asked(str(tmp_path / name), **keys)
        row = collator.collate([sample])
        measured = collator.measure(sample, 0)
        assert row.segments.lengths == (measured.num_tokens,)
        again = collator.decode([measured])
        assert torch.equal(again.input_ids, row.input_ids)
        assert torch.equal(again.media.pixel_values_videos, row.media.pixel_values_videos)
        assert measured.videos[0].pixels is None
    assert measure_lengths([sample], collator).tokens.tolist() == [measured.num_tokens]


def test_a_file_may_stand_wherever_a_video_may(clip: bytes, tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(clip)
    stored = {"bytes": clip, "path": None}
    parts = [
        {"type": "video", "video": str(path)},
        {"type": "video", "video": path},
        {"type": "video", "path": str(path)},
        {"type": "video", "video_url": {"url": path.as_uri()}},
        {"type": "video", "bytes": clip},
        {"type": "video", "video": stored},
    ]
    samples = [asked(None) for _ in parts]
    for sample, part in zip(samples, parts, strict=True):
        sample["messages"][0]["content"][0] = part
    columns = [{"video": path}, {"video": [path]}, {"video": stored}, {"videos": [stored]}, {"videos": [str(path)]}]
    samples += [{**chat("What happens?", "It counts."), **column} for column in columns]
    collator = collator_of()
    expected = collator.collate([asked(clip)])
    for sample in samples:
        row = collator.collate([sample])
        assert torch.equal(row.input_ids, expected.input_ids)
        assert torch.equal(row.media.pixel_values_videos, expected.media.pixel_values_videos)


def test_settings_of_the_collator_choose_the_frames(clip: bytes) -> None:
    frames = [
        collator_of(sampling=sampling).measure(asked(clip), 0).videos[0].grid[0]
        for sampling in (None, FrameSampling(fps=5.0), FrameSampling(fps=None), FrameSampling(fps=None, num_frames=6))
    ]
    assert frames == [2, 5, 10, 3]
    with pytest.raises(ConfigError, match=r"sampling has to be a FrameSampling"):
        collator_of(sampling={"fps": 1})
