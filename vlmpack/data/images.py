"""One image from whatever a dataset holds: read, checked before it is decoded, upright, RGB.

What `load_image` accepts and what it does with it:

| source                                   | rule                                                                     |
|------------------------------------------|--------------------------------------------------------------------------|
| PIL image                                | used as it stands (its current frame), never changed in place            |
| path, `file://` path                     | a regular local file, at most `ImageLimits.max_bytes`                    |
| bytes                                    | an encoded image                                                         |
| `{"bytes": ..., "path": ...}`            | as `datasets` stores an image: the bytes, or the path where they are None |
| `data:image/...;base64,...`              | the payload, strictly base64                                             |
| `http(s)://` and every other address     | refused: reading a sample never opens a connection                       |

| picture                                  | rule                                                                     |
|------------------------------------------|--------------------------------------------------------------------------|
| EXIF orientation                         | applied once; the tag goes, so applying it again does nothing            |
| alpha, transparent palette or colour     | laid over white                                                          |
| 1, L, P, CMYK, YCbCr, HSV                | Pillow's own conversion to RGB                                           |
| grey deeper than 8 bits (I;16, I, F)     | full scale goes to 255: 65535 for integers, 255 for floats               |
| several frames (GIF, APNG, TIFF, WebP)   | the first one                                                            |

The header is checked against `ImageLimits` before a pixel is decoded. What is cut short is refused (`damage.py`,
`tiff.py`), also where the process has set Pillow's `LOAD_TRUNCATED_IMAGES`.

Beside the encoded image, at most 16 bytes are made for each pixel that `ImageLimits.max_pixels` allows: 5.3 times the
bytes of its RGB. Most are for WebP, whose decoder keeps two pictures of its own. RGB itself, as Pillow holds it, is 4.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from PIL import Image, ImageFile
from PIL.PngImagePlugin import PngImageFile

from vlmpack.data.damage import check_content, filling, has_text_after_pixels
from vlmpack.data.pixels import ImageError, orientation, to_rgb, turned, upright_size
from vlmpack.data.sources import open_source
from vlmpack.data.tiff import check_directory, check_strips, check_tiff
from vlmpack.errors import ConfigError

ImageSource = Image.Image | bytes | bytearray | memoryview | str | Path | Mapping
"""Types that `load_image` accepts."""

SLOW = 16
"""A kind of image that is decoded in Python may have so many times fewer pixels: 4 million of 64."""
_OTHER_TYPES = (
    "give a PIL image, a path, bytes, a {'bytes', 'path'} dict or a data: URI (Image.fromarray makes a PIL image of an "
    "array)"
)
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")


@dataclass(frozen=True, kw_only=True)
class ImageLimits:
    """Limits of an image, checked in its header before decoding."""

    max_pixels: int = 64_000_000
    """Width times height at most; above it a small file can fill the memory (a decompression bomb)."""
    max_aspect_ratio: float = 200.0
    """Longer side over shorter side at most; the resize rule of Qwen's processors fails above 200."""
    max_bytes: int = 256 * 2**20
    """Size of the encoded image at most."""
    formats: tuple[str, ...] = _FORMATS
    """Pillow's names of the file formats that are tried; the content decides, not the file's name."""

    def __post_init__(self) -> None:
        """Refuse formats that Pillow cannot open: a ConfigError."""
        if self.formats != _FORMATS:
            Image.init()
            unknown = sorted(set(self.formats) - set(Image.OPEN))
            if unknown:
                raise ConfigError(f"Pillow opens no format named {unknown}; it knows {sorted(Image.OPEN)}")


DEFAULT_LIMITS = ImageLimits()


def load_image(source: ImageSource, *, limits: ImageLimits = DEFAULT_LIMITS) -> Image.Image:
    """The image as upright 8-bit RGB.

    Args:
        source: see the table at the top of the file.
        limits: caps that are read from the header before decoding.

    Returns:
        A PIL image of mode RGB. A PIL image that is RGB and upright already is returned itself, not copied.

    Raises:
        ImageError: the image cannot be used; the message names the fault and the remedy, `.reason` is a slug.
    """
    with filling.off():
        is_open = isinstance(source, Image.Image)
        image = source if is_open else _open(io.BytesIO(read_encoded(source, limits=limits)), limits)
        _check_header(image, limits)
        check_content(image)
        check_strips(image)
        _decode(image)
        by = orientation(image)
    rgb = to_rgb(image)
    if rgb is image and image is not source and image.format == "WEBP":
        rgb = image.copy()  # without Pillow's decoder, which holds twice as much again
    del image  # what it holds is free before another copy is made
    return turned(rgb, by)


