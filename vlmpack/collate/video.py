"""Frames of a video → the patches, grid and times that Qwen's video processors produce.

transformers' video processors need torchvision, which not every torch goes with. This is their maths on torch alone,
parametrised by the processor's part for videos, or for images (`VideoSettings.from_processor`). Here frames are images
in a list; those of a file are chosen and decoded by `video_file.py`.

```
frames            0 1 2 3 4 4     the last one repeated until they divide by temporal_patch_size
temporal patches  └0┘ └1┘ └2┘     grid (3, H/patch, W/patch)
```

Shape legend: F frames, C channels, T temporal patch size, H W pixels, P patches, D = C * T * patch_size ** 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import interpolate

from vlmpack.collate.encoded import Visual
from vlmpack.collate.vision_keys import Size, check_enlarged, first_frame_size, number, resize, video_frame_size
from vlmpack.data.images import DEFAULT_LIMITS, ImageError, ImageLimits, load_image, read_size
from vlmpack.layout.batch import Grid

Result = TypeVar("Result")
SAMPLE_FPS = 2.0
"""Frames per second where the element has no `sample_fps` (qwen-vl-utils)."""


@dataclass(frozen=True, kw_only=True)
class VideoSettings:
    """Numbers by which frames become patches: those of the video processor, or of the image processor."""

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
    def from_processor(cls, part: Any) -> VideoSettings:
        """Read the settings of a Qwen video or image processor, its `do_rescale` and `do_normalize` included."""
        return cls(
            patch_size=part.patch_size,
            merge_size=part.merge_size,
            temporal_patch_size=part.temporal_patch_size,
            image_mean=tuple(part.image_mean) if part.do_normalize else (0.0, 0.0, 0.0),
            image_std=tuple(part.image_std) if part.do_normalize else (1.0, 1.0, 1.0),
            rescale_factor=part.rescale_factor if part.do_rescale else 1.0,
        )


def load_video(element: Mapping[str, Any], *, settings: VideoSettings, limits: ImageLimits = DEFAULT_LIMITS) -> Visual:
    """Cut a message element `{"video": [frame, ...], ...}` into patches, with its seconds and timestamps.

    Args:
        element: `video` is a list of images as `load_image` takes them; `sample_fps` (default 2) is the number of
            frames in a second, `raw_fps` (default `sample_fps`) the rate by which Qwen3-VL's timestamps count, as in
            qwen-vl-utils 0.0.14. For the size see `vision_keys`.
        settings: from the image processor.
        limits: caps for each frame.

    Raises:
        ImageError: no frames, a frame that cannot be used (named), frames of different sizes, a bad key.
    """
    frames = read_frames(element.get("video"), load_image, limits=limits)
    pixels, grid = patchify(resize_frames(frames, element, settings=settings), settings=settings)
    return _visual(pixels, grid, element, settings)


def measure_video(
    element: Mapping[str, Any], *, settings: VideoSettings, limits: ImageLimits = DEFAULT_LIMITS
) -> Visual:
    """Measure a video by the headers of its frames, without patches.

    Raises:
        ImageError: as `load_video`, save for frames whose headers are sound and whose pixels are not.
    """
    sizes = read_frames(element.get("video"), read_size, limits=limits)
    _, size = _frame_sizes(sizes, element, settings=settings)
    return _visual(None, grid_of(len(sizes), size, settings), element, settings)


def grid_of(num_frames: int, size: Size, settings: VideoSettings) -> Grid:
    """Return the grid of frames of a size in pixels, (t, h, w) in patches."""
    side = settings.patch_size
    return -(-num_frames // settings.temporal_patch_size), size[0] // side, size[1] // side


def _visual(pixels: torch.Tensor | None, grid: Grid, element: Mapping[str, Any], settings: VideoSettings) -> Visual:
    """Add the seconds between grids (`Qwen2_5_VLProcessor._process_videos`) and each grid's timestamp.

    The repeated last frame counts as a frame of its own, as it does in qwen-vl-utils.
    """
    depth = settings.temporal_patch_size
    sample_fps = _rate(element, "sample_fps", SAMPLE_FPS)
    timestamps = frame_timestamps(range(grid[0] * depth), fps=_rate(element, "raw_fps", sample_fps), depth=depth)
    return Visual(pixels=pixels, grid=grid, seconds=depth / sample_fps, timestamps=tuple(timestamps))


def read_frames(video: Any, read: Callable[..., Result], *, limits: ImageLimits = DEFAULT_LIMITS) -> list[Result]:
    """Read each frame of a video by `load_image` or `read_size`.

    Raises:
        ImageError: see `load_video`.
    """
    if isinstance(video, str | bytes) or not isinstance(video, Sequence):
        raise ImageError(
            f"a video of type {type(video).__name__} cannot be read; give its file (a path or bytes), or a list of its "
            "frames as images, with 'sample_fps' beside them",
            "video_source",
        )
    if not video:
        raise ImageError("the video has no frames; give at least one or drop the sample", "video_frames")
    results = []
    for index, frame in enumerate(video):
        try:
            results.append(read(frame, limits=limits))
        except ImageError as error:
            raise ImageError(f"frame {index}: {error.detail}", error.reason) from error
    return results


def resize_frames(
    frames: Sequence[Image.Image], element: Mapping[str, Any], *, settings: VideoSettings
) -> torch.Tensor:
    """Resize frames to their final size, `[F, C, H, W]` uint8.

    Each frame is brought by Pillow to a multiple of two tokens, then all together to the final size, in float32 and
    rounded, which is what torchvision's `resize` does in qwen-vl-utils.

    Raises:
        ImageError: frames of different sizes after the first step, or see `video_frame_size`.
    """
    first, size = _frame_sizes([(frame.height, frame.width) for frame in frames], element, settings=settings)
    arrays = np.stack([np.asarray(resize(frame, first)) for frame in frames])
    frames_FCHW = torch.from_numpy(arrays).permute(0, 3, 1, 2).contiguous()
    return torch.stack([resize_floats(frame, size) for frame in frames_FCHW])


def resize_floats(frames: torch.Tensor, size: Size) -> torch.Tensor:
    """Resize uint8 `[..., H, W]` in float32 and round, as torchvision's first `resize` does it for qwen-vl-utils."""
    if tuple(frames.shape[-2:]) == size:
        return frames
    resized = interpolate(frames[None].float(), size=size, mode="bicubic", antialias=True)[0]
    return resized.clamp(0, 255).round().to(torch.uint8)


