"""Load one image from whatever a dataset holds: checked before decoding, upright, RGB.

| source                                   | rule                                                                      |
|------------------------------------------|---------------------------------------------------------------------------|
| PIL image                                | used as it is (its current frame), never changed in place                 |
| path, `file://` path                     | a regular local file, at most `ImageLimits.max_bytes`                     |
| bytes                                    | an encoded image                                                          |
| `{"bytes": ..., "path": ...}`            | as `datasets` stores an image: the bytes, or the path if `bytes` is None  |
| `data:image/...;base64,...`              | the payload, strictly base64                                              |
| `http(s)://` and any other address       | refused: reading a sample never opens a connection                        |

| picture                                  | rule                                                                      |
|------------------------------------------|---------------------------------------------------------------------------|
| EXIF orientation                         | applied once, and the tag removed, so that it is not applied again        |
| alpha, transparent palette or color      | composited over white                                                     |
| 1, L, P, CMYK, YCbCr, HSV                | Pillow's own conversion to RGB                                            |
| gray deeper than 8 bits (I;16, I, F)     | full scale becomes 255: 65535 for integers, 255 for floats                |
| several frames (GIF, APNG, TIFF, WebP)   | the first frame                                                           |

The header is checked against `ImageLimits` before any pixel is decoded. Files that Pillow cannot decode are refused,
and so are truncated PNG and JPEG files, which Pillow would fill with black or gray.

Besides the encoded image, loading allocates at most 16 bytes for each pixel that `ImageLimits.max_pixels` allows, which
is 5.3 times the size of RGB. Most of it is for WebP, whose decoder keeps two pictures of its own. Pillow stores RGB
itself in 4 bytes per pixel.
"""

from __future__ import annotations

import base64
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
from PIL import ExifTags, Image, ImageFile, ImageOps
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile

from vlmpack.errors import SampleError

ImageSource = Image.Image | bytes | bytearray | memoryview | str | Path | Mapping
"""Types that `load_image` accepts."""

_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_DEEP_GRAY = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")
_ON_THEIR_SIDE = (5, 6, 7, 8)
"""EXIF orientations that swap height and width."""
_PIXELS_AT_ONCE = 2**18
"""Number of pixels of a large image that are converted at a time."""


@dataclass(frozen=True, kw_only=True)
class ImageLimits:
    """Limits for images, checked against their headers before decoding."""

    max_pixels: int = 64_000_000
    """Largest width times height. Above it, a small file could fill the memory (a decompression bomb)."""
    max_aspect_ratio: float = 200.0
    """Largest ratio of the longer to the shorter side. The resize rule of Qwen's processors fails above 200."""
    max_bytes: int = 256 * 2**20
    """Largest size of the encoded image in bytes."""
    formats: tuple[str, ...] = _FORMATS
    """File formats to try, by Pillow's names. The content decides, not the file name."""


DEFAULT_LIMITS = ImageLimits()


def load_image(source: ImageSource, *, limits: ImageLimits = DEFAULT_LIMITS) -> Image.Image:
    """Load an image as upright 8-bit RGB.

    Args:
        source: see the table in the module docstring.
        limits: limits checked against the header before decoding.

    Returns:
        A PIL image of mode RGB. A PIL image that is already RGB and upright is returned as it is, not copied.

    Raises:
        SampleError: the image cannot be used; the message names the fault and the remedy, `.reason` is a slug.
    """
    is_open = isinstance(source, Image.Image)
    image = source if is_open else _open(io.BytesIO(read_encoded(source, limits=limits)), limits)
    check_size(*image.size, limits, kind="image", seen="the image is")
    _decode(image)
    if _orientation(image.getexif) != 1:
        image = ImageOps.exif_transpose(image)
    rgb = _to_rgb(image)
    if rgb is image and image is not source and image.format == "WEBP":
        rgb = image.copy()  # frees Pillow's decoder, which holds twice as much again
    return rgb


def read_size(source: ImageSource, *, limits: ImageLimits = DEFAULT_LIMITS) -> tuple[int, int]:
    """Return the size (height, width) of `load_image(source)` in pixels, from the header and without decoding.

    Only the header of a file is read, so damaged pixels go unnoticed. The exception is a PNG that may store its
    orientation after its pixels: it is decoded.

    Args:
        source: see the table in the module docstring.
        limits: limits, as in `load_image`.

    Raises:
        SampleError: the image cannot be read, or its header is outside the limits.
    """
    if isinstance(source, Image.Image):
        return _size(source, limits)
    file = open_source(source, kind="image", max_bytes=limits.max_bytes)
    with file, _open(file, limits) as image:
        return _size(image, limits)


