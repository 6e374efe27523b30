"""Sizes of images and frames: the message keys of qwen-vl-utils, and its rule.

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
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from PIL import Image

from vlmpack.data.images import ImageError
from vlmpack.data.messages import FILE_KEYS, FRAME_KEYS, VIDEO_KEYS

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

Size = tuple[int, int]
"""Height and width, in that order."""


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


def has_video_keys(element: Mapping[str, Any]) -> bool:
    """Return whether the element sizes its video, so that qwen-vl-utils' rule applies and not the processor's."""
    return any(element.get(key) is not None for key in VIDEO_KEYS)


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
