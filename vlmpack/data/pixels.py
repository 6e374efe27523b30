"""One decoded image: upright, and in 8-bit RGB."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from PIL import ExifTags, Image
from PIL.TiffImagePlugin import TiffImageFile

from vlmpack.errors import VlmpackError

_DEEP_GREY = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")
_ON_THEIR_SIDE = (5, 6, 7, 8)
"""EXIF orientations that swap height and width."""
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The turn that brings an image upright, by its EXIF orientation: that of `ImageOps.exif_transpose`."""
_TELL_ORIENTATION = ("exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp")
"""Where Pillow keeps what an orientation is read from."""
_PIXELS_AT_ONCE = 2**18
"""Pixels of a large image that are converted together."""


class ImageError(VlmpackError):
    """One image (or video) cannot be used; the collator turns it into a `SampleError` with the sample's index.

    Args:
        message: what was seen and what to do about it.
        reason: a short slug such as ``"image_undecodable"``: the key under which it is counted.
    """

    def __init__(self, message: str, reason: str) -> None:
        self.reason = reason
        self.detail = message
        super().__init__(message)

    def __reduce__(self) -> tuple:
        """Survive the trip from a DataLoader worker."""
        return ImageError, (self.detail, self.reason)


def orientation(image: Image.Image) -> int:
    """The orientation that EXIF or XMP gives a decoded image, 1 to 8; others that a file may hold are none to Pillow.

    Raises:
        ImageError: the EXIF block is damaged.
    """
    return _orientation(image.getexif)


def turned(image: Image.Image, by: int) -> Image.Image:
    """Apply an EXIF orientation and drop the metadata that give it; the image itself where there is nothing to do."""
    if by not in _TURNS:
        return image
    result = image.transpose(_TURNS[by])
    for name in _TELL_ORIENTATION:
        result.info.pop(name, None)
    return result


def upright_size(image: Image.Image) -> tuple[int, int]:
    """(height, width) in pixels of the image when it is decoded and turned, from what was read of it so far.

    Pillow turns TIFF files itself as it decodes them, and has their `size` before that turned or not, by its version.

    Raises:
        ImageError: the EXIF block is damaged.
    """
    width, height = image.size
    if isinstance(image, TiffImageFile) and image.tile:  # not decoded
        width, height = image.tag_v2[ExifTags.Base.ImageWidth], image.tag_v2[ExifTags.Base.ImageLength]
    # Not the image's own `getexif`, which for a PNG decodes all of it.
    by = _orientation(lambda: Image.Image.getexif(image))
    return (width, height) if by in _ON_THEIR_SIDE else (height, width)


def _orientation(read: Callable[[], Mapping[int, Any]]) -> int:
    try:
        by = read().get(ExifTags.Base.Orientation, 1)
        return by if by in _TURNS else 1
    except Exception as error:  # EXIF is a nest of offsets; damaged ones raise errors of every kind
        raise ImageError(
            f"the EXIF block is damaged, so the orientation is unknown ({type(error).__name__}: {error}); "
            "save the image without EXIF",
            "image_exif",
        ) from error


def to_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB: transparency over white, deep grey by its full scale, everything else as Pillow converts it.

    A large image is converted some rows at a time: beside it and the result hardly any memory is used.
    """
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    if image.mode in _DEEP_GREY:
        _check_range(image)
    if image.width * image.height <= _PIXELS_AT_ONCE:
        return _part_to_rgb(image)
    result = Image.new("RGB", image.size)
    for top, part in _parts(image):
        result.paste(_part_to_rgb(part), (0, top))
    return result


def _parts(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Some rows at a time, and the first of them."""
    rows = max(1, _PIXELS_AT_ONCE // image.width)
    for top in range(0, image.height, rows):
        yield top, image.crop((0, top, image.width, min(top + rows, image.height)))


def _part_to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in _DEEP_GREY:
        return _from_deep_grey(image)
    try:
        return _over_white(image) if image.has_transparency_data else image.convert("RGB")
    except ValueError as error:
        raise ImageError(f"mode {image.mode} has no way to RGB ({error}); convert it first", "image_mode") from None


def _over_white(image: Image.Image) -> Image.Image:
    rgba = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")


def _from_deep_grey(image: Image.Image) -> Image.Image:
    """Grey of more than 8 bits: full scale goes to 255, rounded to nearest.

    Done here because Pillow's own rule for these modes has changed between versions (clip, or drop the low byte).
    """
    grey = np.asarray(image).astype(np.float64)
    return Image.fromarray(np.rint(grey * (255.0 / _full_scale(image))).astype(np.uint8)).convert("RGB")


def _full_scale(image: Image.Image) -> float:
    return 255.0 if image.mode == "F" else 65535.0


def _check_range(image: Image.Image) -> None:
    """Refuse deep grey whose values have no known meaning."""
    ends = np.asarray([(grey.min(), grey.max()) for _, part in _parts(image) for grey in [np.asarray(part)]])
    low, high = float(ends.min()), float(ends.max())  # NaN where one of them is
    if not (low >= 0.0 and high <= _full_scale(image)):  # written so that NaN fails too
        raise ImageError(
            f"the {image.mode} image holds values from {low:g} to {high:g}; only 0 to {_full_scale(image):g} has a "
            "known meaning: convert it to 8 bits first",
            "image_mode",
        )
    if image.mode == "F" and 0.0 < high <= 1.0:
        raise ImageError(
            "the float image ends at 1: it would come out black, as full scale is 255; multiply it by 255 first",
            "image_mode",
        )
