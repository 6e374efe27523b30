"""The resize rule of the Qwen image processors: from an image's size to its grid of patches."""

from __future__ import annotations

import math

from vlmpack.layout import Grid

MAX_ASPECT_RATIO = 200
"""Images longer than this many times their width are refused by the processors."""


def grid_from_size(height: int, width: int, *, patch_size: int, merge: int, min_pixels: int, max_pixels: int) -> Grid:
    """(1, rows, columns) of patches of an image of this size, all sizes in pixels.

    The rule is `smart_resize` of transformers' `Qwen2VLImageProcessor`, which every family with images uses: both sides
    become multiples of `patch_size * merge`, the area is brought between `min_pixels` and `max_pixels`, and the
    aspect ratio is kept as well as that allows.

    Raises:
        ValueError: an empty image, or one more than 200 times as long as it is wide.
    """
    if min(height, width) < 1:
        raise ValueError(f"an image of {height} x {width} pixels has no grid")
    if (ratio := max(height, width) / min(height, width)) > MAX_ASPECT_RATIO:
        raise ValueError(
            f"an image of {height} x {width} pixels is {ratio:.0f} times as long as it is wide; "
            f"the limit is {MAX_ASPECT_RATIO}: crop it, or leave it out"
        )
    unit = patch_size * merge
    rows, columns = round(height / unit), round(width / unit)
    if rows * columns * unit**2 > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        rows, columns = (max(1, math.floor(side / shrink / unit)) for side in (height, width))
    elif rows * columns * unit**2 < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows, columns = (math.ceil(side * grow / unit) for side in (height, width))
    return 1, rows * merge, columns * merge
