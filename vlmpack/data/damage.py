"""Damage that Pillow decodes without an error, and that the structure of the file shows.

| format | compared                                                                                                    |
|--------|-------------------------------------------------------------------------------------------------------------|
| TIFF   | number, place and length of strips or tiles, with the size of the image and of the file                     |
| PNG    | every chunk up to IEND; the CRC of those behind the pixels, which Pillow does not compare                   |
| JPEG   | the end-of-image marker, where the file ends in zeros                                                       |
| WebP   | the list of chunks with the size of the file; zeros at the end of compressed pixels                         |
| GIF    | what follows the first frame, where the file ends in zeros                                                  |

Zeros at the end are what a download leaves that reserved its file and did not finish. In what is not compressed (BMP,
PPM, plain TIFF) they are black pixels like any others.
"""

from __future__ import annotations

import io
import os
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import IO, Any, final

from PIL import Image, ImageFile
from PIL.TiffImagePlugin import TiffImageFile

from vlmpack.data.pixels import ImageError

ZEROS = bytes(512)
"""So many zero bytes end no compressed pixels."""
_WIDTH, _LENGTH, _BITS, _COMPRESSION, _PHOTOMETRIC, _SAMPLES, _PLANAR = 256, 257, 258, 259, 262, 277, 284
_STRIPS, _ROWS, _STRIP_BYTES = 273, 278, 279
_TILE_WIDTH, _TILE_LENGTH, _TILES, _TILE_BYTES = 322, 323, 324, 325
_JPEG_TABLES = 347
_JPEG_END = b"\xff\xd9"
_RAW, _JPEG, _YCBCR = 1, 7, 6
"""Compression 1 and 7, photometric interpretation 6."""


def check_content(image: Image.Image) -> None:
    """Refuse an image that is cut short or filled up, where the structure of its file shows it.

    Args:
        image: what Pillow opened and has not decoded; others pass.

    Raises:
        ImageError: something is missing.
    """
    find = _FAULTS.get(image.format or "")
    encoded = None if find is None else _file_of(image)
    if find is not None and encoded is not None and (fault := find(encoded)):
        raise _damaged(image, fault)
    if isinstance(image, TiffImageFile) and image.tag_v2.get(_COMPRESSION) == _JPEG:
        encoded = _file_of(image)
        if encoded is not None and (fault := _jpeg_strips_fault(image.tag_v2, encoded)):
            raise _damaged(image, fault)


def _file_of(image: Image.Image) -> bytes | None:
    """The encoded bytes of an image that was opened and not decoded; its file stays where it is."""
    if not isinstance(image, ImageFile.ImageFile) or image.fp is None or image.tell():
        return None
    if isinstance(image.fp, io.BytesIO):
        return image.fp.getvalue()
    at = image.fp.tell()
    image.fp.seek(0)
    encoded = image.fp.read()
    image.fp.seek(at)
    return encoded


def check_tiff(image: ImageFile.ImageFile, max_pixels: int) -> None:
    """Refuse a TIFF whose strips or tiles are not all there, from its tags; images of other formats pass.

    Args:
        image: what Pillow opened, not decoded.
        max_pixels: of one tile, which is decoded whole whatever the size of the image.

    Raises:
        ImageError: its tags contradict each other, or the file.
    """
    if not isinstance(image, TiffImageFile) or image.fp is None:
        return
    try:
        fault = _tiff_fault(image.tag_v2, image.fp.seek(0, io.SEEK_END))
        tile = image.tag_v2.get(_TILE_WIDTH, 1) * image.tag_v2.get(_TILE_LENGTH, 1)
    except Exception as error:  # a damaged tag may hold anything, and Pillow reads it only now
        raise _damaged(image, f"its tags cannot be read, {type(error).__name__}: {error}") from error
    if fault is not None:
        raise _damaged(image, fault)
    if tile > max_pixels:
        raise ImageError(
            f"the tiles of the TIFF are {tile} pixels each, more than ImageLimits.max_pixels={max_pixels}, and are "
            "decoded whole; save it in strips or smaller tiles",
            "image_too_large",
        )


def has_text_after_pixels(png: IO[bytes]) -> bool:
    """Find chunks behind the pixels of a PNG that may hold its orientation: EXIF, or text with XMP in it."""
    before, at, behind = png.tell(), 8, False
    try:
        while png.seek(at) and len(head := png.read(8)) == 8:
            behind = behind or head[4:] == b"IDAT"
            if behind and head[4:] in (b"eXIf", b"tEXt", b"zTXt", b"iTXt"):
                return True
            at += int.from_bytes(head[:4], "big") + 12
        return False
    finally:
        png.seek(before)


