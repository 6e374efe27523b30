"""Any form in which a dataset may hold an image, to one upright RGB image."""

from __future__ import annotations

import io
import os
import struct
import warnings
import zlib
from collections.abc import Mapping
from typing import Any

from PIL import Image, ImageOps

from vlmpack.errors import SampleError

_BROKEN = (OSError, EOFError, ValueError, SyntaxError, TypeError, KeyError, IndexError, struct.error, zlib.error)
"""What Pillow raises for bytes that are not, or not wholly, an image."""


def to_rgb(value: Any, *, index: int = 0) -> Image.Image:
    """An RGB image, upright, from a PIL image, encoded bytes, a path, or `{"bytes": ..., "path": ...}`.

    The EXIF orientation is applied and removed, so applying it again changes nothing. Transparency is put on white.

    Raises:
        SampleError: nothing there, not an image, cut off, or so many pixels that Pillow calls it a decompression bomb.
    """
    encoded = value
    if isinstance(value, Mapping):
        encoded = value.get("bytes") or value.get("path")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            return _upright(_open(encoded, index))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        message = f"the image is too large ({error}); shrink it before training"
        raise SampleError(message, index=index, reason="image_too_large") from error
    except _BROKEN as error:
        where = encoded if isinstance(encoded, str | os.PathLike) else type(encoded).__name__
        message = f"the image ({where}) cannot be read: {error}; replace the file or leave the sample out"
        raise SampleError(message, index=index, reason="image_unreadable") from error


def _open(encoded: Any, index: int) -> Image.Image:
    if isinstance(encoded, Image.Image):
        return encoded
    if isinstance(encoded, bytes | bytearray):
        return Image.open(io.BytesIO(encoded))
    if isinstance(encoded, str | os.PathLike):
        return Image.open(encoded)
    message = f"image is {'empty' if encoded is None else 'a ' + type(encoded).__name__}"
    remedy = "give a PIL image, encoded bytes, a path, or a dict of 'bytes' and 'path'"
    raise SampleError(f"{message}; {remedy}", index=index, reason="image_unreadable")


def _upright(image: Image.Image) -> Image.Image:
    image.load()
    image = ImageOps.exif_transpose(image)
    if image.mode == "RGB":
        return image
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
