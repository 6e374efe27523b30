"""One image from whatever a dataset holds: read, checked before it is decoded, upright, RGB.

| source                                   | rule                                                                      |
|------------------------------------------|---------------------------------------------------------------------------|
| PIL image                                | used as it stands (its current frame), never changed in place             |
| path, `file://` path                     | a regular local file, at most `ImageLimits.max_bytes`                     |
| bytes                                    | an encoded image                                                          |
| `{"bytes": ..., "path": ...}`            | as `datasets` stores an image: the bytes, or the path where they are None |
| `data:image/...;base64,...`              | the payload, strictly base64                                              |
| `http(s)://` and every other address     | refused: reading a sample never opens a connection                        |

| picture                                  | rule                                                                      |
|------------------------------------------|---------------------------------------------------------------------------|
| EXIF orientation                         | applied once; the tag goes, so applying it again does nothing             |
| alpha, transparent palette or colour     | laid over white                                                           |
| 1, L, P, CMYK, YCbCr, HSV                | Pillow's own conversion to RGB                                            |
| grey deeper than 8 bits (I;16, I, F)     | full scale goes to 255: 65535 for integers, 255 for floats                |
| several frames (GIF, APNG, TIFF, WebP)   | the first one                                                             |

The header is checked against `ImageLimits` before a pixel is decoded. What Pillow cannot decode is refused, and so are
PNGs and JPEGs without their end, which Pillow would fill with black or grey.

Beside the encoded image, at most 16 bytes are made for each pixel that `ImageLimits.max_pixels` allows: 5.3 times the
bytes of its RGB. Most are for WebP, whose decoder keeps two pictures of its own. RGB itself, as Pillow holds it, is 4.
"""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from errno import ENAMETOOLONG
from pathlib import Path
from stat import S_ISREG
from typing import IO, Any, Literal
from urllib.parse import unquote

import numpy as np
from PIL import ExifTags, Image, ImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile

from vlmpack.errors import VlmpackError

ImageSource = Image.Image | bytes | bytearray | memoryview | str | Path | Mapping
"""Types that `load_image` accepts."""

_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
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
"""EXIF orientation -> the transposition that brings the image upright, as in `ImageOps.exif_transpose`."""
_ORIENTATION_KEYS = ("exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp")
"""Keys of `Image.info` from which Pillow reads an orientation."""
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
    is_open = isinstance(source, Image.Image)
    image = source if is_open else _open(io.BytesIO(read_encoded(source, limits=limits)), limits)
    _check_header(image, limits)
    _decode(image)
    turn = _orientation(image.getexif)
    rgb = _to_rgb(image)
    if rgb is image and image is not source and image.format == "WEBP":
        rgb = image.copy()  # without Pillow's decoder, which holds twice as much again
    del image  # what it holds is free before another copy is made
    if turn == 1:
        return rgb
    upright = rgb.transpose(_TURNS[turn])
    for name in _ORIENTATION_KEYS:
        upright.info.pop(name, None)
    return upright


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
    if isinstance(source, Image.Image):
        return _size(source, limits)
    file = open_source(source, kind="image", max_bytes=limits.max_bytes)
    with file, _open(file, limits) as image:
        return _size(image, limits)


def read_encoded(source: ImageSource, *, limits: ImageLimits = DEFAULT_LIMITS) -> bytes:
    """The encoded bytes behind a source that is not a PIL image, as they are.

    Raises:
        ImageError: there are none, they cannot be read, or they are more than the limits allow.
    """
    with open_source(source, kind="image", max_bytes=limits.max_bytes) as file:
        try:
            return file.read()
        except OSError as error:
            raise ImageError(f"the image file cannot be read: {error}", "image_missing") from error


# ---------------------------------------------------------------------- encoded bytes


