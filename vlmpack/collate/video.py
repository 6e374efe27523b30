"""Turn the frames of a video into the patches, grid and times that Qwen's video processors produce.

    list of frames ──size by qwen-vl-utils──────────────────────────────▶ pixels ──▶ patches
    file ──header──▶ frames, rate, size ──sample_frames──▶ decode, resize ──▶ pixels ──▶ patches

transformers' video processors need torchvision, which does not exist for every torch version. This module implements
their math with torch alone, using the settings of the processor's video or image part (`VideoReader.part`).

```
frames            0 1 2 3 4 4     the last one repeated up to a multiple of temporal_patch_size
temporal patches  └0┘ └1┘ └2┘     grid (3, H/patch, W/patch)
```

For a video file:

| the processor has                                          | frames chosen by              | size chosen by        |
|------------------------------------------------------------|-------------------------------|-----------------------|
| a video processor                                          | the video processor           | the video processor   |
| a video processor, and keys beside the video set its size  | the video processor           | qwen-vl-utils         |
| none: it was loaded without torchvision (`load_processor`) | the family's rule with its    | qwen-vl-utils         |
|                                                            | defaults: 2 frames per second |                       |

A video processor may take every frame (`do_sample_frames=False` and no `fps`, as in Qwen2-VL and Qwen2.5-VL). vlmpack
then takes 2 per second, as in these models' training and in qwen-vl-utils; `FrameSampling(fps=None)` takes all frames.

Frames of a file are chosen as in transformers' video processors:

    24 frames, 12 per second    Qwen3-VL, fps=2: 4 frames      linspace, both ends      0       8       15      23
                                Qwen2-VL, fps=2: 4 frames      arange, from 0           0       6       12      18

The indices equal those of `Qwen3VLVideoProcessor.sample_frames` and `Qwen2VLVideoProcessor.sample_frames` (also used by
Qwen2.5-VL) for the same settings. Keys beside a video override the settings for that video, with qwen-vl-utils' names:

| key                          | overrides                                                                            |
|------------------------------|--------------------------------------------------------------------------------------|
| `fps`                        | `FrameSampling.fps`                                                                  |
| `nframes`                    | `FrameSampling.num_frames`; cannot be combined with `fps`                            |
| `min_frames`, `max_frames`   | the settings of the same name, if frames are taken by `fps`                          |
| `video_start`, `video_end`   | the range in seconds from which frames are taken, ends included                      |

`sample_fps` and `raw_fps` are the rates of frames in a list. A file has its own rate: beside a file they are refused.
The times of a list's frames can also be given as `timestamps`, or as `frames_indices` and `fps`, as in transformers'
`VideoMetadata`.

Sizes of images and frames follow the message keys of qwen-vl-utils. A message element may set the size of its picture:

```
{"type": "image", "image": ..., "min_pixels": 50176, "max_pixels": 501760}
{"type": "image", "image": ..., "resized_height": 280, "resized_width": 420}
{"type": "video", "video": [frame, frame, ...], "total_pixels": 20480 * 28 * 28, "sample_fps": 2.0}
```

The rules:

* An image with one of the keys above: the rule of qwen-vl-utils (0.0.14, `vision_process.fetch_image`). This size is
  final: the image processor must be called with `do_resize=False`.
* An image without such a key: the image processor's own rule and bounds.
* A video given as frames: the rule of qwen-vl-utils (`fetch_video`), with or without keys, because the processors' own
  video classes need torchvision.
* A video file with one of the keys, or without a video processor: the same rule without its first step, since frames of
  a file are not resized one by one. Any other video file: the video processor's own rule and bounds.

The two image rules differ for very thin pictures. Rounding a side to a multiple of `factor` may give 0. qwen-vl-utils
raises it to `factor` before it checks the bounds; the processor sees an area of 0 and enlarges the picture. 1 x 199
pixels become 28 x 196 with keys (7 tokens), but 28 x 812 in the processor (29 tokens).

Keys that are None count as absent (columns of a table often are). A number may be given as text (`"sample_fps": "1"`,
as in Qwen's own README). `fps`, `nframes`, `min_frames`, `max_frames`, `video_start` and `video_end` choose the frames
of a video *file*. Beside a list of frames, `fps`, `frames_indices` and `timestamps` give their times, and others are
refused (`check_times`).

Shape legend: F frames, C channels, T temporal patch size, H W pixels, P patches, D = C * T * patch_size ** 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import interpolate

from vlmpack.collate.encoded import Visual
from vlmpack.collate.processor_metadata import ProcessorMetadata, parts_of, pixel_bounds
from vlmpack.data.images import DEFAULT_LIMITS, ImageLimits, load_image, read_size
from vlmpack.data.messages import FILE_KEYS, FRAME_KEYS, RATES, TIMES, VIDEO_KEYS
from vlmpack.data.videos import DEFAULT_VIDEO_LIMITS, VideoHeader, VideoLimits, decode_frames, read_video_header
from vlmpack.errors import ConfigError, SampleError, check_whole_number

Size = tuple[int, int]
"""Height and width, in this order."""
Result = TypeVar("Result")
FILE_TYPES = (str, Path, bytes, bytearray, memoryview, Mapping)
"""Types of a video file; a list is a list of frames."""


Spacing = Literal["linspace", "arange"]
"""Spacing of frames: evenly up to and including the last one (Qwen3-VL), or in equal steps from the first."""
FPS = 2.0
"""Frames taken per second if a processor does not say (`VIDEO_FPS` of qwen-vl-utils)."""
MIN_FRAMES = 2
"""Fewest frames of a video."""


@dataclass(frozen=True, kw_only=True)
class FrameSampling:
    """How many frames to take from a video file; a setting of `VLMCollator`.

    Raises:
        ConfigError: a number is out of range, or both `fps` and `num_frames` are set.
    """

    fps: float | None = FPS
    """Frames to take per second; None: every frame, or `num_frames`."""
    num_frames: int | None = None
    """Frames to take from each video, whatever its length; None: by `fps`."""
    min_frames: int = 4
    """Fewest frames to take by `fps`, if the video has that many."""
    max_frames: int = 768
    """Most frames to take by `fps`."""

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.fps is not None and not (0 < self.fps < math.inf):
            raise ConfigError(f"fps={self.fps} takes no frames; give frames per second above 0, or None for all")
        if self.num_frames is not None:
            check_whole_number("num_frames", self.num_frames, at_least=MIN_FRAMES)
            if self.fps is not None:
                raise ConfigError(f"fps={self.fps} and num_frames={self.num_frames}: only one can hold; set fps=None")
        check_whole_number("min_frames", self.min_frames, at_least=1)
        check_whole_number("max_frames", self.max_frames, at_least=max(self.min_frames, MIN_FRAMES))


@dataclass(frozen=True, kw_only=True)
class Clip:
    """The chosen frames of a video for a processor's own video processor, not decoded yet."""

    shape: tuple[int, int, int, int]
    """[F, H, W, 3]."""
    metadata: tuple[tuple[str, Any], ...]
    """Names and values of transformers' `VideoMetadata`."""
    decode: Callable[[], np.ndarray]
    """Returns the frames, uint8 [F, H, W, 3]."""