@final
class _Filling:
    """Pillow's one flag for the whole process, off as long as any thread decodes here."""

    def __init__(self) -> None:
        self.lock, self.threads = threading.Lock(), 0

    @contextmanager
    def off(self) -> Iterator[None]:
        """Decode with `ImageFile.LOAD_TRUNCATED_IMAGES` off, whatever the process has set it to; then put it back.

        With it Pillow fills what is missing of an image with grey or black, and says nothing.
        """
        with self.lock:
            counted = self.threads > 0 or ImageFile.LOAD_TRUNCATED_IMAGES
            if counted:
                self.threads += 1
                ImageFile.LOAD_TRUNCATED_IMAGES = False
        try:
            yield
        finally:
            if counted:
                self._leave()

    def _leave(self) -> None:
        with self.lock:
            self.threads -= 1
            ImageFile.LOAD_TRUNCATED_IMAGES = not self.threads

    def restart(self) -> None:
        """Begin anew in a forked process: threads that it does not have may have held the lock."""
        ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES or self.threads > 0
        self.lock, self.threads = threading.Lock(), 0


filling = _Filling()
if sys.platform != "win32":
    os.register_at_fork(after_in_child=filling.restart)


def _png_fault(data: bytes) -> str | None:
    """A chunk is its length (4 bytes), its type (4), the data, and a CRC (4); zlib has one of the pixels."""
    view, at = memoryview(data), 8
    while at + 12 <= len(data):
        kind, end = data[at + 4 : at + 8], at + 8 + int.from_bytes(data[at : at + 4], "big")
        if end + 4 > len(data):
            break
        if kind != b"IDAT" and zlib.crc32(view[at + 4 : end]) != int.from_bytes(data[end : end + 4], "big"):
            return f"the checksum of its {kind.decode('latin-1')} chunk at byte {at} is wrong"
        if kind == b"IEND":
            return None
        at = end + 4
    return f"it ends before its last chunk, at byte {len(data)}"


def _jpeg_fault(data: bytes) -> str | None:
    if data.endswith(b"\0\0") and data.rfind(_JPEG_END, _scan_of(data)) < 0:
        return "it ends in zeros, without the marker of its end"
    return None


def _scan_of(jpeg: bytes) -> int:
    """The byte at which pixels begin: behind the metadata, which may hold a whole JPEG of their own."""
    at = 2
    while at + 4 <= len(jpeg) and jpeg[at] == 0xFF and jpeg[at + 1] != 0xDA:
        at += 1 if jpeg[at + 1] == 0xFF else 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big")
    return at


def _webp_fault(data: bytes) -> str | None:
    """RIFF: its size at byte 4, chunks from byte 12: type (4 bytes), length (4), data, a byte if that is odd."""
    at, stop = 12, 8 + int.from_bytes(data[4:8], "little")
    if stop > len(data):
        return f"it has {len(data)} bytes of {stop}"
    while at + 8 <= stop:
        kind, end = data[at : at + 4], at + 8 + int.from_bytes(data[at + 4 : at + 8], "little")
        if not any(kind):
            return f"there are zeros where its chunk at byte {at} begins"
        if kind in (b"VP8 ", b"VP8L", b"ALPH") and data.endswith(ZEROS, at + 8, end):
            return f"its pixels end in {len(ZEROS)} zero bytes or more, at byte {end}"
        at = end + end % 2
    return None


def _gif_fault(data: bytes) -> str | None:
    """The first frame is a chain of blocks, each its length (a byte) and as many bytes, up to one of length 0."""
    at = _first_frame(data)
    rest = data[at : at + 1]
    if rest == b"\0" and not data.endswith(b";") and not data[at:].strip(b"\0"):
        return f"there are zeros where it goes on or ends, at byte {at}"
    return None


def _first_frame(gif: bytes) -> int:
    """The byte behind the first frame."""
    at = 13 + _colours(gif[10:11])
    while at < len(gif) and gif[at] != 0x2C:
        at = _behind_blocks(gif, at + 2) if gif[at] == 0x21 else at + 1
    return _behind_blocks(gif, at + 11 + _colours(gif[at + 9 : at + 10]))


def _colours(flags: bytes) -> int:
    """Bytes of a table of colours."""
    return 3 << ((flags[0] & 7) + 1) if flags and flags[0] & 0x80 else 0


def _behind_blocks(gif: bytes, at: int) -> int:
    while at < len(gif) and gif[at]:
        at += gif[at] + 1
    return at + 1