def open_source(source: Any, *, kind: Literal["image", "video", "audio"], max_bytes: int) -> IO[bytes]:
    """Open the encoded bytes of an image, a video or an audio: a file, and never a connection.

    Args:
        source: see the table at the top of the file.
        kind: what it is, the first word of the reason of an error.
        max_bytes: its size at most.

    Raises:
        ImageError: there are none (`image_missing`, `image_remote`, `image_source`, `image_undecodable`, or the same
            with `video` or `audio`), or too many (`image_too_large`).
    """
    file = _opened(source, kind)
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    if 0 < size <= max_bytes:
        return file
    file.close()
    if not size:
        raise ImageError(
            f"the {kind} is empty (0 bytes); write the file again or drop the sample", f"{kind}_undecodable"
        )
    limits = "ImageLimits" if kind == "image" else "VideoLimits"
    fault = f"the encoded {kind} has {size} bytes, more than {limits}.max_bytes={max_bytes}; re-encode it or"
    raise ImageError(f"{fault} raise the limit", f"{kind}_too_large")


def _opened(source: Any, kind: str) -> IO[bytes]:
    if isinstance(source, Mapping):
        content = next((source[key] for key in ("bytes", "path") if source.get(key) is not None), None)
        if content is None:
            keys = sorted(map(str, source))
            raise ImageError(f"a dict of the {kind} must hold 'bytes' or 'path'; its keys: {keys}", f"{kind}_source")
        return _opened(content, kind)
    if isinstance(source, str):
        source = _path_or_bytes(source, kind)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return io.BytesIO(source)
    if isinstance(source, Path):
        return _open_file(source, kind)
    others = {"image": "a PIL image (of an array: Image.fromarray) or a data: URI", "video": "a list of frames"}
    fault = f"the {kind} is of type {type(source).__name__}, which cannot be read; give the path of its file, its bytes"
    raise ImageError(f"{fault}, a {{'bytes', 'path'}} dict, or {others.get(kind, 'an array [n]')}", f"{kind}_source")