def read_encoded(source: ImageSource, *, limits: ImageLimits = DEFAULT_LIMITS) -> bytes:
    """Return the encoded bytes of a source that is not a PIL image, unchanged.

    Raises:
        SampleError: there are no bytes, they cannot be read, or they exceed the limits.
    """
    with open_source(source, kind="image", max_bytes=limits.max_bytes) as file:
        try:
            return file.read()
        except OSError as error:
            raise SampleError(f"the image file cannot be read: {error}", "image_missing") from error


# ---------------------------------------------------------------------- encoded bytes


def open_source(source: Any, *, kind: Literal["image", "video", "audio"], max_bytes: int) -> IO[bytes]:
    """Open the encoded bytes of an image, a video or an audio. Never opens a connection.

    Args:
        source: see the table in the module docstring.
        kind: the kind of medium, which is also the first word of an error's reason.
        max_bytes: largest size in bytes.

    Raises:
        SampleError: there are no bytes (`image_missing`, `image_remote`, `image_source`, `image_undecodable`, or the
            same with `video` or `audio`), or there are too many (`image_too_large`).
    """
    file = _opened(source, kind)
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    if 0 < size <= max_bytes:
        return file
    file.close()
    if not size:
        raise SampleError(
            f"the {kind} is empty (0 bytes); write the file again or drop the sample", f"{kind}_undecodable"
        )
    limits = "ImageLimits" if kind == "image" else "VideoLimits"
    fault = f"the encoded {kind} has {size} bytes, more than {limits}.max_bytes={max_bytes}; re-encode it or"
    remedy = "cut it into parts" if kind == "audio" else "raise the limit"
    raise SampleError(f"{fault} {remedy}", f"{kind}_too_large")


def _opened(source: Any, kind: str) -> IO[bytes]:
    if isinstance(source, Mapping):
        content = next((source[key] for key in ("bytes", "path") if source.get(key) is not None), None)
        if content is None:
            keys = sorted(map(str, source))
            raise SampleError(f"a dict of the {kind} must hold 'bytes' or 'path'; its keys: {keys}", f"{kind}_source")
        return _opened(content, kind)
    if isinstance(source, str):
        source = _path_or_bytes(source, kind)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return io.BytesIO(source)
    if isinstance(source, Path):
        return _open_file(source, kind)
    others = {"image": "a PIL image (of an array: Image.fromarray) or a data: URI", "video": "a list of frames"}
    fault = f"the {kind} is of type {type(source).__name__}, which cannot be read; give the path of its file, its bytes"
    raise SampleError(f"{fault}, a {{'bytes', 'path'}} dict, or {others.get(kind, 'an array [n]')}", f"{kind}_source")


def _path_or_bytes(text: str, kind: str) -> Path | bytes:
    scheme = text.split(":", 1)[0].lower()
    if scheme == "file" and text[4:7] == "://":
        # Literal, as in qwen-vl-utils, or percent-decoded (RFC 8089) if there is no such file.
        rest = text[len("file://localhost" if text[7:17] == "localhost/" else "file://") :]
        try:
            return Path(rest) if Path(rest).is_file() else Path(unquote(rest))
        except (OSError, ValueError):  # the name is too long, or has a null byte
            return Path(unquote(rest))
    if scheme != "data":
        if "://" not in text[:32]:
            return Path(text).expanduser() if text.startswith("~/") else Path(text)
        fault = f"the {kind} address {_short(text)} is remote; nothing is fetched while samples are read: download the"
        raise SampleError(f"{fault} {kind} first and give its path or bytes", f"{kind}_remote")
    header, _, payload = text.partition(",")
    try:
        if not header.lower().endswith(";base64"):
            raise ValueError("its header does not say base64")
        return base64.b64decode("".join(payload.split()), validate=True)
    except ValueError as error:
        example = {"image": "data:image/png", "video": "data:video/mp4", "audio": "data:audio/wav"}[kind]
        fault = f"the data URI {_short(text)} is no {example};base64,<payload>: {error}"
        raise SampleError(fault, f"{kind}_source") from None


