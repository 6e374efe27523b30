"""Frames of a video → the patches, grid and times that Qwen's video processors produce.

    list of frames ──size by qwen-vl-utils──────────────────────────────▶ pixels ──▶ patches
    file ──header──▶ frames, rate, size ──sample_frames──▶ decode, resize ──▶ pixels ──▶ patches

transformers' video processors need torchvision, which not every torch goes with. This is their maths on torch alone,
parametrised by the processor's part for videos, or for images (`VideoSettings.from_processor`).

```
frames            0 1 2 3 4 4     the last one repeated until they divide by temporal_patch_size
temporal patches  └0┘ └1┘ └2┘     grid (3, H/patch, W/patch)
```

| of a file, where the processor has                         | frames chosen as by           | sized as by           |
|------------------------------------------------------------|-------------------------------|-----------------------|
| a video processor                                          | it                            | it                    |
| the same, and keys beside the video choose its size        | it                            | qwen-vl-utils         |
| none: it was loaded without torchvision (`load_processor`) | the family's, with its        | qwen-vl-utils         |
|                                                            | defaults: 2 frames per second |                       |

A video processor that takes every frame (`do_sample_frames=False` and no `fps`: that of Qwen2-VL and Qwen2.5-VL) takes
2 per second here, as these models were trained and as qwen-vl-utils does it; `FrameSampling(fps=None)` takes all.

Frames of a file are chosen as transformers' video processors choose them:

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

`sample_fps` and `raw_fps` are the rates of frames in a list; a file has its own, and they are refused beside it. When
the frames of a list are, `timestamps` or `frames_indices` and `fps` say too, as transformers' `VideoMetadata` does.

Sizes of images and frames by the message keys of qwen-vl-utils:

A message element may say how large its picture is to be:

```
{"type": "image", "image": ..., "min_pixels": 50176, "max_pixels": 501760}
{"type": "image", "image": ..., "resized_height": 280, "resized_width": 420}
{"type": "video", "video": [frame, frame, ...], "total_pixels": 20480 * 28 * 28, "sample_fps": 2.0}
```

Which rule applies:

* an image with one of the keys above: the rule of qwen-vl-utils (0.0.14, `vision_process.fetch_image`). The size is
  final: the image processor is to be called with `do_resize=False`;
* an image without any: the image processor's own rule and its own bounds;
* a video given as frames: the rule of qwen-vl-utils with or without keys (`fetch_video`), because the processors' own
  video classes need torchvision;
* a file of a video: the same rule without its first step (frames of a file are not resized one by one), if it has one
  of the keys, or the processor has no video processor; else the video processor's own rule and bounds (`video.py`).

The two rules for images differ at very thin pictures: rounding a side to a multiple of `factor` may give 0, which
qwen-vl-utils lifts to `factor` before it looks at the bounds; the processor sees an area of 0 and blows the picture up.
1 x 199 pixels become 28 x 196 with keys (7 tokens) and 28 x 812 by the processor (29 tokens).

Keys that are None are absent (columns of a table often are). A number may be written as text (`"sample_fps": "1"`, as
Qwen's own README does). `fps`, `nframes`, `min_frames`, `max_frames`, `video_start` and `video_end` choose frames of a
video *file* (`video.py`); beside a list of frames `fps`, `frames_indices` and `timestamps` say when they are, and the
others are refused (`check_times`).

Shape legend: F frames, C channels, T temporal patch size, H W pixels, P patches, D = C * T * patch_size ** 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import interpolate

from vlmpack.collate.encoded import Visual
from vlmpack.collate.processor_metadata import ProcessorMetadata, parts_of, pixel_bounds
from vlmpack.data.images import DEFAULT_LIMITS, ImageError, ImageLimits, load_image, read_size
from vlmpack.data.messages import FILE_KEYS, FRAME_KEYS, VIDEO_KEYS
from vlmpack.data.videos import DEFAULT_VIDEO_LIMITS, VideoHeader, VideoLimits, decode_frames, read_video_header
from vlmpack.errors import ConfigError, check_kind, check_whole_number
from vlmpack.layout.batch import Grid

Size = tuple[int, int]
"""Height and width, in that order."""
Result = TypeVar("Result")
FILE_TYPES = (str, Path, bytes, bytearray, memoryview, Mapping)
"""Types of a video's file; a list holds its frames."""


