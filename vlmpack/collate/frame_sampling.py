"""Which frames of a video's file are taken, and when they are: the rules of transformers' video processors.

    24 frames, 12 a second      Qwen3-VL, fps=2: 4 frames      linspace, both ends      0       8       15      23
                                Qwen2-VL, fps=2: 4 frames      arange, from 0           0       6       12      18

The indices are those of `Qwen3VLVideoProcessor.sample_frames` and of `Qwen2VLVideoProcessor.sample_frames` (also of
Qwen2.5-VL) for the same settings. Keys beside a video choose otherwise for it alone, by the names of qwen-vl-utils:

| key                          | in place of                                                                          |
|------------------------------|--------------------------------------------------------------------------------------|
| `fps`                        | `FrameSampling.fps`                                                                  |
| `nframes`                    | `FrameSampling.num_frames`; not beside `fps`                                         |
| `min_frames`, `max_frames`   | the settings of the same name, where frames are taken by `fps`                       |
| `video_start`, `video_end`   | seconds: only frames from the first to the last in between, ends included, are there |

`sample_fps` and `raw_fps` are the rates of frames in a list; a file has its own, and they are refused beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import numpy as np
import torch

from vlmpack.collate.vision_keys import number
from vlmpack.data.images import ImageError
from vlmpack.data.videos import VideoHeader
from vlmpack.errors import ConfigError, check_whole_number

Spacing = Literal["linspace", "arange"]
"""Spread of frames: with the last one, as Qwen3-VL's processor does it, or by equal steps from the first."""
FPS = 2.0
"""Frames taken per second where a processor does not say (`VIDEO_FPS` of qwen-vl-utils)."""
MIN_FRAMES = 2
"""Fewest frames of a video that has a patch in time."""
_RATES_OF_LISTS = ("sample_fps", "raw_fps")


@dataclass(frozen=True, kw_only=True)
class FrameSampling:
    """Number of frames of a video's file; a setting of `VLMCollator`.

    Raises:
        ConfigError: a number that means nothing, or both `fps` and `num_frames`.
    """

    fps: float | None = FPS
    """Frames taken for each second; None: every frame, or `num_frames`."""
    num_frames: int | None = None
    """Frames taken of each video, however long it is; None: by `fps`."""
    min_frames: int = 4
    """Fewest frames by `fps`, as far as there are so many."""
    max_frames: int = 768
    """Most frames by `fps`."""

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other."""
        if self.fps is not None and not (0 < self.fps < math.inf):
            raise ConfigError(f"fps={self.fps} takes no frames; give frames per second above 0, or None for all")
        if self.num_frames is not None:
            check_whole_number("num_frames", self.num_frames, at_least=MIN_FRAMES)
            if self.fps is not None:
                raise ConfigError(f"fps={self.fps} and num_frames={self.num_frames}: only one can hold; set fps=None")
        check_whole_number("min_frames", self.min_frames, at_least=1)
        check_whole_number("max_frames", self.max_frames, at_least=max(self.min_frames, MIN_FRAMES))


DEFAULT_SAMPLING = FrameSampling()


@final
@dataclass(frozen=True, kw_only=True)
class SampledFrames:
    """The frames that are taken of one video."""

    indices: tuple[int, ...]
    """Their numbers in the file, rising."""
    fps: float
    """Frames per second of the file."""
    sampled_fps: float
    """Frames per second that were taken: transformers' `VideoMetadata.sampled_fps`."""


