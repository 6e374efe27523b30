"""The file of a video → the patches, grid and times that Qwen's video processors produce of it.

    file ──header──▶ frames, rate, size ──sample_frames──▶ indices ──decode──▶ frame ──resize──▶ pixels ──▶ patches

Frames are decoded one after the other and resized at once, so that only their final pixels are kept.

| the processor has                                          | frames chosen as by           | sized as by           |
|------------------------------------------------------------|-------------------------------|-----------------------|
| a video processor                                          | it                            | it                    |
| the same, and keys beside the video choose its size        | it                            | qwen-vl-utils         |
| none: it was loaded without torchvision (`load_processor`) | the family's, with its        | qwen-vl-utils         |
|                                                            | defaults: 2 frames per second |                       |

A video processor that takes every frame (`do_sample_frames=False` and no `fps`: that of Qwen2-VL and Qwen2.5-VL) takes
2 per second here, as these models were trained and as qwen-vl-utils does it; `FrameSampling(fps=None)` takes all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import interpolate

from vlmpack.collate.encoded import Visual
from vlmpack.collate.frame_sampling import DEFAULT_SAMPLING, FPS, FrameSampling, SampledFrames, sample_frames
from vlmpack.collate.processor_metadata import ProcessorMetadata, parts_of, pixel_bounds
from vlmpack.collate.video import VideoSettings, frame_timestamps, grid_of, patchify, resize_floats
from vlmpack.collate.vision_keys import Size, check_enlarged, file_frame_size, has_video_keys
from vlmpack.data.images import ImageError
from vlmpack.data.videos import DEFAULT_VIDEO_LIMITS, VideoHeader, VideoLimits, decode_frames, read_video_header
from vlmpack.errors import check_kind
from vlmpack.layout.batch import Grid

Resize = Callable[[torch.Tensor, Size], torch.Tensor]
FILE_TYPES = (str, Path, bytes, bytearray, memoryview, Mapping)
"""Types of a video's file; a list holds its frames."""


@dataclass(frozen=True, kw_only=True)
class FileRules:
    """Rules for choosing and sizing frames of a video's file: numbers of the video processor."""

    sampling: FrameSampling = DEFAULT_SAMPLING
    """Number of frames where no key names one."""
    is_per_clip: bool = False
    """True: Qwen3-VL's rules (frames by linspace, bounds for all of them together); False: Qwen2-VL's."""
    bounds: tuple[int, int] | None = None
    """Fewest and most pixels of a frame, or of a clip; None: there is no video processor, and qwen-vl-utils' rule."""
    is_capped: bool = False
    """The video processor's `cap_pixels_per_frame`."""
    max_tokens: int = 0
    """The video processor's `max_video_tokens`, which holds if it is capped."""
    limits: VideoLimits = DEFAULT_VIDEO_LIMITS
    """Caps for files."""


DEFAULT_RULES = FileRules()


def file_rules_of(
    processor: Any,
    metadata: ProcessorMetadata,
    *,
    sampling: FrameSampling | None = None,
    limits: VideoLimits | None = None,
) -> FileRules:
    """Read the rules of a processor's video processor.

    Args:
        processor: the user's.
        metadata: what was read from it.
        sampling: holds in the place of its own; None: its own.
        limits: caps for files; None: the default.

    Raises:
        ConfigError: settings of a wrong kind.
    """
    if sampling is not None:
        check_kind("sampling", sampling, FrameSampling, "FrameSampling(fps=1.0)")
    if limits is not None:
        check_kind("video_limits", limits, VideoLimits, "VideoLimits(max_frames=10_000)")
    video_processor = None if metadata.by_processor else parts_of(processor).video_processor
    rules = DEFAULT_RULES if video_processor is None else _rules(video_processor)
    return replace(
        rules,
        is_per_clip=metadata.frame_timestamps,
        sampling=sampling or rules.sampling,
        limits=limits or rules.limits,
    )


def _rules(video_processor: Any) -> FileRules:
    values = video_processor.to_dict()
    num_frames = values.get("num_frames")
    return FileRules(
        sampling=FrameSampling(
            fps=(values.get("fps") or FPS) if num_frames is None else None,
            num_frames=num_frames,
            min_frames=values["min_frames"],
            max_frames=values["max_frames"],
        ),
        bounds=pixel_bounds(video_processor, values["size"]),
        is_capped=bool(values.get("cap_pixels_per_frame")),
        max_tokens=values.get("max_video_tokens") or 0,
    )


def load_video_file(element: Mapping[str, Any], *, settings: VideoSettings, rules: FileRules = DEFAULT_RULES) -> Visual:
    """Cut a message element `{"video": file, ...}` into patches, with its seconds and timestamps.

    Args:
        element: `video` is a path, bytes or {"bytes", "path"}. For the size see `vision_keys`, for the frames
            `frame_sampling`.
        settings: from the image processor.
        rules: from the video processor.

    Raises:
        ImageError: the file, or a key, cannot be used.
        ConfigError: PyAV is not installed.
    """
    header, frames = _sampled(element, settings, rules)
    size, resized = _size(header, len(frames.indices), element, settings, rules)
    decoded = _decoded(element["video"], header, frames, rules.limits)
    pixels, grid = patchify(torch.stack([resized(frame, size) for frame in decoded]), settings=settings)
    return _visual(pixels, grid, frames, settings)


