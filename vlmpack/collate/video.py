"""Frames of a video → the patches, grid and times that Qwen's video processors produce.

transformers' video processors need torchvision, which not every torch goes with. This is their maths on torch alone,
parametrised by the image processor (`VideoSettings.from_image_processor`). Frames are images in a list: a video file is
refused, as decoding it and choosing frames is another trade (PyAV, torchcodec and decord do it well).

```
frames            0 1 2 3 4 4     the last one repeated until they divide by temporal_patch_size
temporal patches  └0┘ └1┘ └2┘     grid (3, H/patch, W/patch)
```

Shape legend: F frames, C channels, T temporal patch size, H W pixels, P patches, D = C * T * patch_size ** 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import interpolate

from vlmpack.collate.vision_keys import (
    Size,
    check_enlarged,
    first_frame_size,
    number,
    video_frame_size,
)
from vlmpack.data import (
    DEFAULT_LIMITS,
    ImageError,
    ImageLimits,
    load_image,
    read_size,
)

Result = TypeVar("Result")

SAMPLE_FPS = 2.0
"""Frames per second where the element has no `sample_fps` (qwen-vl-utils)."""


@dataclass(frozen=True, kw_only=True)
class VideoSettings:
    """How frames become patches; the numbers are those of the image processor beside it."""

    patch_size: int
    """Side of a patch in pixels."""
    merge_size: int
    """Patches along one side of a token."""
    temporal_patch_size: int
    """Frames in one patch."""
    image_mean: tuple[float, float, float]
    """Subtracted per channel after rescaling."""
    image_std: tuple[float, float, float]
    """Divided by per channel after that."""
    rescale_factor: float
    """Multiplies a pixel value of 0 to 255."""

    @classmethod
    def from_image_processor(cls, image_processor: Any) -> VideoSettings:
        """The settings of a Qwen image processor, its `do_rescale` and `do_normalize` included."""
        normalize = image_processor.do_normalize
        return cls(
            patch_size=image_processor.patch_size,
            merge_size=image_processor.merge_size,
            temporal_patch_size=image_processor.temporal_patch_size,
            image_mean=tuple(image_processor.image_mean) if normalize else (0.0, 0.0, 0.0),
            image_std=tuple(image_processor.image_std) if normalize else (1.0, 1.0, 1.0),
            rescale_factor=image_processor.rescale_factor if image_processor.do_rescale else 1.0,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class VideoPatches:
    """One video as a Qwen model reads it."""

    pixel_values: torch.Tensor | None
    """[P, D] float32; patches in the order of the merged grid, as `pixel_values_videos` has them. None: not cut."""
    grid: tuple[int, int, int]
    """Temporal patches, patches down, patches across: a row of `video_grid_thw`."""
    second_per_grid: float
    """Seconds between temporal patches: an entry of Qwen2.5-VL's `second_per_grid_ts`."""
    timestamps: tuple[float, ...]
    """Seconds at which each temporal patch lies: what Qwen3-VL writes before it as `<0.5 seconds>`.

    The repeated last frame counts as a frame of its own, as it does in qwen-vl-utils."""


def load_video(
    element: Mapping[str, Any], *, settings: VideoSettings, limits: ImageLimits = DEFAULT_LIMITS
) -> VideoPatches:
    """A message element `{"video": [frame, ...], ...}` as patches.

    Args:
        element: `video` is a list of images as `load_image` takes them; `sample_fps` (default 2) tells how many frames
            lie in a second, `raw_fps` (default `sample_fps`) by which rate Qwen3-VL's timestamps count, as in
            qwen-vl-utils 0.0.14. For the size see `vision_keys`.
        settings: from the image processor.
        limits: caps for each frame.

    Raises:
        ImageError: a video file, no frames, a frame that cannot be used (named), frames of different sizes, a bad key.
    """
    frames = load_frames(element.get("video"), limits=limits)
    frames_FCHW = resize_frames(frames, element, settings=settings)
    pixel_values, grid = patchify(frames_FCHW, settings=settings)
    return VideoPatches(pixel_values=pixel_values, grid=grid, **_times(element, grid[0], settings.temporal_patch_size))


