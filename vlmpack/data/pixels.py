"""One decoded image: upright, and in 8-bit RGB."""

from __future__ import annotations

import numpy as np
from PIL import ExifTags, Image, ImageOps
from PIL.TiffImagePlugin import TiffImageFile

from vlmpack.errors import VlmpackError

_DEEP_GREY = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")
_ON_THEIR_SIDE = (5, 6, 7, 8)
"""EXIF orientations that swap height and width."""


class ImageError(VlmpackError):
    """One image (or video) cannot be used; the collator turns it into a `SampleError` with the sample's index.

    Args:
        message: what was seen and what to do about it.
        reason: a short slug such as ``"image_undecodable"``: the key under which the ledger counts it.
    """

    def __init__(self, message: str, reason: str) -> None:
        self.reason = reason
        self.detail = message
        super().__init__(message)

    def __reduce__(self) -> tuple:
        """Survive the trip from a DataLoader worker."""
        return ImageError, (self.detail, self.reason)


def upright(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation and drop the tag; the image itself where there is nothing to do."""
    try:
        if image.getexif().get(ExifTags.Base.Orientation, 1) == 1:
            return image
        return ImageOps.exif_transpose(image)
    except Exception as error:  # EXIF is a nest of offsets; damaged ones raise errors of every kind
        raise _damaged_exif(error) from error


def upright_size(image: Image.Image) -> tuple[int, int]:
    """(height, width) in pixels that `upright` gives the image, from what was read of it so far.

    Pillow turns TIFF files itself as it decodes them, and has their `size` before that turned or not, by its version.

    Raises:
        ImageError: the EXIF block is damaged.
    """
    width, height = image.size
    try:
        if isinstance(image, TiffImageFile):
            tags = image.tag_v2
            turned = tags.get(ExifTags.Base.Orientation, 1)
            if turned in _ON_THEIR_SIDE:
                width, height = tags[ExifTags.Base.ImageWidth], tags[ExifTags.Base.ImageLength]
        else:
            # Not the image's own `getexif`, which for a PNG decodes all of it.
            turned = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    except Exception as error:
        raise _damaged_exif(error) from error
    return (width, height) if turned in _ON_THEIR_SIDE else (height, width)


def to_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB: transparency over white, deep grey by its full scale, everything else as Pillow converts it."""
    if image.mode in _DEEP_GREY:
        return _from_deep_grey(image)
    try:
        if image.has_transparency_data:
            return _over_white(image)
        return image if image.mode == "RGB" else image.convert("RGB")
    except ValueError as error:
        raise ImageError(f"mode {image.mode} has no way to RGB ({error}); convert it first", "image_mode") from None


def _over_white(image: Image.Image) -> Image.Image:
    rgba = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")


def _from_deep_grey(image: Image.Image) -> Image.Image:
    """Grey of more than 8 bits: full scale goes to 255, rounded to nearest.

    Done here because Pillow's own rule for these modes has changed between versions (clip, or drop the low byte).
    """
    full_scale = 255.0 if image.mode == "F" else 65535.0
    grey = np.asarray(image).astype(np.float64)
    low, high = float(grey.min()), float(grey.max())
    if not (low >= 0.0 and high <= full_scale):  # written so that NaN fails too
        raise ImageError(
            f"the {image.mode} image holds values from {low:g} to {high:g}; only 0 to {full_scale:g} has a known "
            "meaning: convert it to 8 bits first",
            "image_mode",
        )
    if image.mode == "F" and 0.0 < high <= 1.0:
        raise ImageError(
            "the float image ends at 1: it would come out black, as full scale is 255; multiply it by 255 first",
            "image_mode",
        )
    return Image.fromarray(np.rint(grey * (255.0 / full_scale)).astype(np.uint8)).convert("RGB")


def _damaged_exif(error: Exception) -> ImageError:
    return ImageError(
        f"the EXIF block is damaged, so the orientation is unknown ({type(error).__name__}: {error}); "
        "save the image without EXIF",
        "image_exif",
    )