def read_size(source: ImageSource, *, limits: ImageLimits = DEFAULT_LIMITS) -> tuple[int, int]:
    """(height, width) in pixels of `load_image(source)`, from the header: nothing is decoded.

    Of a file no more is read than its header. An image whose pixels are damaged has a size like any other. Only a PNG
    that may hold its orientation behind its pixels is decoded.

    Args:
        source: see the table at the top of the file.
        limits: caps, as for `load_image`.

    Raises:
        ImageError: the image cannot be read, or its header is outside the limits.
    """
    with filling.off():
        if isinstance(source, Image.Image):
            return _size(source, limits)
        with _file(source, limits) as file, _open(file, limits) as image:
            return _size(image, limits)


def _size(image: Image.Image, limits: ImageLimits) -> tuple[int, int]:
    _check_header(image, limits)
    if isinstance(image, PngImageFile) and image.tile and image.fp and has_text_after_pixels(image.fp):
        _decode(image)  # only then has Pillow read what stands behind the pixels
    return upright_size(image)


def read_encoded(source: ImageSource, *, limits: ImageLimits = DEFAULT_LIMITS) -> bytes:
    """The encoded bytes behind a source that is not a PIL image, as they are.

    Raises:
        ImageError: there are none, they cannot be read, or they are more than the limits allow.
    """
    with _file(source, limits) as file:
        try:
            return file.read()
        except OSError as error:
            raise ImageError(f"the image file cannot be read: {error}", "image_missing") from error


def _file(source: ImageSource, limits: ImageLimits) -> IO[bytes]:
    """The encoded bytes behind a source that is not a PIL image, as an open file."""
    return open_source(source, kind="image", remedy=_OTHER_TYPES, check_bytes=partial(_check_bytes, limits=limits))


def _check_bytes(size: int, limits: ImageLimits) -> None:
    if size > limits.max_bytes:
        raise ImageError(
            f"the encoded image has {size} bytes, more than ImageLimits.max_bytes={limits.max_bytes}; "
            "re-encode it or raise the limit",
            "image_too_large",
        )


def _open(file: IO[bytes], limits: ImageLimits) -> Image.Image:
    """Read the header of an encoded image."""
    _check_bytes(size := file.seek(0, io.SEEK_END), limits)
    if not size:
        raise ImageError("the image is empty (0 bytes); write the file again or drop the sample", "image_undecodable")
    check_directory(file)
    try:
        with warnings.catch_warnings():
            # Pillow warns above 89 million pixels; our own cap answers with an error instead.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(file, formats=limits.formats)
    except Image.DecompressionBombError as error:
        raise ImageError(
            f"the image is too large for Pillow ({error}); scale it down, or raise PIL.Image.MAX_IMAGE_PIXELS as well "
            "as ImageLimits.max_pixels",
            "image_too_large",
        ) from None
    except Exception as error:  # on damaged bytes Pillow's plug-ins raise errors of every kind
        file.seek(0)
        raise ImageError(
            f"{size} bytes starting with {file.read(16)!r} are not an image of the formats "
            f"{', '.join(limits.formats)} ({type(error).__name__}); write the file again, name "
            "another format that Pillow reads in ImageLimits(formats=...), or drop the sample",
            "image_undecodable",
        ) from error


def _check_header(image: Image.Image, limits: ImageLimits) -> None:
    size = width, height = image.size
    if width < 1 or height < 1:
        raise ImageError(f"the image is {width} x {height} pixels: there is nothing in it; drop it", "image_zero_size")
    if width * height > limits.max_pixels:
        raise ImageError(
            f"the image is {width} x {height} = {width * height} pixels, more than "
            f"ImageLimits.max_pixels={limits.max_pixels}; scale it down or raise the limit",
            "image_too_large",
        )
    if max(width, height) > limits.max_aspect_ratio * min(width, height):
        raise ImageError(
            f"the image is {width} x {height} pixels, an aspect ratio of {max(size) / min(size):.1f}, more than "
            f"{limits.max_aspect_ratio:g}, where Qwen's resize rule ends; cut or pad it",
            "image_aspect_ratio",
        )
    if isinstance(image, ImageFile.ImageFile) and image.tile and image.fp:
        check_tiff(image, limits.max_pixels)
        _check_speed(image, limits)


def _check_speed(image: ImageFile.ImageFile, limits: ImageLimits) -> None:
    """Refuse a large image of a kind that Pillow decodes in Python: about a second a megapixel."""
    pixels = image.width * image.height
    if pixels * SLOW > limits.max_pixels and image.tile[0][0] in Image.DECODERS:
        raise ImageError(
            f"the {image.format} image has {pixels} pixels, more than ImageLimits.max_pixels / {SLOW}, and of its kind "
            "Pillow decodes only a million a second; save it as PNG",
            "image_too_large",
        )


def _decode(image: Image.Image) -> None:
    """Decode the pixels now, so that a damaged image fails here and not in a later step."""
    try:
        image.load()
    except Exception as error:  # on damaged bytes Pillow's decoders raise errors of every kind
        raise ImageError(
            f"the {image.format or 'image'} data of {image.width} x {image.height} pixels are damaged or cut short "
            f"({type(error).__name__}: {error}); write the file again or drop the sample",
            "image_undecodable",
        ) from error