def measure_video_file(
    element: Mapping[str, Any], *, settings: VideoSettings, rules: FileRules = DEFAULT_RULES
) -> Visual:
    """Measure the file of a video by its header, without patches.

    Raises:
        ImageError: as `load_video_file`, save for damage behind a sound header and first frame.
        ConfigError: PyAV is not installed.
    """
    header, frames = _sampled(element, settings, rules)
    size, _ = _size(header, len(frames.indices), element, settings, rules)
    return _visual(None, grid_of(len(frames.indices), size, settings), frames, settings)


def _sampled(
    element: Mapping[str, Any], settings: VideoSettings, rules: FileRules
) -> tuple[VideoHeader, SampledFrames]:
    header = read_video_header(element["video"], limits=rules.limits)
    frames = sample_frames(
        header,
        element,
        sampling=rules.sampling,
        spacing="linspace" if rules.is_per_clip else "arange",
        depth=settings.temporal_patch_size,
        max_sampled=rules.limits.max_sampled,
    )
    return header, frames


def _decoded(video: Any, header: VideoHeader, frames: SampledFrames, limits: VideoLimits) -> Iterator[torch.Tensor]:
    """Frames as uint8 `[3, H, W]`."""
    for index, frame in zip(frames.indices, decode_frames(video, frames.indices, limits=limits), strict=True):
        if frame.shape[:2] != (header.height, header.width):
            raise ImageError(
                f"frame {index} is {frame.shape[1]} x {frame.shape[0]} and frame 0 {header.width} x {header.height}; "
                "all frames of a video must have one size: encode it again in one",
                "video_frames",
            )
        yield torch.from_numpy(frame).permute(2, 0, 1)


def _visual(pixels: torch.Tensor | None, grid: Grid, frames: SampledFrames, settings: VideoSettings) -> Visual:
    depth = settings.temporal_patch_size
    timestamps = frame_timestamps(frames.indices, fps=frames.fps, depth=depth)
    return Visual(pixels=pixels, grid=grid, seconds=depth / frames.sampled_fps, timestamps=tuple(timestamps))


def _size(
    header: VideoHeader, num_frames: int, element: Mapping[str, Any], settings: VideoSettings, rules: FileRules
) -> tuple[Size, Resize]:
    """(final size of each frame, how it is brought to it)."""
    factor, size = settings.patch_size * settings.merge_size, (header.height, header.width)
    if rules.bounds is None or has_video_keys(element):
        final = file_frame_size(element, size, num_frames=num_frames, factor=factor)
        check_enlarged(final, source=size, factor=factor, num_frames=num_frames)
        return final, resize_floats
    rule = _clip_size if rules.is_per_clip else _frame_size
    return rule(size, num_frames, rules.bounds, factor, settings, rules), _resize_levels


def _frame_size(
    size: Size, num_frames: int, bounds: tuple[int, int], factor: int, settings: VideoSettings, rules: FileRules
) -> Size:
    """The rule of `Qwen2VLVideoProcessor.resize`: bounds for each frame."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    low, high = bounds
    if rules.is_capped:
        budget = int(rules.max_tokens * factor * factor * 0.9)
        high = max(min(high, budget * settings.temporal_patch_size // num_frames), int(low * 1.05))
    return smart_resize(*size, factor, min_pixels=low, max_pixels=high)


def _clip_size(
    size: Size, num_frames: int, bounds: tuple[int, int], factor: int, settings: VideoSettings, rules: FileRules
) -> Size:
    """The rule of `Qwen3VLVideoProcessor.resize`: bounds for all frames together."""
    (height, width), (low, high), depth = size, bounds, settings.temporal_patch_size
    if rules.is_capped:
        high = num_frames * max(min(rules.max_tokens * factor * factor, high // num_frames), int(low * 1.05))
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    pixels = round(num_frames / depth) * depth * rows * columns
    if pixels > high:
        shrink = math.sqrt(num_frames * height * width / high)
        rows, columns = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
    elif pixels < low:
        grow = math.sqrt(low / (num_frames * height * width))
        rows, columns = (math.ceil(side * grow / factor) * factor for side in (height, width))
    return rows, columns


def _resize_levels(frames: torch.Tensor, size: Size) -> torch.Tensor:
    """Resize uint8 `[..., H, W]` as torchvision's `transforms.v2` does, by which transformers resizes videos."""
    if tuple(frames.shape[-2:]) == size:
        return frames
    return interpolate(frames[None], size=size, mode="bicubic", antialias=True)[0]