Spacing = Literal["linspace", "arange"]
"""Spread of frames: with the last one, as Qwen3-VL's processor does it, or by equal steps from the first."""
FPS = 2.0
"""Frames taken per second where a processor does not say (`VIDEO_FPS` of qwen-vl-utils)."""
MIN_FRAMES = 2
"""Fewest frames of a video that has a patch in time."""


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


@dataclass(frozen=True, kw_only=True)
class SampledFrames:
    """The frames that are taken of one video."""

    indices: tuple[int, ...]
    """Their numbers in the file, rising."""
    fps: float
    """Frames per second of the file."""
    sampled_fps: float
    """Frames per second that were taken: transformers' `VideoMetadata.sampled_fps`."""


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


@dataclass(frozen=True, kw_only=True)
class FileRules:
    """Rules for choosing and sizing frames of a video's file: numbers of the video processor."""

    sampling: FrameSampling = DEFAULT_SAMPLING
    """Number of frames where no key names one."""
    is_chosen: bool = False
    """True: that is a setting of the collator; False: the video processor's, or the default."""
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
    chosen = {"sampling": sampling or rules.sampling, "is_chosen": sampling is not None}
    return replace(rules, is_per_clip=metadata.frame_timestamps, limits=limits or rules.limits, **chosen)


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


def load_video(
    element: Mapping[str, Any],
    *,
    settings: VideoSettings,
    limits: ImageLimits = DEFAULT_LIMITS,
    rules: FileRules = DEFAULT_RULES,
    is_measured: bool = False,
) -> Visual:
    """Cut a message element `{"video": ..., ...}` into patches, with its seconds and timestamps.

    Args:
        element: `video` is a file (a path, bytes or {"bytes", "path"}) or a list of images as `load_image` takes them.
            Of a list `sample_fps` (default 2) is the number of frames in a second, `raw_fps` (default `sample_fps`)
            the rate by which Qwen3-VL's timestamps count, as in qwen-vl-utils 0.0.14; or `timestamps` are the seconds
            of each frame, or `frames_indices` their numbers at `fps` a second (default 0, 1, ...). For the size
            see `vision_keys`, for the frames of a file `sample_frames`.
        settings: from the video or image processor.
        limits: caps for each frame of a list.
        rules: of files, from the video processor.
        is_measured: read headers alone and make no patches; damage behind a sound header is not seen.

    Raises:
        ImageError: no frames, a frame that cannot be used (named), frames of different sizes, a file or a key that
            cannot be used.
        ConfigError: PyAV is not installed, and it is a file.
    """
    if isinstance(element.get("video"), FILE_TYPES):
        return _of_file(element, settings, rules, is_measured=is_measured)
    depth = settings.temporal_patch_size
    if is_measured:
        sizes, pixels = read_frames(element.get("video"), read_size, limits=limits), None
        _, size = _frame_sizes(sizes, element, settings=settings)
        grid = grid_of(len(sizes), size, settings)
    else:
        frames = read_frames(element.get("video"), load_image, limits=limits)
        pixels, grid = patchify(resize_frames(frames, element, settings=settings), settings=settings)
    if (times := _times(element, len(element["video"]))) is not None:
        seconds = depth * (times[-1] - times[0]) / max(len(times) - 1, 1)
        of_patches = frame_timestamps(times, fps=1.0, depth=depth)
        return Visual(pixels=pixels, grid=grid, seconds=seconds or depth / FPS, timestamps=tuple(of_patches))
    # The repeated last frame counts as a frame of its own, as it does in qwen-vl-utils
    sample_fps = _rate(element, "sample_fps", FPS)
    timestamps = frame_timestamps(range(grid[0] * depth), fps=_rate(element, "raw_fps", sample_fps), depth=depth)
    return Visual(pixels=pixels, grid=grid, seconds=depth / sample_fps, timestamps=tuple(timestamps))