def sample_frames(
    header: VideoHeader,
    element: Mapping[str, Any],
    *,
    sampling: FrameSampling,
    spacing: Spacing,
    depth: int,
    max_sampled: int,
) -> SampledFrames:
    """Choose the frames of a video.

    Args:
        header: of its file.
        element: the keys beside it.
        sampling: what holds where there is no key.
        spacing: of the family's video processor.
        depth: frames in one patch.
        max_sampled: `VideoLimits.max_sampled`.

    Raises:
        ImageError: a key that means nothing here (`vision_key`), or too few or too many frames (`video_frames`,
            `video_too_large`).
    """
    sampling = _keyed(element, sampling)
    first, last = _range(header, element)
    total = last - first + 1
    count = _count(total, header.fps, sampling, spacing, depth)
    if count > total:
        raise ImageError(f"{count} frames are to be taken of {total}; lower nframes (or num_frames)", "video_frames")
    if count < MIN_FRAMES:
        fault = f"of its {total} frame(s) at {header.fps:g} per second {count} would be taken, and a video has at least"
        raise ImageError(f"{fault} {MIN_FRAMES}; raise fps, or give the frame as an image", "video_frames")
    if count > max_sampled:
        fault = f"{count} frames would be taken of it, more than VideoLimits.max_sampled={max_sampled}; lower fps"
        raise ImageError(fault, "video_too_large")
    indices = tuple(first + index for index in _spread(total, count, spacing))
    return SampledFrames(indices=indices, fps=header.fps, sampled_fps=len(indices) / total * header.fps)


def _spread(total: int, count: int, spacing: Spacing) -> list[int]:
    """`count` numbers below `total`, computed as transformers computes them, roundings included.

    By its rounding `arange` may have one more number, `total` itself, which no frame has: it is left out.
    """
    if spacing == "linspace":
        return np.linspace(0, total - 1, count).round().astype(int).tolist()
    return torch.arange(0, total, total / count).int()[:count].tolist()


def _count(total: int, fps: float, sampling: FrameSampling, spacing: Spacing, depth: int) -> int:
    if spacing == "linspace":
        return _count_linspace(total, fps, sampling)
    if sampling.num_frames is not None:
        return round(sampling.num_frames / depth) * depth
    if sampling.fps is None:
        return total
    most = math.floor(min(sampling.max_frames, total) / depth) * depth
    count = min(max(total / fps * sampling.fps, sampling.min_frames), most, total)
    return math.floor(count / depth) * depth


def _count_linspace(total: int, fps: float, sampling: FrameSampling) -> int:
    if sampling.num_frames is not None:
        return sampling.num_frames
    count = total if sampling.fps is None else int(total / fps * sampling.fps)
    return min(max(count, sampling.min_frames), sampling.max_frames, total)


def _keyed(element: Mapping[str, Any], sampling: FrameSampling) -> FrameSampling:
    """The settings with the keys beside one video in their place."""
    for key in _RATES_OF_LISTS:
        if element.get(key) is not None:
            fault = f"{key}={element[key]!r:.80} is the rate of frames in a list, and a file has its own; give fps"
            raise ImageError(fault, "vision_key")
    fps, nframes = element.get("fps"), element.get("nframes")
    if fps is not None and nframes is not None:
        raise ImageError(f"fps={fps!r:.80} and nframes={nframes!r:.80}: only one can hold; leave one out", "vision_key")
    changes: dict[str, Any] = {}
    if fps is not None:
        changes = {"fps": number(element, "fps", FPS), "num_frames": None}
    elif nframes is not None:
        changes = {"fps": None, "num_frames": _whole(element, "nframes")}
    changes |= {key: _whole(element, key) for key in ("min_frames", "max_frames") if element.get(key) is not None}
    try:
        return replace(sampling, **changes)
    except ConfigError as error:
        raise ImageError(f"the keys beside it: {error}", "vision_key") from error


def _whole(element: Mapping[str, Any], key: str) -> int:
    value = number(element, key, 0.0)
    if value != int(value):
        raise ImageError(f"{key}={element[key]!r:.80} must be a whole number of frames", "vision_key")
    return int(value)


def _range(header: VideoHeader, element: Mapping[str, Any]) -> tuple[int, int]:
    """(first frame, last frame) between `video_start` and `video_end` (`calculate_video_frame_range`)."""
    duration = header.num_frames / header.fps
    start = min(number(element, "video_start", 0.0), duration)
    end = min(number(element, "video_end", duration), duration)
    first = math.ceil(start * header.fps)
    last = min(math.floor(end * header.fps), header.num_frames - 1)
    if first >= last and any(element.get(key) is not None for key in ("video_start", "video_end")):
        raise ImageError(
            f"between video_start={start:g} and video_end={end:g} seconds lie fewer than {MIN_FRAMES} frames of its "
            f"{header.num_frames} at {header.fps:g} per second ({duration:g} seconds); widen it or leave both out",
            "vision_key",
        )
    return first, last