@dataclass(frozen=True, kw_only=True)
class VideoReader:
    """Chooses and decodes the frames of videos; for Qwen, also resizes them and cuts them into patches.

    An element is `video` with the keys beside it. `video` is a file (a path, bytes or {"bytes", "path"}) or a list of
    images that `load_image` accepts. The times of a list come from one of these: `sample_fps`, frames per second
    (default 2), with `raw_fps`, the rate for Qwen3-VL's timestamps (default `sample_fps`), as in qwen-vl-utils 0.0.14;
    or `timestamps`, each frame's time in seconds; or `frames_indices`, the frames' indices (default 0, 1, ...), with
    `fps`. For the size keys see `video_frame_size`; for the frames of a file see `sample_frames`.
    """

    processor: Any
    """The processor."""
    metadata: ProcessorMetadata
    """Its metadata."""
    limits: ImageLimits = DEFAULT_LIMITS
    """Size limits for each frame of a list."""
    sampling: FrameSampling | None = None
    """The collator's setting; None: the video processor's own rule."""
    file_limits: VideoLimits = DEFAULT_VIDEO_LIMITS
    """Size limits for files."""

    def load(self, element: Mapping[str, Any], *, is_measured: bool = False) -> Visual:
        """Convert an element to patches by Qwen's rules, with its seconds and timestamps.

        Args:
            element: a video and its keys.
            is_measured: read only headers and make no patches; damage behind a sound header goes unnoticed.

        Raises:
            SampleError: there are no frames; a frame cannot be used (it is named); frames differ in size; or a file or
                a key cannot be used.
            ConfigError: the video is a file, and PyAV is not installed.
        """
        is_file = isinstance(element.get("video"), FILE_TYPES)
        visual, decode = self._of_file(element) if is_file else self._of_list(element)
        return visual if is_measured else replace(visual, pixels=patchify(decode(), self.part))

    def clip(self, element: Mapping[str, Any]) -> Clip:
        """Choose the frames of an element by its video processor's `sample_frames`. All frames of a list are taken.

        Raises:
            SampleError: as in `load`; or this video processor does not read a key.
        """
        name = type(self.part).__name__
        if key := next((key for key in VIDEO_KEYS if element.get(key) is not None), None):
            fault = f"it has {key} beside it, by which Qwen's videos are sized; a {name} sizes all videos alike"
            raise SampleError(f"{fault}: leave it out", "vision_key")
        is_file = isinstance(element.get("video"), FILE_TYPES)
        return self._clip_of_file(element, name) if is_file else self._clip_of_list(element)

    @cached_property
    def part(self) -> Any:
        """The processor's video processor, or its image processor if it was loaded without torchvision."""
        parts = parts_of(self.processor)
        return parts.video_processor or parts.image_processor

    @cached_property
    def rule(self) -> FrameSampling | None:
        """How many frames to take from a file; None: a family with its own `sample_frames` decides."""
        part = parts_of(self.processor).video_processor
        if self.sampling is not None or self.metadata.by_processor:
            return self.sampling
        if part is None:
            return FrameSampling()
        fps = (part.fps or FPS) if part.num_frames is None else None
        limits = {"min_frames": part.min_frames, "max_frames": part.max_frames}
        return FrameSampling(fps=fps, num_frames=part.num_frames, **limits)

    # ------------------------------------------------------------------ Qwen

    @property
    def _factor(self) -> int:
        """Side of a token in pixels."""
        return self.part.patch_size * self.part.merge_size

    def _visual(self, count: int, size: Size, indices: Sequence[float], *, fps: float, seconds: float) -> Visual:
        """Return a measured video of `count` frames, resized to `size`; `indices` are those of `frame_timestamps`."""
        side, depth = self.part.patch_size, self.part.temporal_patch_size
        grid = -(-count // depth), size[0] // side, size[1] // side
        timestamps = frame_timestamps(indices, fps=fps, depth=depth)
        return Visual(pixels=None, grid=grid, seconds=seconds, timestamps=tuple(timestamps))

    def _of_list(self, element: Mapping[str, Any]) -> tuple[Visual, Callable[[], torch.Tensor]]:
        """Return a list of frames as measured, and a function that makes its resized frames, uint8 [F, C, H, W]."""
        video, depth, factor = element.get("video"), self.part.temporal_patch_size, self._factor
        sizes = read_frames(video, read_size, limits=self.limits)
        first = [image_size(element, size, factor=FRAME_FACTOR * factor) for size in sizes]  # as in `video_frame_size`
        final = video_frame_size(element, sizes[0], num_frames=len(sizes), factor=factor)
        for index, size in enumerate(first):
            _check_size_of_frame(index, size, first[0])
        for size in (first[0], final):
            check_enlarged(size, source=sizes[0], factor=factor, num_frames=len(sizes))
        if (times := _times(element, len(sizes))) is not None:
            indices, fps = times, 1.0
            seconds = depth * (times[-1] - times[0]) / max(len(times) - 1, 1) or depth / FPS
        else:  # the repeated last frame counts as a separate frame, as in qwen-vl-utils
            sample_fps = _rate(element, "sample_fps", FPS)
            indices, fps = range(len(sizes) + -len(sizes) % depth), _rate(element, "raw_fps", sample_fps)
            seconds = depth / sample_fps

        def decode() -> torch.Tensor:
            arrays = [
                np.asarray(resize(frame, first[0])) for frame in read_frames(video, load_image, limits=self.limits)
            ]
            frames_FCHW = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous()
            return torch.stack([interpolated(frame, final, as_floats=True) for frame in frames_FCHW])

        return self._visual(len(sizes), final, indices, fps=fps, seconds=seconds), decode

    def _of_file(self, element: Mapping[str, Any]) -> tuple[Visual, Callable[[], torch.Tensor]]:
        """Return a file as measured, and a function that makes its resized frames, uint8 [F, C, H, W]."""
        header, depth = read_video_header(element["video"], limits=self.file_limits), self.part.temporal_patch_size
        assert self.rule is not None, "a Qwen processor"
        spacing = "linspace" if self.metadata.frame_timestamps else "arange"
        first, last = _range(header, element)
        sampling, total = _keyed(element, self.rule), last - first + 1
        taken = sample_frames(total, header.fps, sampling=sampling, spacing=spacing, depth=depth)
        indices, size, count = [first + at for at in taken], (header.height, header.width), len(taken)
        self._check_count(count)
        is_own = self.part is parts_of(self.processor).video_processor and not has_keys(element, VIDEO_KEYS)
        if is_own:
            final = self._own_size(size, count)
        else:
            final = video_frame_size(element, size, num_frames=count, factor=self._factor, is_file=True)
            check_enlarged(final, source=size, factor=self._factor, num_frames=count)

        def decode() -> torch.Tensor:
            """Decode and resize frames one at a time, so that only final pixels stay in memory."""
            frames = []
            for index, frame in self._decoded(element["video"], indices):
                _check_size_of_frame(index, frame.shape[:2], size)
                frame_CHW = torch.from_numpy(frame).permute(2, 0, 1)
                frames.append(interpolated(frame_CHW, final, as_floats=not is_own))
            return torch.stack(frames)

        seconds = depth / (count / total * header.fps)
        return self._visual(count, final, indices, fps=header.fps, seconds=seconds), decode

    def _own_size(self, size: Size, num_frames: int) -> Size:
        """Apply the rule of `Qwen2VLVideoProcessor.resize` (bounds for each frame) or of `Qwen3VLVideoProcessor.resize`
        (bounds for the whole clip)."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as resize_clip

        part, factor, depth = self.part, self._factor, self.part.temporal_patch_size
        low, high = pixel_bounds(part)
        is_per_clip, is_capped = self.metadata.frame_timestamps, getattr(part, "cap_pixels_per_frame", False)
        most = (getattr(part, "max_video_tokens", None) or 0) * factor**2
        if is_per_clip:
            if is_capped:
                high = num_frames * max(min(most, high // num_frames), int(low * 1.05))
            return resize_clip(num_frames, *size, depth, factor, min_pixels=low, max_pixels=high)
        if is_capped:
            high = max(min(high, int(most * 0.9) * depth // num_frames), int(low * 1.05))
        return smart_resize(*size, factor, min_pixels=low, max_pixels=high)

    # ------------------------------------------------------------------ a processor's own video processor

    def _clip_of_list(self, element: Mapping[str, Any]) -> Clip:
        video = element.get("video")
        sizes = read_frames(video, read_size, limits=self.limits)
        for index, size in enumerate(sizes):
            _check_size_of_frame(index, size, sizes[0])
        times = _times(element, len(sizes)) or [at / _rate(element, "sample_fps", FPS) for at in range(len(sizes))]
        metadata = {"total_num_frames": len(sizes), "fps": 1.0, "duration": times[-1], "frames_indices": tuple(times)}
        return Clip(
            shape=(len(sizes), *sizes[0], 3),
            metadata=tuple(metadata.items()),
            decode=lambda: np.stack([np.asarray(x) for x in read_frames(video, load_image, limits=self.limits)]),
        )

    def _clip_of_file(self, element: Mapping[str, Any], name: str) -> Clip:
        video, part = element["video"], self.part
        header = read_video_header(video, limits=self.file_limits)
        chosen = {} if self.sampling is None else {"fps": self.sampling.fps, "num_frames": self.sampling.num_frames}
        chosen |= {ours: element.get(key) for key, ours in _CHOOSING.items() if element.get(key) is not None}
        chosen = {key: value for key, value in chosen.items() if value is not None}
        read = [key for key in _CHOOSING.values() if key in signature(part.sample_frames).parameters]
        unread = [*(chosen.keys() - read), *(key for key in FILE_KEYS[2:] if element.get(key) is not None)]
        if unread:
            reads = " and ".join(read) or "its own settings alone"
            raise SampleError(f"{unread[0]} chooses no frames of a {name}; it reads {reads}", "vision_key")
        duration = header.num_frames / header.fps
        metadata = {"total_num_frames": header.num_frames, "fps": header.fps, "duration": duration}
        metadata |= {"height": header.height, "width": header.width, "video_backend": "pyav"}
        indices = range(header.num_frames)
        if chosen or part.do_sample_frames:
            from transformers.video_utils import VideoMetadata

            own = {key: getattr(part, key, None) for key in part.valid_kwargs.__annotations__}
            own |= {**dict.fromkeys(_CHOOSING.values()), **chosen} if chosen else {}
            try:
                indices = [int(at) for at in part.sample_frames(metadata=VideoMetadata(**metadata), **own)]
            except ValueError as error:
                raise SampleError(f"its video processor takes no frames of it: {error}", "video_frames") from error
        self._check_count(len(indices))

        def decode() -> np.ndarray:
            frames = dict(self._decoded(video, sorted({*indices})))
            return np.stack([frames[at] for at in indices])

        taken = (*metadata.items(), ("frames_indices", tuple(indices)))
        return Clip(shape=(len(indices), header.height, header.width, 3), metadata=taken, decode=decode)

    def _check_count(self, count: int) -> None:
        if not 0 < count <= (most := self.file_limits.max_sampled):
            fault = f"{count} frames would be taken of it, and VideoLimits.max_sampled={most}; lower fps"
            raise SampleError(fault, "video_too_large")

    def _decoded(self, video: Any, indices: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        return zip(indices, decode_frames(video, indices, limits=self.file_limits), strict=True)


_CHOOSING = {"fps": "fps", "nframes": "num_frames"}
"""Keys beside a file, and their names in video processors."""


# ---------------------------------------------------------------------- frames to patches


def read_frames(video: Any, read: Callable[..., Result], *, limits: ImageLimits = DEFAULT_LIMITS) -> list[Result]:
    """Read each frame of a video with `load_image` or `read_size`.

    Raises:
        SampleError: there are none, or one cannot be used.
    """
    if isinstance(video, str | bytes) or not isinstance(video, Sequence):
        fault = f"a video of type {type(video).__name__} cannot be read; give its file (a path or bytes)"
        raise SampleError(f"{fault}, or a list of its frames as images", "video_source")
    if not video:
        raise SampleError("the video has no frames; give at least one or drop the sample", "video_frames")
    results = []
    for index, frame in enumerate(video):
        try:
            results.append(read(frame, limits=limits))
        except SampleError as error:
            raise error.within(f"frame {index}") from error
    return results


def _check_size_of_frame(index: int, size: Size, first: Size) -> None:
    if size != first:
        seen = f"frame {index} is {size[1]} x {size[0]} pixels (width x height) and frame 0 {first[1]} x {first[0]}"
        raise SampleError(f"{seen}; all frames of a video must have one size", "video_frames")


def interpolated(frame: torch.Tensor, size: Size, *, as_floats: bool) -> torch.Tensor:
    """Resize uint8 `[C, H, W]` as torchvision does.

    Args:
        frame: the frame.
        size: height and width.
        as_floats: resize float32 and round, like `resize` in qwen-vl-utils. False: resize uint8, like `transforms.v2`,
            which transformers uses for videos.
    """
    if tuple(frame.shape[-2:]) == size:
        return frame
    values = frame[None].float() if as_floats else frame[None]
    (resized,) = interpolate(values, size=size, mode="bicubic", antialias=True)
    return resized.clamp(0, 255).round().to(torch.uint8) if as_floats else resized


def patchify(frames_FCHW: torch.Tensor, part: Any) -> torch.Tensor:
    """Split frames into the patches of Qwen's vision tower.

    Follows `Qwen2VLVideoProcessor.patchify` (Qwen3-VL's is equal). The last frame is repeated up to a multiple of the
    temporal patch size. Patches are ordered by t, then by blocks of merge_size x merge_size patches row by row, then
    within a block. The values of a patch are ordered by channel, frame, row, column. They are
    `(v * rescale - mean) / std`, rounded as in the image processor (PIL back-end), so that a still video equals the
    still image bit for bit.

    Args:
        frames_FCHW: uint8; the sides are multiples of patch_size * merge_size.
        part: the processor's video or image part, for the sizes of patches and the normalization.

    Returns:
        Patches `[P, D]` float32.
    """
    depth, side, merge = part.temporal_patch_size, part.patch_size, part.merge_size
    missing = -len(frames_FCHW) % depth
    frames_FCHW = torch.cat([frames_FCHW, frames_FCHW[-1:].expand(missing, -1, -1, -1)])
    frames, channels, height, width = frames_FCHW.shape
    grid = frames // depth, height // side, width // side
    blocks = frames_FCHW.reshape(
        grid[0], depth, channels, grid[1] // merge, merge, side, grid[2] // merge, merge, side
    ).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    levels = blocks.reshape(grid[0] * grid[1] * grid[2], channels, depth * side * side).numpy()
    table = _value_table(part)
    patches = np.stack([table[c][levels[:, c]] for c in range(channels)], axis=1)
    return torch.from_numpy(patches.reshape(len(patches), -1))


def _times(element: Mapping[str, Any], count: int) -> list[float] | None:
    """Return each list frame's time in seconds, as in transformers' `VideoMetadata`. None: no key gives times.

    Raises:
        SampleError: the keys contradict each other, or do not match the number of frames.
    """
    given = [key for key in (*FRAME_KEYS, "fps", *RATES) if element.get(key) is not None]
    if not given or given[0] in RATES:
        return None
    values = element.get(given[0], ()) if given[0] != "fps" else range(count)
    if given not in (["timestamps"], ["frames_indices", "fps"], ["fps"]):
        fault = f"{' and '.join(given)} beside its frames: give timestamps, or fps and frames_indices, or sample_fps"
        raise SampleError(fault, "vision_key")
    fps = 1.0 if given == ["timestamps"] else _rate(element, "fps", FPS)
    is_rising = isinstance(values, Sequence) and len(values) == count and [*values] == sorted(values)
    if not is_rising or not all(isinstance(value, int | float) and value >= 0 for value in values):
        fault = f"{given[0]}={values!r:.60} must be a rising list of numbers, one for each of its {count} frame(s)"
        raise SampleError(fault, "vision_key")
    return [value / fps for value in values]


def frame_timestamps(indices: Sequence[float], *, fps: float, depth: int = 2) -> list[float]:
    """Compute the time of each temporal patch in seconds: the mean of its first and last frames' times.

    Source: `Qwen3VLProcessor._calculate_timestamps`. Qwen3-VL writes them before each patch as `<0.5 seconds>`.

    Args:
        indices: index of each frame at `fps`; an incomplete last patch is filled with its last frame.
        fps: frame rate to which `indices` refer.
        depth: frames in one patch.
    """
    filled = [*indices, *[indices[-1]] * (-len(indices) % depth)]
    return [(filled[i] / fps + filled[i + depth - 1] / fps) / 2 for i in range(0, len(filled), depth)]


def _value_table(part: Any) -> np.ndarray:
    """Compute the normalized value of each pixel value in each channel, float32 `[C, 256]`."""
    mean, std = (part.image_mean, part.image_std) if part.do_normalize else ([0.0] * 3, [1.0] * 3)
    mean_C, std_C = (np.array(values, np.float32)[:, None] for values in (mean, std))
    rescaled = np.arange(256, dtype=np.float64) * (part.rescale_factor if part.do_rescale else 1.0)
    return (rescaled.astype(np.float32) - mean_C) / std_C


def _rate(element: Mapping[str, Any], key: str, default: float) -> float:
    if rate := number(element, key, default):
        return rate
    raise SampleError(f"{key}=0 frames per second has no meaning; give the rate of the frames", "vision_key")


# ---------------------------------------------------------------------- which frames of a file


def sample_frames(total: int, fps: float, *, sampling: FrameSampling, spacing: Spacing, depth: int) -> list[int]:
    """Choose frames of a video as transformers does.

    Args:
        total: number of frames to choose from.
        fps: their rate.
        sampling: how many frames to take.
        spacing: spacing of the family's video processor.
        depth: frames in one patch.

    Raises:
        SampleError: there are too few frames (`video_frames`).
    """
    count = _count(total, fps, sampling, spacing, depth)
    if count > total:
        raise SampleError(f"{count} frames are to be taken of {total}; lower nframes (or num_frames)", "video_frames")
    if count < MIN_FRAMES:
        fault = f"of its {total} frame(s) at {fps:g} per second {count} would be taken, and a video has at least"
        raise SampleError(f"{fault} {MIN_FRAMES}; raise fps, or give the frame as an image", "video_frames")
    if spacing == "linspace":
        return np.linspace(0, total - 1, count).round().astype(int).tolist()
    # rounding may make `arange` return one more index, `total` itself, which is no frame
    return torch.arange(0, total, total / count).int()[:count].tolist()


def _count(total: int, fps: float, sampling: FrameSampling, spacing: Spacing, depth: int) -> int:
    """Compute the number of frames to take, exactly as transformers does, including its rounding."""
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
    """Override the settings with the keys beside one video."""
    names = {"nframes": "num_frames", "min_frames": "min_frames", "max_frames": "max_frames"}
    changes: dict[str, Any] = {"fps": None, "num_frames": None} if has_keys(element, tuple(_CHOOSING)) else {}
    if element.get("fps") is not None:
        changes["fps"] = number(element, "fps", FPS)
    changes |= {name: _whole(element, key) for key, name in names.items() if element.get(key) is not None}
    try:
        return replace(sampling, **changes)
    except ConfigError as error:
        raise SampleError(f"the keys beside it: {error}", "vision_key") from error


def _whole(element: Mapping[str, Any], key: str) -> int:
    value = number(element, key, 0.0)
    if value != int(value):
        raise SampleError(f"{key}={element[key]!r:.80} must be a whole number of frames", "vision_key")
    return int(value)


def _range(header: VideoHeader, element: Mapping[str, Any]) -> tuple[int, int]:
    """Return the first and last frame between `video_start` and `video_end` (`calculate_video_frame_range`)."""
    duration = header.num_frames / header.fps
    start = min(number(element, "video_start", 0.0), duration)
    end = min(number(element, "video_end", duration), duration)
    first = math.ceil(start * header.fps)
    last = min(math.floor(end * header.fps), header.num_frames - 1)
    if first >= last and any(element.get(key) is not None for key in ("video_start", "video_end")):
        seen = f"between video_start={start:g} and video_end={end:g} seconds lie fewer than {MIN_FRAMES} frames of its"
        rate = f"{header.num_frames} at {header.fps:g} per second ({duration:g} seconds)"
        raise SampleError(f"{seen} {rate}; widen it or leave both out", "vision_key")
    return first, last


# ---------------------------------------------------------------------- sizes from the keys of qwen-vl-utils

IMAGE_KEYS = VIDEO_KEYS[:4]
"""Keys of an image element that set its size."""

MAX_ASPECT_RATIO = 200
IMAGE_TOKENS = (4, 16384)
"""Default minimum and maximum tokens of an image (`IMAGE_MIN_TOKEN_NUM`, `IMAGE_MAX_TOKEN_NUM`)."""
FRAME_TOKENS = (128, 768)
"""Default minimum and maximum tokens of a video frame (`VIDEO_MIN_TOKEN_NUM`, `VIDEO_MAX_TOKEN_NUM`)."""
MODEL_TOKENS = 128_000
"""A video without `total_pixels` may use nine tenths of this (`MODEL_SEQ_LEN`; no environment variable is read)."""
FRAME_FACTOR = 2
"""Frames that share one temporal patch."""
ENLARGED_TOKENS = 4 * IMAGE_TOKENS[1]
"""Most tokens to which keys beside a video can enlarge all its frames together."""


def has_keys(element: Mapping[str, Any], keys: Sequence[str] = IMAGE_KEYS) -> bool:
    """Return whether the element sets its size by a key, so that qwen-vl-utils' rule replaces the processor's."""
    return any(element.get(key) is not None for key in keys)


def check_times(element: Mapping[str, Any], *, is_file: bool) -> None:
    """Refuse keys beside a video that choose its frames or give their times, but that nothing would read.

    Raises:
        SampleError: there is such a key (reason ``"vision_key"``).
    """
    unread = (*FRAME_KEYS, *RATES) if is_file else FILE_KEYS[1:]
    remedy = "frames of a list are all taken, at the times of timestamps, of frames_indices and fps, or of sample_fps"
    if is_file:
        remedy = "a file's frames have their times in it: choose them by fps, nframes, video_start and video_end"
    for key in (*unread, *TIMES):
        if element.get(key) is not None:
            fault = f"{key}={element[key]!r:.60} beside it is not read: {remedy}; leave it out"
            raise SampleError(fault, "vision_key")


def number(element: Mapping[str, Any], key: str, default: float) -> float:
    """Return the finite, non-negative number under a key, or `default` if the key is absent or None.

    Raises:
        SampleError: the value is anything else (reason ``"vision_key"``).
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
    raise SampleError(f"{key}={value!r:.80} must be a number, finite and not negative", "vision_key")


def smart_resize(
    height: float, width: float, *, factor: int, min_pixels: float | None = None, max_pixels: float | None = None
) -> Size:
    """Compute the size of a picture by the rule of qwen-vl-utils (`vision_process.smart_resize`, 0.0.14).

    Both sides are multiples of `factor`, their product lies between the bounds, and the aspect ratio is kept as well as
    that allows.

    Args:
        height, width: pixels.
        factor: side of a token in pixels: patch size times merge size.
        min_pixels, max_pixels: bounds; None: 4 and 16384 tokens.

    Returns:
        Height and width in pixels.

    Raises:
        SampleError: the aspect ratio is above 200, the bounds exclude each other, or a side would be 0.
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
        raise SampleError(f"{fault}; raise max_pixels or make the picture less thin", "vision_key")
    return size


def image_size(element: Mapping[str, Any], size: Size, *, factor: int) -> Size:
    """Compute the size of an image in pixels from its element's keys (`vision_process.fetch_image`).

    `resized_height` and `resized_width` override the image's size and the bounds. `min_pixels` and `max_pixels` bound
    the area.

    Args:
        element: the image's keys.
        size: the image's size.
        factor: side of a token in pixels: patch size times merge size.

    Raises:
        SampleError: see `smart_resize`; also if only one of `resized_height` and `resized_width` is set, which
            qwen-vl-utils ignores.
    """
    height, width = element.get("resized_height"), element.get("resized_width")
    if (height is None) != (width is None):
        raise SampleError(f"resized_height={height} and resized_width={width}: give both or none", "vision_key")
    if height is not None:
        forced = number(element, "resized_height", 0.0), number(element, "resized_width", 0.0)
        return smart_resize(*forced, factor=factor)
    low = number(element, "min_pixels", IMAGE_TOKENS[0] * factor**2)
    high = number(element, "max_pixels", IMAGE_TOKENS[1] * factor**2)
    return smart_resize(*size, factor=factor, min_pixels=low, max_pixels=high)


def check_enlarged(size: Size, *, source: Size, factor: int, num_frames: int = 1) -> None:
    """Refuse to enlarge a picture beyond what the rule does without keys, to bound memory and time.

    Keys could set any size for a small picture. An image may get at most the larger of its present size and
    `IMAGE_TOKENS[1]` tokens. A video frame is also limited to its share of `ENLARGED_TOKENS`, but that share is at
    least `FRAME_TOKENS[1]`.

    Args:
        size: the size that the keys set.
        source: the picture's size.
        factor: side of a token in pixels: patch size times merge size.
        num_frames: number of frames of that size.

    Raises:
        SampleError: the size is larger (reason ``"vision_key"``).
    """
    share = max(FRAME_TOKENS[1], ENLARGED_TOKENS // num_frames)
    tokens = math.ceil(source[0] / factor) * math.ceil(source[1] / factor)
    most = max(tokens, min(IMAGE_TOKENS[1], share))
    if size[0] * size[1] > most * factor**2:
        sizes = f"from {source[1]} x {source[0]} to {size[1]} x {size[0]} pixels (width x height"
        frames = f", {num_frames} frames" if num_frames > 1 else ""
        remedy = "lower min_pixels, resized_height and resized_width"
        most_said = f"more than the {most} tokens of {factor} x {factor} pixels that it can have at most"
        raise SampleError(f"the keys beside it enlarge it {sizes}{frames}), {most_said}; {remedy}", "vision_key")


def resize(image: Image.Image, size: Size) -> Image.Image:
    """Resize an image bicubically, with the same pixels as in `fetch_image`."""
    return image.resize((size[1], size[0]), Image.Resampling.BICUBIC)


def video_frame_size(
    element: Mapping[str, Any], size: Size, *, num_frames: int, factor: int, is_file: bool = False
) -> Size:
    """Compute the final size of a video's frames in pixels (`vision_process.fetch_video`).

    `fetch_video` first resizes the frames of a list one by one, and passes the *token* size to `fetch_image` in place
    of the patch size. This first size is therefore a multiple of two tokens, and its default bounds are four times
    those of an image. Kept, because it affects the final size.

    Args:
        element: the keys of images, and `total_pixels`, which the frames share.
        size: size of one frame.
        num_frames: frames that are taken; for a list, an odd number is rounded up, as the last frame is repeated.
        factor: side of a token in pixels: patch size times merge size.
        is_file: True: skip the first step, which resizes frames one by one.

    Raises:
        SampleError: see `smart_resize`.
    """
    if not is_file:
        size, num_frames = (
            image_size(element, size, factor=FRAME_FACTOR * factor),
            num_frames + num_frames % FRAME_FACTOR,
        )
    low = number(element, "min_pixels", FRAME_TOKENS[0] * factor**2)
    total = number(element, "total_pixels", MODEL_TOKENS * factor * factor * 0.9)
    share = max(min(FRAME_TOKENS[1] * factor**2, total / num_frames * FRAME_FACTOR), int(low * 1.05))
    high = min(number(element, "max_pixels", share), share)
    return image_size({**element, "min_pixels": low, "max_pixels": high}, size, factor=factor)


def _check_size(height: float, width: float, min_pixels: float, max_pixels: float) -> None:
    seen = f"{height:g} x {width:g} pixels (height x width)"
    if min(height, width) <= 0:
        raise SampleError(f"{seen}: there is nothing in it", "image_zero_size")
    if max_pixels < min_pixels:
        fault = f"max_pixels={max_pixels:g} is below min_pixels={min_pixels:g} (which may be a default); set both"
        raise SampleError(fault, "vision_key")
    if (ratio := max(height, width) / min(height, width)) > MAX_ASPECT_RATIO:
        fault = f"{seen}, an aspect ratio of {ratio:.1f}, more than {MAX_ASPECT_RATIO}, where Qwen's resize rule ends"
        raise SampleError(f"{fault}; cut or pad it", "image_aspect_ratio")