def measure_video(
    element: Mapping[str, Any], *, settings: VideoSettings, limits: ImageLimits = DEFAULT_LIMITS
) -> VideoPatches:
    """The same without patches, from the headers of the frames.

    Raises:
        ImageError: as `load_video`, save for frames whose headers are sound and whose pixels are not.
    """
    frames = _checked_frames(element.get("video"))
    sizes = [_of_frame(read_size, frame, index, limits) for index, frame in enumerate(frames)]
    _, (height, width) = _frame_sizes(sizes, element, settings=settings)
    depth, side = settings.temporal_patch_size, settings.patch_size
    grid = -(-len(frames) // depth), height // side, width // side
    return VideoPatches(pixel_values=None, grid=grid, **_times(element, grid[0], depth))


def _times(element: Mapping[str, Any], grids: int, depth: int) -> dict[str, Any]:
    """`second_per_grid` and `timestamps` of a video of so many grids of `depth` frames."""
    sample_fps = _rate(element, "sample_fps", SAMPLE_FPS)
    raw_fps = _rate(element, "raw_fps", sample_fps)
    return {
        "second_per_grid": second_per_grid(sample_fps, temporal_patch_size=depth),
        "timestamps": tuple(frame_timestamps(range(grids * depth), fps=raw_fps, temporal_patch_size=depth)),
    }


def load_frames(video: Any, *, limits: ImageLimits = DEFAULT_LIMITS) -> list[Image.Image]:
    """The frames of a video as upright RGB images.

    Raises:
        ImageError: see `load_video`.
    """
    frames = _checked_frames(video)
    return [_of_frame(load_image, frame, index, limits) for index, frame in enumerate(frames)]


def _checked_frames(video: Any) -> Sequence[Any]:
    if isinstance(video, (str, Path, bytes, Mapping)) or not isinstance(video, Sequence):
        raise ImageError(
            f"a video of type {type(video).__name__} cannot be read, only a list of frames; decode it first (PyAV, "
            "torchcodec and decord do) and give the frames as images, with 'sample_fps' beside them",
            "video_source",
        )
    if not video:
        raise ImageError("the video has no frames; give at least one or drop the sample", "video_frames")
    return video


def resize_frames(
    frames: Sequence[Image.Image], element: Mapping[str, Any], *, settings: VideoSettings
) -> torch.Tensor:
    """All frames in their final size, `[F, C, H, W]` uint8.

    Each frame is brought by Pillow to a multiple of two tokens, then all together to the final size, in float32 and
    rounded, which is what torchvision's `resize` does in qwen-vl-utils.

    Raises:
        ImageError: frames of different sizes after the first step, or see `video_frame_size`.
    """
    first, size = _frame_sizes([(frame.height, frame.width) for frame in frames], element, settings=settings)
    frames_FCHW = _stack([frame.resize((first[1], first[0]), Image.Resampling.BICUBIC) for frame in frames])
    if first == size:
        return frames_FCHW
    resized = interpolate(frames_FCHW.float(), size=size, mode="bicubic", antialias=True)
    return resized.clamp(0, 255).round().to(torch.uint8)


def _frame_sizes(sizes: Sequence[Size], element: Mapping[str, Any], *, settings: VideoSettings) -> tuple[Size, Size]:
    """(the size that each frame gets alone, the size that all get together), from the frames' own sizes."""
    patch = {"patch_size": settings.patch_size, "merge_size": settings.merge_size}
    first = [first_frame_size(element, height=height, width=width, **patch) for height, width in sizes]
    height, width = sizes[0]
    size = video_frame_size(element, num_frames=len(sizes), height=height, width=width, **patch)
    _check_one_size(first)
    factor = settings.patch_size * settings.merge_size
    for made in (first[0], size):
        check_enlarged(made, given=sizes[0], factor=factor, num_frames=len(sizes))
    return first[0], size


def patchify(frames_FCHW: torch.Tensor, *, settings: VideoSettings) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """Cut frames into the patches of Qwen's vision tower.

    The same steps as `Qwen2VLVideoProcessor.patchify` (Qwen3-VL's is equal): the last frame is repeated until they
    divide by the temporal patch size; patches run over t, then blocks of merge_size x merge_size patches row by row,
    then the patches of a block; the values of a patch run over channel, frame, row, column. They are
    `(v * rescale - mean) / std` with the roundings of the image processor (PIL back-end), so that a still video equals
    the still image bit for bit.

    Args:
        frames_FCHW: uint8, sides multiples of patch_size * merge_size.
        settings: see `VideoSettings`.

    Returns:
        Patches `[P, D]` float32 and the grid (t, h, w).
    """
    depth, side, merge = settings.temporal_patch_size, settings.patch_size, settings.merge_size
    missing = -len(frames_FCHW) % depth
    frames_FCHW = torch.cat([frames_FCHW, frames_FCHW[-1:].expand(missing, -1, -1, -1)])
    frames, channels, height, width = frames_FCHW.shape
    grid = frames // depth, height // side, width // side
    blocks = frames_FCHW.reshape(
        grid[0], depth, channels, grid[1] // merge, merge, side, grid[2] // merge, merge, side
    ).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    levels = blocks.reshape(grid[0] * grid[1] * grid[2], channels, depth * side * side).numpy()
    table = _value_table(settings)
    patches = np.stack([table[c][levels[:, c]] for c in range(channels)], axis=1)
    return torch.from_numpy(patches.reshape(len(patches), -1)), grid


def second_per_grid(sample_fps: float, *, temporal_patch_size: int = 2) -> float:
    """Seconds between two temporal patches (`Qwen2_5_VLProcessor._process_videos`): temporal_patch_size / fps.

    Args:
        sample_fps: frames per second of the frames given, not of the film they come from.
        temporal_patch_size: frames in one patch.
    """
    return temporal_patch_size / sample_fps


def frame_timestamps(indices: Sequence[int], *, fps: float, temporal_patch_size: int = 2) -> list[float]:
    """Seconds of each temporal patch (`Qwen3VLProcessor._calculate_timestamps`): mean of its first and last frame's.

    Args:
        indices: number of each frame, counted at `fps`; an incomplete last patch is filled with its last frame.
        fps: frames per second by which `indices` count.
        temporal_patch_size: frames in one patch.
    """
    filled = [*indices, *[indices[-1]] * (-len(indices) % temporal_patch_size)]
    last = temporal_patch_size - 1
    return [(filled[i] / fps + filled[i + last] / fps) / 2 for i in range(0, len(filled), temporal_patch_size)]


def _of_frame(read: Callable[..., Result], frame: Any, index: int, limits: ImageLimits) -> Result:
    try:
        return read(frame, limits=limits)
    except ImageError as error:
        raise ImageError(f"frame {index}: {error.detail}", error.reason) from error


def _stack(frames: Sequence[Image.Image]) -> torch.Tensor:
    """`[F, C, H, W]` uint8."""
    return torch.from_numpy(np.stack([np.asarray(frame) for frame in frames])).permute(0, 3, 1, 2).contiguous()


def _check_one_size(sizes: Sequence[Size]) -> None:
    height, width = sizes[0]
    for index, size in enumerate(sizes):
        if size != sizes[0]:
            raise ImageError(
                f"frame {index} is {size[1]} x {size[0]} and frame 0 is {width} x {height} (after resizing); all "
                "frames of a video must have one size: crop or pad them",
                "video_frames",
            )


def _value_table(settings: VideoSettings) -> np.ndarray:
    """`[C, 256]` float32: what each pixel value becomes in each channel."""
    rescaled = (np.arange(256, dtype=np.float64) * settings.rescale_factor).astype(np.float32)
    mean = np.array(settings.image_mean, dtype=np.float32)[:, None]
    std = np.array(settings.image_std, dtype=np.float32)[:, None]
    return (rescaled - mean) / std


def _rate(element: Mapping[str, Any], key: str, default: float) -> float:
    rate = number(element, key, default)
    if rate == 0:
        raise ImageError(f"{key}=0 frames per second has no meaning; give the rate of the frames", "vision_key")
    return rate