def _open_file(path: Path, kind: str) -> IO[bytes]:
    """Open a regular file. Devices and pipes, which may never end, are refused."""
    try:
        if S_ISREG(path.stat().st_mode):
            return path.open("rb")
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a null byte in the path
        pass
    except OSError as error:
        if error.errno != ENAMETOOLONG:
            fault = f"the {kind} file {_short(str(path))} cannot be read: {error}"
            raise SampleError(fault, f"{kind}_missing") from error
    remedy = "check the path" if len(str(path)) < 256 else f"base64 needs 'data:{kind}/...;base64,' before it"
    raise SampleError(f"there is no {kind} file at {_short(str(path))}; {remedy}", f"{kind}_missing")


def _short(text: str) -> str:
    """Quote a path or address; keep only both ends of a long one."""
    return repr(text if len(text) <= 80 else f"{text[:37]}...{text[-40:]}")


# ---------------------------------------------------------------------- headers and decoding


def _open(file: IO[bytes], limits: ImageLimits) -> Image.Image:
    """Read the header of an encoded image."""
    try:
        with warnings.catch_warnings():
            # Pillow warns above 89 million pixels; our own limit raises an error instead.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(file, formats=limits.formats)
    except Image.DecompressionBombError as error:
        fault = f"the image is too large for Pillow ({error}); scale it down, or raise PIL.Image.MAX_IMAGE_PIXELS and"
        raise SampleError(f"{fault} ImageLimits.max_pixels={limits.max_pixels}", "image_too_large") from error
    except Exception as error:  # on damaged bytes Pillow's plug-ins raise errors of every kind
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        fault = f"{size} bytes starting with {file.read(16)!r} are not an image of the formats"
        fault += f" {', '.join(limits.formats)} ({type(error).__name__}); write the file again, name another format"
        raise SampleError(f"{fault} in ImageLimits(formats=...), or drop the sample", "image_undecodable") from error


def check_size(width: int, height: int, limits: Any, *, kind: Literal["image", "video"], seen: str) -> None:
    """Check the size of an image or of a video's frames.

    Args:
        width: width in pixels.
        height: height in pixels.
        limits: `ImageLimits` or `VideoLimits`.
        kind: the kind of medium, which is also the first word of an error's reason.
        seen: the beginning of the error, such as "the image is".

    Raises:
        SampleError: it is empty (`image_zero_size`), too large (`image_too_large`) or too narrow
            (`image_aspect_ratio`).
    """
    seen = f"{seen} {width} x {height}"
    if min(width, height) < 1:
        raise SampleError(f"{seen} pixels: there is nothing in it; drop it", f"{kind}_zero_size")
    if width * height > limits.max_pixels:
        fault = f"{seen} = {width * height} pixels, more than {type(limits).__name__}.max_pixels={limits.max_pixels}"
        raise SampleError(f"{fault}; scale it down or raise the limit", f"{kind}_too_large")
    ratio = max(width, height) / min(width, height)
    if ratio > limits.max_aspect_ratio:
        fault = f"{seen} pixels, an aspect ratio of {ratio:.1f}, more than {limits.max_aspect_ratio:g}"
        raise SampleError(f"{fault}, where Qwen's resize rule ends; cut or pad it", f"{kind}_aspect_ratio")


def _decode(image: Image.Image) -> None:
    """Decode the pixels now, so that a damaged image fails here and not in a later step."""
    cause = None
    try:
        if (fault := _missing_end(image)) is None:
            image.load()
            return
    except Exception as error:  # on damaged bytes Pillow's decoders raise errors of every kind
        fault, cause = f"{type(error).__name__}: {error}", error
    seen = f"the {image.format or 'image'} data of {image.width} x {image.height} pixels are damaged or cut short"
    raise SampleError(f"{seen} ({fault}); write the file again or drop the sample", "image_undecodable") from cause


def _size(image: Image.Image, limits: ImageLimits) -> tuple[int, int]:
    """Return (height, width) of the image after decoding and orientation, from the data read so far."""
    check_size(*image.size, limits, kind="image", seen="the image is")
    if isinstance(image, PngImageFile) and image.tile and image.fp and _has_text_after_pixels(image.fp):
        _decode(image)  # Pillow reads the chunks after the pixels only now
    width, height = image.size
    if isinstance(image, TiffImageFile) and image.tile:
        # Pillow rotates TIFF files itself while decoding; whether `size` is already rotated depends on its version.
        width, height = image.tag_v2[ExifTags.Base.ImageWidth], image.tag_v2[ExifTags.Base.ImageLength]
    # Not the image's own `getexif`, which would decode the whole PNG.
    by = _orientation(lambda: Image.Image.getexif(image))
    return (width, height) if by in _ON_THEIR_SIDE else (height, width)