def _tiff_fault(tags: Mapping[int, Any], size: int) -> str | None:
    """Compare where a TIFF has its pixels with how many there have to be, and with the file's `size` in bytes."""
    if 0 in tags:
        return "there are zeros among its tags"
    is_tiled = _TILES in tags or _STRIPS not in tags
    offsets = _several(tags.get(_TILES if is_tiled else _STRIPS))
    lengths = _several(tags.get(_TILE_BYTES if is_tiled else _STRIP_BYTES))
    planes = tags.get(_SAMPLES, 1) if tags.get(_PLANAR, 1) == 2 else 1
    rows = tags.get(_TILE_LENGTH, 0) if is_tiled else min(tags.get(_ROWS, tags[_LENGTH]), tags[_LENGTH])
    width = tags.get(_TILE_WIDTH, 0) if is_tiled else tags[_WIDTH]
    name = "tiles" if is_tiled else "strips"
    if rows < 1 or width < 1:
        return f"its {name} are {width} x {rows} pixels"
    expected = planes * -(-tags[_LENGTH] // rows) * -(-tags[_WIDTH] // width)
    if len(offsets) != expected:
        return f"it has {len(offsets)} {name}, where {expected} of {width} x {rows} pixels make its size"
    is_raw = tags.get(_COMPRESSION, _RAW) == _RAW
    least = _raw_bytes(tags, width, rows, planes, is_tiled=is_tiled) if is_raw else [1] * expected
    if not lengths and is_raw:
        lengths = tuple(least)
    if len(lengths) != expected:
        return f"it has {expected} {name} and {len(lengths)} lengths of them"
    for at, (start, length, wanted) in enumerate(zip(offsets, lengths, least, strict=True)):
        if length < wanted:
            return f"{name[:-1]} {at} has {length} bytes and needs {wanted}"
        if not 8 <= start <= size - length:
            return f"{name[:-1]} {at} of {length} bytes at byte {start} does not lie in a file of {size} bytes"
    return _overlap(offsets, lengths, name)


def _overlap(offsets: Sequence[int], lengths: Sequence[int], name: str) -> str | None:
    """Strips that are the same share their bytes; others that do are a damaged offset."""
    for (start, length), (other, _) in pairwise(sorted(set(zip(offsets, lengths, strict=True)))):
        if start + length > other:
            return f"two of its {name}, at bytes {start} and {other}, overlap"
    return None


def _raw_bytes(tags: Mapping[int, Any], width: int, rows: int, planes: int, *, is_tiled: bool) -> list[int]:
    """Bytes that each strip or tile has to have where nothing is compressed; 1 where colour has a size of its own."""
    bits = _several(tags.get(_BITS, 1))
    per_pixel = max(bits) if planes > 1 else sum(bits) if len(bits) > 1 else sum(bits) * tags.get(_SAMPLES, 1)
    row = 0 if tags.get(_PHOTOMETRIC) == _YCBCR else -(-width * per_pixel // 8)
    across = -(-tags[_WIDTH] // width)
    starts = range(0, tags[_LENGTH], rows)
    heights = [rows if is_tiled else min(rows, tags[_LENGTH] - start) for start in starts]
    return [max(1, row * height) for height in heights for _ in range(across)] * planes


def _jpeg_strips_fault(tags: Mapping[int, Any], data: bytes) -> str | None:
    """JPEG that fills a strip or tile has the marker of its end."""
    if not tags.get(_JPEG_TABLES, _JPEG_END).endswith(_JPEG_END):
        return "its JPEG tables have no end"
    names = (_TILES, _TILE_BYTES) if _TILES in tags else (_STRIPS, _STRIP_BYTES)
    for start, length in zip(*(_several(tags[name]) for name in names), strict=True):
        if data.rfind(_JPEG_END, start, start + length) < 0:
            return f"the JPEG at byte {start} of it has no end"
    return None


def _several(value: Any) -> tuple[int, ...]:
    """The values of a tag that may have one or many."""
    return () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)


def _damaged(image: Image.Image, fault: str) -> ImageError:
    return ImageError(
        f"the {image.format} data of {image.width} x {image.height} pixels are damaged or cut short ({fault}); write "
        "the file again or drop the sample",
        "image_undecodable",
    )


_FAULTS: dict[str, Callable[[bytes], str | None]] = {
    "PNG": _png_fault, "JPEG": _jpeg_fault, "MPO": _jpeg_fault, "WEBP": _webp_fault, "GIF": _gif_fault
}  # fmt: skip
"""By Pillow's name of the format: what is missing of a file, if anything is seen to be."""