def _frame_sizes(sizes: Sequence[Size], element: Mapping[str, Any], *, settings: VideoSettings) -> tuple[Size, Size]:
    """(the size that each frame gets alone, the size that all get together), from the sizes of the frames."""
    factor = settings.patch_size * settings.merge_size
    first = [first_frame_size(element, size, factor=factor) for size in sizes]
    final = video_frame_size(element, sizes[0], num_frames=len(sizes), factor=factor)
    for index, (height, width) in enumerate(first):
        if (height, width) != first[0]:
            raise ImageError(
                f"frame {index} is {width} x {height} and frame 0 is {first[0][1]} x {first[0][0]} (after resizing); "
                "all frames of a video must have one size: crop or pad them",
                "video_frames",
            )
    for size in (first[0], final):
        check_enlarged(size, source=sizes[0], factor=factor, num_frames=len(sizes))
    return first[0], final


def patchify(frames_FCHW: torch.Tensor, *, settings: VideoSettings) -> tuple[torch.Tensor, Grid]:
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


def frame_timestamps(indices: Sequence[int], *, fps: float, depth: int = 2) -> list[float]:
    """Compute the seconds of each temporal patch: the mean of its first and last frame's.

    Source: `Qwen3VLProcessor._calculate_timestamps`; Qwen3-VL writes them before each patch as `<0.5 seconds>`.

    Args:
        indices: number of each frame, counted at `fps`; an incomplete last patch is filled with its last frame.
        fps: frames per second by which `indices` count.
        depth: frames in one patch.
    """
    filled = [*indices, *[indices[-1]] * (-len(indices) % depth)]
    return [(filled[i] / fps + filled[i + depth - 1] / fps) / 2 for i in range(0, len(filled), depth)]


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