def _orientation(read: Callable[[], Mapping[int, Any]]) -> int:
    """Return the orientation from EXIF or XMP, 1 to 8. Pillow ignores other values, so they count as 1."""
    try:
        by = read().get(ExifTags.Base.Orientation, 1)
        return by if by in range(2, 9) else 1
    except Exception as error:  # EXIF is nested offsets; damaged ones raise errors of every kind
        fault = f"the EXIF block is damaged, so the orientation is unknown ({type(error).__name__}: {error});"
        raise SampleError(f"{fault} save the image without EXIF", "image_exif") from error


# ---------------------------------------------------------------------- truncated files


def _missing_end(image: Image.Image) -> str | None:
    """Describe what is missing at the end of an opened, undecoded PNG or JPEG. Keeps the file position."""
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
    """Yield the type of each chunk, and the offset of its end. Chunk: length (4 bytes), type (4), data, CRC (4)."""
    at = 8
    while png.seek(at) and len(head := png.read(8)) == 8:
        at += int.from_bytes(head[:4], "big") + 12
        yield head[4:], at


def _has_text_after_pixels(png: IO[bytes]) -> bool:
    """Return whether chunks after a PNG's pixels may hold its orientation: EXIF, or text with XMP in it."""
    at = png.tell()
    try:
        kinds = [kind for kind, _ in _png_chunks(png)]
    finally:
        png.seek(at)
    behind = kinds[kinds.index(b"IDAT") :] if b"IDAT" in kinds else []
    return not {b"eXIf", b"tEXt", b"zTXt", b"iTXt"}.isdisjoint(behind)


def _jpeg_fault(data: bytes) -> str | None:
    """Return what is wrong with the end of a JPEG, or None.

    An unfinished download into a preallocated file leaves zeros at the end, which libjpeg turns gray. If the process
    has set `LOAD_TRUNCATED_IMAGES`, Pillow adds the end marker itself.
    """
    if not (data.endswith(b"\0\0") or ImageFile.LOAD_TRUNCATED_IMAGES):
        return None
    at = 2  # skip the segments before the pixels, which may hold a whole JPEG: marker (2 bytes), length (2), data
    while data[at : at + 1] == b"\xff" and (marker := data[at + 1 : at + 2]) != b"\xda":
        at += 1 if marker == b"\xff" else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None if data.rfind(b"\xff\xd9", at) >= 0 else "it has no marker of its end"


# ---------------------------------------------------------------------- RGB


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert to 8-bit RGB. A large image is converted a few rows at a time, to use little extra memory."""
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    if image.mode in _DEEP_GRAY:
        _check_range(image)
    if image.width * image.height <= _PIXELS_AT_ONCE:
        return _part_to_rgb(image)
    result = Image.new("RGB", image.size)
    for top, part in _parts(image):
        result.paste(_part_to_rgb(part), (0, top))
    return result


def _parts(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Yield a few rows at a time, each with the index of its first row."""
    rows = max(1, _PIXELS_AT_ONCE // image.width)
    for top in range(0, image.height, rows):
        yield top, image.crop((0, top, image.width, min(top + rows, image.height)))


def _part_to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in _DEEP_GRAY:
        # Not with Pillow, whose rule for these modes has changed between versions (clip, or drop the low byte).
        gray = np.asarray(image).astype(np.float64)
        return Image.fromarray(np.rint(gray * (255.0 / _full_scale(image))).astype(np.uint8)).convert("RGB")
    try:
        if not image.has_transparency_data:
            return image.convert("RGB")
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    except ValueError as error:
        raise SampleError(f"mode {image.mode} has no way to RGB ({error}); convert it first", "image_mode") from None


def _full_scale(image: Image.Image) -> float:
    return 255.0 if image.mode == "F" else 65535.0


def _check_range(image: Image.Image) -> None:
    """Refuse deep gray whose values have no known meaning."""
    ends = np.asarray([(gray.min(), gray.max()) for _, part in _parts(image) for gray in [np.asarray(part)]])
    low, high = float(ends.min()), float(ends.max())  # NaN if any of them is NaN
    if not (low >= 0.0 and high <= _full_scale(image)):  # written so that NaN fails too
        fault = f"the {image.mode} image holds values from {low:g} to {high:g}; only 0 to {_full_scale(image):g} has a"
        raise SampleError(f"{fault} known meaning: convert it to 8 bits first", "image_mode")
    if image.mode == "F" and 0.0 < high <= 1.0:
        fault = "the float image ends at 1: it would come out black, as full scale is 255; multiply it by 255 first"
        raise SampleError(fault, "image_mode")