def _path_or_bytes(text: str, kind: str) -> Path | bytes:
    scheme = text.split(":", 1)[0].lower()
    if scheme == "file" and text[4:7] == "://":
        # Literal, as qwen-vl-utils reads it, or percent-decoded (RFC 8089) if there is no such file.
        rest = text[len("file://localhost" if text[7:17] == "localhost/" else "file://") :]
        try:
            return Path(rest) if Path(rest).is_file() else Path(unquote(rest))
        except (OSError, ValueError):  # a name too long, a null byte
            return Path(unquote(rest))
    if scheme != "data":
        if "://" not in text[:32]:
            return Path(text)
        fault = f"the {kind} address {_short(text)} is remote; nothing is fetched while samples are read: download the"
        raise ImageError(f"{fault} {kind} first and give its path or bytes", f"{kind}_remote")
    header, _, payload = text.partition(",")
    if not header.lower().endswith(";base64"):
        example = {"image": "data:image/png", "video": "data:video/mp4", "audio": "data:audio/wav"}[kind]
        raise ImageError(f"the data URI {_short(text)} is no {example};base64,<payload>", f"{kind}_source")
    try:
        return base64.b64decode("".join(payload.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"the data URI {_short(text)} is not valid base64: {error}", f"{kind}_source") from None


def _open_file(path: Path, kind: str) -> IO[bytes]:
    """Open a regular file; a device or a pipe, which may never end, is not one."""
    try:
        if S_ISREG(path.stat().st_mode):
            return path.open("rb")
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a null byte
        pass
    except OSError as error:
        if error.errno != ENAMETOOLONG:
            fault = f"the {kind} file {_short(str(path))} cannot be read: {error}"
            raise ImageError(fault, f"{kind}_missing") from error
    raise ImageError(f"there is no {kind} file at {_short(str(path))}; check the path", f"{kind}_missing")


def _short(text: str) -> str:
    """Both ends of a long path or address, quoted."""
    return repr(text if len(text) <= 80 else f"{text[:37]}...{text[-40:]}")


# ---------------------------------------------------------------------- headers and decoding


def _open(file: IO[bytes], limits: ImageLimits) -> Image.Image:
    """Read the header of an encoded image."""
    try:
        with warnings.catch_warnings():
            # Pillow warns above 89 million pixels; our own cap answers with an error instead.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(file, formats=limits.formats)
    except Image.DecompressionBombError as error:
        fault = f"the image is too large for Pillow ({error}); scale it down, or raise PIL.Image.MAX_IMAGE_PIXELS and"
        raise ImageError(f"{fault} ImageLimits.max_pixels={limits.max_pixels}", "image_too_large") from error
    except Exception as error:  # on damaged bytes Pillow's plug-ins raise errors of every kind
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        fault = f"{size} bytes starting with {file.read(16)!r} are not an image of the formats"
        fault += f" {', '.join(limits.formats)} ({type(error).__name__}); write the file again, name another format"
        raise ImageError(f"{fault} in ImageLimits(formats=...), or drop the sample", "image_undecodable") from error


def _check_header(image: Image.Image, limits: ImageLimits) -> None:
    width, height = image.size
    if width < 1 or height < 1:
        raise ImageError(f"the image is {width} x {height} pixels: there is nothing in it; drop it", "image_zero_size")
    if width * height > limits.max_pixels:
        fault = f"the image is {width} x {height} = {width * height} pixels, more than ImageLimits.max_pixels="
        raise ImageError(f"{fault}{limits.max_pixels}; scale it down or raise the limit", "image_too_large")
    if max(width, height) > limits.max_aspect_ratio * min(width, height):
        fault = f"the image is {width} x {height} pixels, an aspect ratio of {max(image.size) / min(image.size):.1f}"
        remedy = f"more than {limits.max_aspect_ratio:g}, where Qwen's resize rule ends; cut or pad it"
        raise ImageError(f"{fault}, {remedy}", "image_aspect_ratio")


def _decode(image: Image.Image) -> None:
    """Decode the pixels now, so that a damaged image fails here and not in a later step."""
    try:
        fault = _missing_end(image)
        if fault is None:
            image.load()
    except Exception as error:  # on damaged bytes Pillow's decoders raise errors of every kind
        raise _damaged(image, f"{type(error).__name__}: {error}") from error
    if fault is not None:
        raise _damaged(image, fault)


def _damaged(image: Image.Image, fault: str) -> ImageError:
    seen = f"the {image.format or 'image'} data of {image.width} x {image.height} pixels are damaged or cut short"
    return ImageError(f"{seen} ({fault}); write the file again or drop the sample", "image_undecodable")


def _size(image: Image.Image, limits: ImageLimits) -> tuple[int, int]:
    """(height, width) of the image when it is decoded and turned, from what was read of it so far."""
    _check_header(image, limits)
    if isinstance(image, PngImageFile) and image.tile and image.fp and _has_text_after_pixels(image.fp):
        _decode(image)  # only then has Pillow read what stands behind the pixels
    width, height = image.size
    if isinstance(image, TiffImageFile) and image.tile:
        # Pillow turns TIFF files itself as it decodes them, and has their `size` turned or not by its version.
        width, height = image.tag_v2[ExifTags.Base.ImageWidth], image.tag_v2[ExifTags.Base.ImageLength]
    # Not the image's own `getexif`, which for a PNG decodes all of it.
    by = _orientation(lambda: Image.Image.getexif(image))
    return (width, height) if by in _ON_THEIR_SIDE else (height, width)


def _orientation(read: Callable[[], Mapping[int, Any]]) -> int:
    """The orientation that EXIF or XMP gives, 1 to 8; others that a file may hold are none to Pillow."""
    try:
        by = read().get(ExifTags.Base.Orientation, 1)
        return by if by in _TURNS else 1
    except Exception as error:  # EXIF is a nest of offsets; damaged ones raise errors of every kind
        fault = f"the EXIF block is damaged, so the orientation is unknown ({type(error).__name__}: {error});"
        raise ImageError(f"{fault} save the image without EXIF", "image_exif") from error


# ---------------------------------------------------------------------- files whose end is missing


def _missing_end(image: Image.Image) -> str | None:
    """Say what is missing at the end of a PNG or JPEG that was opened and not decoded; its file stays where it is."""
    if not isinstance(image, ImageFile.ImageFile) or image.fp is None or image.tell():
        return None
    file, at = image.fp, image.fp.tell()
    try:
        if image.format == "PNG":
            size = file.seek(0, io.SEEK_END)
            ends = [end for kind, end in _png_chunks(file) if kind == b"IEND"]
            return None if ends and ends[0] <= size else f"it ends before its last chunk, at byte {size}"
        if image.format in ("JPEG", "MPO"):
            file.seek(0)
            return _jpeg_fault(file.read())
        return None
    finally:
        file.seek(at)


def _png_chunks(png: IO[bytes]) -> Iterator[tuple[bytes, int]]:
    """Type of each chunk, and the byte behind it: length (4 bytes), type (4), the data, a CRC (4)."""
    at = 8
    while png.seek(at) and len(head := png.read(8)) == 8:
        at += int.from_bytes(head[:4], "big") + 12
        yield head[4:], at


def _has_text_after_pixels(png: IO[bytes]) -> bool:
    """Find chunks behind the pixels of a PNG that may hold its orientation: EXIF, or text with XMP in it."""
    at = png.tell()
    try:
        kinds = [kind for kind, _ in _png_chunks(png)]
    finally:
        png.seek(at)
    behind = kinds[kinds.index(b"IDAT") :] if b"IDAT" in kinds else []
    return not {b"eXIf", b"tEXt", b"zTXt", b"iTXt"}.isdisjoint(behind)


def _jpeg_fault(data: bytes) -> str | None:
    """Zeros at the end are what a download leaves that reserved its file and did not finish; libjpeg makes them grey.

    Where the process has set `LOAD_TRUNCATED_IMAGES`, Pillow puts the marker of the end there itself.
    """
    if not (data.endswith(b"\0\0") or ImageFile.LOAD_TRUNCATED_IMAGES):
        return None
    at = 2  # segments in front of the pixels may hold a whole JPEG: marker (2 bytes), length (2), data
    while data[at : at + 1] == b"\xff" and (marker := data[at + 1 : at + 2]) != b"\xda":
        at += 1 if marker == b"\xff" else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None if data.rfind(b"\xff\xd9", at) >= 0 else "it has no marker of its end"


# ---------------------------------------------------------------------- RGB


def _to_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB; a large image is converted some rows at a time, so that little memory is used beside the result."""
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
        # Not by Pillow, whose own rule for these modes has changed between versions (clip, or drop the low byte).
        grey = np.asarray(image).astype(np.float64)
        return Image.fromarray(np.rint(grey * (255.0 / _full_scale(image))).astype(np.uint8)).convert("RGB")
    try:
        if not image.has_transparency_data:
            return image.convert("RGB")
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    except ValueError as error:
        raise ImageError(f"mode {image.mode} has no way to RGB ({error}); convert it first", "image_mode") from None


def _full_scale(image: Image.Image) -> float:
    return 255.0 if image.mode == "F" else 65535.0


def _check_range(image: Image.Image) -> None:
    """Refuse deep grey whose values have no known meaning."""
    ends = np.asarray([(grey.min(), grey.max()) for _, part in _parts(image) for grey in [np.asarray(part)]])
    low, high = float(ends.min()), float(ends.max())  # NaN where one of them is
    if not (low >= 0.0 and high <= _full_scale(image)):  # written so that NaN fails too
        fault = f"the {image.mode} image holds values from {low:g} to {high:g}; only 0 to {_full_scale(image):g} has a"
        raise ImageError(f"{fault} known meaning: convert it to 8 bits first", "image_mode")
    if image.mode == "F" and 0.0 < high <= 1.0:
        fault = "the float image ends at 1: it would come out black, as full scale is 255; multiply it by 255 first"
        raise ImageError(fault, "image_mode")