def _of_file(element: Mapping[str, Any], settings: VideoSettings, rules: FileRules, *, is_measured: bool) -> Visual:
    """Frames are decoded one after the other and resized at once, so that only their final pixels are kept."""
    header, depth = read_video_header(element["video"], limits=rules.limits), settings.temporal_patch_size
    spacing, most = "linspace" if rules.is_per_clip else "arange", rules.limits.max_sampled
    frames = sample_frames(header, element, sampling=rules.sampling, spacing=spacing, depth=depth, max_sampled=most)
    size, resized = _file_size(header, len(frames.indices), element, settings, rules)
    pixels, grid = None, grid_of(len(frames.indices), size, settings)
    if not is_measured:
        decoded = _decoded(element["video"], header, frames, rules.limits)
        pixels, grid = patchify(torch.stack([resized(frame, size) for frame in decoded]), settings=settings)
    timestamps = frame_timestamps(frames.indices, fps=frames.fps, depth=depth)
    return Visual(pixels=pixels, grid=grid, seconds=depth / frames.sampled_fps, timestamps=tuple(timestamps))


def grid_of(num_frames: int, size: Size, settings: VideoSettings) -> Grid:
    """Return the grid of frames of a size in pixels, (t, h, w) in patches."""
    side = settings.patch_size
    return -(-num_frames // settings.temporal_patch_size), size[0] // side, size[1] // side


def read_frames(video: Any, read: Callable[..., Result], *, limits: ImageLimits = DEFAULT_LIMITS) -> list[Result]:
    """Read each frame of a video by `load_image` or `read_size`.

    Raises:
        ImageError: see `load_video`.
    """
    if isinstance(video, str | bytes) or not isinstance(video, Sequence):
        fault = f"a video of type {type(video).__name__} cannot be read; give its file (a path or bytes)"
        raise ImageError(f"{fault}, or a list of its frames as images", "video_source")
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
            seen = f"frame {index} is {width} x {height} and frame 0 is {first[0][1]} x {first[0][0]} (after resizing)"
            raise ImageError(f"{seen}; all frames of a video must have one size", "video_frames")
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


def _times(element: Mapping[str, Any], count: int) -> list[float] | None:
    """Seconds of each frame of a list, as transformers' `VideoMetadata` has them; None: no key says so.

    Raises:
        ImageError: the keys contradict each other, or name another number of frames.
    """
    given = [
        key for key in ("timestamps", "frames_indices", "fps", "sample_fps", "raw_fps") if element.get(key) is not None
    ]
    if not given or given[0] in ("sample_fps", "raw_fps"):
        return None
    values = element.get(given[0], ()) if given[0] != "fps" else range(count)
    if given not in (["timestamps"], ["frames_indices", "fps"], ["fps"]):
        fault = f"{' and '.join(given)} beside its frames: give timestamps, or fps and frames_indices, or sample_fps"
        raise ImageError(fault, "vision_key")
    fps = 1.0 if given == ["timestamps"] else _rate(element, "fps", FPS)
    is_rising = isinstance(values, Sequence) and len(values) == count and [*values] == sorted(values)
    if not is_rising or not all(isinstance(value, int | float) and value >= 0 for value in values):
        fault = f"{given[0]}={values!r:.60} must be a rising list of numbers, one for each of its {count} frame(s)"
        raise ImageError(fault, "vision_key")
    return [value / fps for value in values]


def frame_timestamps(indices: Sequence[float], *, fps: float, depth: int = 2) -> list[float]:
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
    if rate := number(element, key, default):
        return rate
    raise ImageError(f"{key}=0 frames per second has no meaning; give the rate of the frames", "vision_key")


# ---------------------------------------------------------------------- videos of a processor's own video processor


@dataclass(frozen=True, kw_only=True)
class Clip:
    """The frames that are taken of a video, not decoded yet, and transformers' `VideoMetadata` of them."""

    shape: tuple[int, int, int, int]
    """[F, H, W, 3]."""
    metadata: tuple[tuple[str, Any], ...]
    """Names and values of `VideoMetadata`."""
    decode: Callable[[], np.ndarray]
    """Returns the frames, uint8 [F, H, W, 3]."""


def read_clip(element: Mapping[str, Any], part: Any, *, rules: FileRules, limits: ImageLimits) -> Clip:
    """Choose the frames of a video as its processor's `sample_frames` does; all frames of a list are taken.

    Args:
        element: `video` and the keys beside it: `fps` or `nframes` of a file, the times of a list (`load_video`).
        part: the video processor.
        rules: of files: their caps, and the collator's setting in place of the video processor's own.
        limits: caps of each frame of a list.

    Raises:
        ImageError: as `load_video`; or a key that this video processor does not read.
    """
    video, name = element.get("video"), type(part).__name__
    if key := next((key for key in VIDEO_KEYS if element.get(key) is not None), None):
        fault = f"it has {key} beside it, by which Qwen's videos are sized; a {name} sizes all videos alike"
        raise ImageError(f"{fault}: leave it out", "vision_key")
    if not isinstance(video, FILE_TYPES):
        sizes = read_frames(video, read_size, limits=limits)
        if len({*sizes}) > 1:
            raise ImageError(f"its frames have the sizes {sorted({*sizes})}; all must have one size", "video_frames")
        times = _times(element, len(sizes)) or [at / _rate(element, "sample_fps", FPS) for at in range(len(sizes))]
        metadata = {"total_num_frames": len(sizes), "fps": 1.0, "duration": times[-1], "frames_indices": tuple(times)}
        return Clip(
            shape=(len(sizes), *sizes[0], 3),
            metadata=tuple(metadata.items()),
            decode=lambda: np.stack([np.asarray(frame) for frame in read_frames(video, load_image, limits=limits)]),
        )
    header = read_video_header(video, limits=rules.limits)
    chosen = {"fps": rules.sampling.fps, "num_frames": rules.sampling.num_frames} if rules.is_chosen else {}
    chosen |= {ours: element[key] for key, ours in _CHOOSING.items() if element.get(key) is not None}
    chosen = {key: value for key, value in chosen.items() if value is not None}
    read = [key for key in _CHOOSING.values() if key in signature(part.sample_frames).parameters]
    unread = [*(chosen.keys() - read), *(key for key in FILE_KEYS[2:] if element.get(key) is not None)]
    if unread:
        fault = f"{unread[0]} chooses no frames of a {name}; it reads {' and '.join(read) or 'its own settings alone'}"
        raise ImageError(fault, "vision_key")
    metadata = {"total_num_frames": header.num_frames, "fps": header.fps, "duration": header.num_frames / header.fps}
    metadata |= {"height": header.height, "width": header.width, "video_backend": "pyav"}
    indices = range(header.num_frames)
    if chosen or part.do_sample_frames:
        from transformers.video_utils import VideoMetadata

        own = {key: getattr(part, key, None) for key in part.valid_kwargs.__annotations__}
        own |= {**dict.fromkeys(_CHOOSING.values()), **chosen} if chosen else {}
        try:
            indices = [int(at) for at in part.sample_frames(metadata=VideoMetadata(**metadata), **own)]
        except ValueError as error:
            raise ImageError(f"its video processor takes no frames of it: {error}", "video_frames") from error
    if not 0 < len(indices) <= rules.limits.max_sampled:
        fault = f"{len(indices)} frames would be taken of it, and VideoLimits.max_sampled={rules.limits.max_sampled}"
        raise ImageError(f"{fault}; choose fewer by fps", "video_too_large")

    def decode() -> np.ndarray:
        wanted = sorted({*indices})
        frames = dict(zip(wanted, decode_frames(video, wanted, limits=rules.limits), strict=True))
        return np.stack([frames[at] for at in indices])

    taken = (*metadata.items(), ("frames_indices", tuple(indices)))
    return Clip(shape=(len(indices), header.height, header.width, 3), metadata=taken, decode=decode)


_CHOOSING = {"fps": "fps", "nframes": "num_frames"}
"""Keys beside a file, and the names under which video processors take them."""

# ---------------------------------------------------------------------- which frames of a file


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
    if spacing == "linspace":
        chosen = np.linspace(0, total - 1, count).round().astype(int).tolist()
    else:  # by its rounding `arange` may have one more number, `total` itself, which no frame has
        chosen = torch.arange(0, total, total / count).int()[:count].tolist()
    indices = tuple(first + index for index in chosen)
    return SampledFrames(indices=indices, fps=header.fps, sampled_fps=len(indices) / total * header.fps)


def _count(total: int, fps: float, sampling: FrameSampling, spacing: Spacing, depth: int) -> int:
    """The number of frames that are taken, computed as transformers computes it, roundings included."""
    is_linear = spacing == "linspace"
    if sampling.num_frames is not None:
        return sampling.num_frames if is_linear else round(sampling.num_frames / depth) * depth
    if is_linear:
        count = total if sampling.fps is None else int(total / fps * sampling.fps)
        return min(max(count, sampling.min_frames), sampling.max_frames, total)
    if sampling.fps is None:
        return total
    most = math.floor(min(sampling.max_frames, total) / depth) * depth
    count = min(max(total / fps * sampling.fps, sampling.min_frames), most, total)
    return math.floor(count / depth) * depth


def _keyed(element: Mapping[str, Any], sampling: FrameSampling) -> FrameSampling:
    """The settings with the keys beside one video in their place."""
    if key := next((key for key in ("sample_fps", "raw_fps") if element.get(key) is not None), None):
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
        seen = f"between video_start={start:g} and video_end={end:g} seconds lie fewer than {MIN_FRAMES} frames of its"
        rate = f"{header.num_frames} at {header.fps:g} per second ({duration:g} seconds)"
        raise ImageError(f"{seen} {rate}; widen it or leave both out", "vision_key")
    return first, last


# ---------------------------------------------------------------------- files


def _decoded(video: Any, header: VideoHeader, frames: SampledFrames, limits: VideoLimits) -> Iterator[torch.Tensor]:
    """Frames as uint8 `[3, H, W]`."""
    for index, frame in zip(frames.indices, decode_frames(video, frames.indices, limits=limits), strict=True):
        if frame.shape[:2] != (header.height, header.width):
            seen = f"frame {index} is {frame.shape[1]} x {frame.shape[0]} and frame 0 {header.width} x {header.height}"
            raise ImageError(f"{seen}; all frames of a video must have one size: encode it again", "video_frames")
        yield torch.from_numpy(frame).permute(2, 0, 1)


def _file_size(
    header: VideoHeader, num_frames: int, element: Mapping[str, Any], settings: VideoSettings, rules: FileRules
) -> tuple[Size, Callable[[torch.Tensor, Size], torch.Tensor]]:
    """(final size of each frame, how it is brought to it)."""
    factor, size = settings.patch_size * settings.merge_size, (header.height, header.width)
    if rules.bounds is None or any(element.get(key) is not None for key in VIDEO_KEYS):
        final = video_frame_size(element, size, num_frames=num_frames, factor=factor, is_file=True)
        check_enlarged(final, source=size, factor=factor, num_frames=num_frames)
        return final, resize_floats
    return _sized(size, num_frames, rules.bounds, factor, settings.temporal_patch_size, rules), _resize_levels


def _sized(size: Size, num_frames: int, bounds: tuple[int, int], factor: int, depth: int, rules: FileRules) -> Size:
    """The rule of `Qwen2VLVideoProcessor.resize`, bounds for each frame, or of `Qwen3VLVideoProcessor.resize`, bounds
    for all of them together."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    (height, width), (low, high), most = size, bounds, rules.max_tokens * factor * factor
    if not rules.is_per_clip:
        if rules.is_capped:
            high = max(min(high, int(most * 0.9) * depth // num_frames), int(low * 1.05))
        return smart_resize(height, width, factor, min_pixels=low, max_pixels=high)
    if rules.is_capped:
        high = num_frames * max(min(most, high // num_frames), int(low * 1.05))
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


# ---------------------------------------------------------------------- sizes by the keys of qwen-vl-utils

IMAGE_KEYS = VIDEO_KEYS[:4]
"""Keys of an image element that choose its size."""
TIMES = ("frame_indices", "total_num_frames", "duration", "video_metadata")
"""Further keys by which others say when frames are."""

MAX_ASPECT_RATIO = 200
IMAGE_TOKENS = (4, 16384)
"""Fewest and most tokens of an image where the element does not say (`IMAGE_MIN_TOKEN_NUM`, `IMAGE_MAX_TOKEN_NUM`)."""
FRAME_TOKENS = (128, 768)
"""The same for each frame of a video (`VIDEO_MIN_TOKEN_NUM`, `VIDEO_MAX_TOKEN_NUM`)."""
MODEL_TOKENS = 128_000
"""Nine tenths of it are a video's where it has no `total_pixels` (`MODEL_SEQ_LEN`; no environment variable is read)."""
FRAME_FACTOR = 2
"""Frames that share one temporal patch."""
ENLARGED_TOKENS = 4 * IMAGE_TOKENS[1]
"""Most tokens to which the frames of a video are enlarged together by keys beside it."""


def has_image_keys(element: Mapping[str, Any]) -> bool:
    """Return whether the element sizes its image, so that qwen-vl-utils' rule applies and not the processor's."""
    return any(element.get(key) is not None for key in IMAGE_KEYS)


def check_times(element: Mapping[str, Any], *, is_file: bool) -> None:
    """Refuse keys beside a video that say which of its frames there are, or when, and that nothing would read.

    Raises:
        ImageError: there is one (reason ``"vision_key"``).
    """
    unread = (*FRAME_KEYS, *TIMES) if is_file else (*FILE_KEYS[1:], *TIMES)
    key = next((key for key in unread if element.get(key) is not None), None)
    if key is None:
        return
    remedy = (
        "the frames of a list are all taken, at the times of timestamps, of frames_indices and fps, or of sample_fps"
    )
    if is_file:
        remedy = "a file's frames have their times in it: choose them by fps, nframes, video_start and video_end"
    raise ImageError(f"{key}={element[key]!r:.60} beside it is not read: {remedy}; leave it out", "vision_key")


def number(element: Mapping[str, Any], key: str, default: float) -> float:
    """Return the finite number of at least 0 under a key; `default` where the key is absent or None.

    Raises:
        ImageError: anything else (reason ``"vision_key"``).
    """
    value = element.get(key)
    if value is None:
        return default
    try:
        parsed = float(value) if isinstance(value, str) else value
        if not isinstance(parsed, bool) and math.isfinite(parsed) and parsed >= 0:
            return parsed
    except (TypeError, ValueError, OverflowError):
        pass
    raise ImageError(f"{key}={value!r:.80} must be a number, finite and not negative", "vision_key")


def smart_resize(
    height: float, width: float, *, factor: int, min_pixels: float | None = None, max_pixels: float | None = None
) -> Size:
    """Compute the size of a picture by the rule of qwen-vl-utils (`vision_process.smart_resize`, 0.0.14).

    Both sides are multiples of `factor`, their product lies between the bounds, the aspect ratio is kept as far as that
    allows.

    Args:
        height, width: pixels.
        factor: patch size times merge size: pixels along one side of a token.
        min_pixels, max_pixels: bounds; 4 and 16384 tokens where None.

    Returns:
        Height and width in pixels.

    Raises:
        ImageError: aspect ratio above 200, bounds that exclude each other, or a side that would be 0.
    """
    low = IMAGE_TOKENS[0] * factor**2 if min_pixels is None else min_pixels
    high = IMAGE_TOKENS[1] * factor**2 if max_pixels is None else max_pixels
    _check_size(height, width, low, high)
    size = max(factor, round(height / factor) * factor), max(factor, round(width / factor) * factor)
    if size[0] * size[1] > high:
        shrink = math.sqrt(height * width / high)
        size = math.floor(height / shrink / factor) * factor, math.floor(width / shrink / factor) * factor
    elif size[0] * size[1] < low:
        grow = math.sqrt(low / (height * width))
        size = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    if min(size) < 1:
        fault = f"{height:g} x {width:g} pixels (height x width) within max_pixels={high:g} would leave a side of 0"
        raise ImageError(f"{fault}; raise max_pixels or make the picture less thin", "vision_key")
    return size


def image_size(element: Mapping[str, Any], size: Size, *, factor: int) -> Size:
    """Compute the size of an image by its element's keys (`vision_process.fetch_image`), in pixels.

    `resized_height` and `resized_width` win over the image's size and the bounds; `min_pixels` and `max_pixels` bound
    the area.

    Args:
        element: the image's keys.
        size: of the image.
        factor: patch size times merge size: pixels along one side of a token.

    Raises:
        ImageError: see `smart_resize`; also one of `resized_height` and `resized_width` without the other, which
            qwen-vl-utils ignores.
    """
    height, width = element.get("resized_height"), element.get("resized_width")
    if (height is None) != (width is None):
        raise ImageError(f"resized_height={height} and resized_width={width}: give both or none", "vision_key")
    if height is not None:
        forced = number(element, "resized_height", 0.0), number(element, "resized_width", 0.0)
        return smart_resize(*forced, factor=factor)
    low = number(element, "min_pixels", IMAGE_TOKENS[0] * factor**2)
    high = number(element, "max_pixels", IMAGE_TOKENS[1] * factor**2)
    return smart_resize(*size, factor=factor, min_pixels=low, max_pixels=high)


def check_enlarged(size: Size, *, source: Size, factor: int, num_frames: int = 1) -> None:
    """Refuse to enlarge a picture beyond what the rule makes of any picture without keys: memory and time are bounded.

    Keys of a small picture could name any size. An image gets its present size or `IMAGE_TOKENS[1]` tokens at most; a
    frame of a video also has a share of `ENLARGED_TOKENS`, but never less than `FRAME_TOKENS[1]`.

    Args:
        size: by the keys.
        source: the picture's size.
        factor: patch size times merge size: pixels along one side of a token.
        num_frames: frames of that size that are made.

    Raises:
        ImageError: it is larger (reason ``"vision_key"``).
    """
    share = max(FRAME_TOKENS[1], ENLARGED_TOKENS // num_frames)
    tokens = math.ceil(source[0] / factor) * math.ceil(source[1] / factor)
    most = max(tokens, min(IMAGE_TOKENS[1], share))
    if size[0] * size[1] > most * factor**2:
        sizes = f"from {source[1]} x {source[0]} to {size[1]} x {size[0]} pixels (width x height"
        frames = f", {num_frames} frames" if num_frames > 1 else ""
        remedy = "lower min_pixels, resized_height and resized_width"
        most_said = f"more than the {most} tokens of {factor} x {factor} pixels that it can have at most"
        raise ImageError(f"the keys beside it enlarge it {sizes}{frames}), {most_said}; {remedy}", "vision_key")


def resize(image: Image.Image, size: Size) -> Image.Image:
    """Resize an image bicubically, pixel for pixel as `fetch_image` does it."""
    return image.resize((size[1], size[0]), Image.Resampling.BICUBIC)


def first_frame_size(element: Mapping[str, Any], size: Size, *, factor: int) -> Size:
    """Compute the size to which `fetch_video` brings every single frame first.

    It hands its frames to `fetch_image` with the *token* size where the patch size belongs, so this first size is a
    multiple of two tokens, and the default bounds are four times an image's. Kept, as it decides the final size.
    """
    return image_size(element, size, factor=2 * factor)


def video_frame_size(
    element: Mapping[str, Any], size: Size, *, num_frames: int, factor: int, is_file: bool = False
) -> Size:
    """Compute the final size of the frames of a video (`vision_process.fetch_video`), in pixels.

    Args:
        element: keys as for images, and `total_pixels`, which the frames share.
        size: of one frame.
        num_frames: frames that are taken; of a list an odd number counts one more, as the last frame is repeated.
        factor: patch size times merge size.
        is_file: frames of a file are not brought to a first size one by one.

    Raises:
        ImageError: see `smart_resize`.
    """
    if not is_file:
        size, num_frames = first_frame_size(element, size, factor=factor), num_frames + num_frames % FRAME_FACTOR
    low, high = _frame_bounds(element, num_frames, factor)
    return image_size({**element, "min_pixels": low, "max_pixels": high}, size, factor=factor)


def _frame_bounds(element: Mapping[str, Any], num_frames: int, factor: int) -> tuple[float, float]:
    """`min_pixels` and `max_pixels` of each frame: its own bounds and its share of the whole video's."""
    low = number(element, "min_pixels", FRAME_TOKENS[0] * factor**2)
    total = number(element, "total_pixels", MODEL_TOKENS * factor * factor * 0.9)
    share = max(min(FRAME_TOKENS[1] * factor**2, total / num_frames * FRAME_FACTOR), int(low * 1.05))
    return low, min(number(element, "max_pixels", share), share)


def _check_size(height: float, width: float, min_pixels: float, max_pixels: float) -> None:
    seen = f"{height:g} x {width:g} pixels (height x width)"
    if min(height, width) <= 0:
        raise ImageError(f"{seen}: there is nothing in it", "image_zero_size")
    if max_pixels < min_pixels:
        fault = f"max_pixels={max_pixels:g} is below min_pixels={min_pixels:g} (which may be a default); set both"
        raise ImageError(fault, "vision_key")
    if (ratio := max(height, width) / min(height, width)) > MAX_ASPECT_RATIO:
        fault = f"{seen}, an aspect ratio of {ratio:.1f}, more than {MAX_ASPECT_RATIO}, where Qwen's resize rule ends"
        raise ImageError(f"{fault}; cut or pad it", "image_aspect_ratio")
