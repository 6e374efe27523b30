"""TIFF: whether its directory, and the strips or tiles that this names, are all there.

    header ──▶ directory of tags ──▶ StripOffsets, StripByteCounts ──▶ strips of RowsPerStrip rows (or tiles)
       8 bytes    12 bytes each         as many as rows and width make      inside the file, none on top of another

Pillow leaves out tags that it cannot read, decodes as many strips as there are, and leaves the rest black. Of colour
that is stored as YCbCr libtiff does the same inside a strip, which is seen; of fax (CCITT) too, which is not.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import IO, Any, NamedTuple

from PIL import Image, ImageFile
from PIL.TiffImagePlugin import TiffImageFile

from vlmpack.data.damage import JPEG_END, content_of, damaged, jpeg_size
from vlmpack.data.pixels import ImageError

_WIDTH, _LENGTH, _BITS, _COMPRESSION, _PHOTOMETRIC, _SAMPLES, _PLANAR = 256, 257, 258, 259, 262, 277, 284
_STRIPS, _ROWS, _STRIP_BYTES = 273, 278, 279
_TILE_WIDTH, _TILE_LENGTH, _TILES, _TILE_BYTES = 322, 323, 324, 325
_JPEG_TABLES, _SUBSAMPLING, _XMP = 347, 530, 700
_DECIDING = {*range(256, 267), *range(273, 285), 317, 320, *range(322, 326), 338, 339, _JPEG_TABLES, 530, 532, _XMP}
"""Tags that pixels or their orientation depend on."""
_RAW, _OLD_JPEG, _JPEG = 1, 6, 7
"""Compression."""
_RGB, _YCBCR = 2, 6
"""Photometric interpretation."""
_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
"""Bytes of a value, by its type."""
_MOST = 2**22
"""Values of one tag at most: Pillow makes a Python number of each."""


class Entry(NamedTuple):
    """One tag in the directory."""

    kind: int
    """Type of its values."""
    values: int
    """Number of its values."""
    place: int
    """Byte of the file at which its values lie."""
    size: int
    """Bytes of its values."""


def check_directory(file: IO[bytes]) -> None:
    """Refuse a TIFF whose first directory is not all there, before Pillow reads it; other files pass.

    Raises:
        ImageError: it is cut short, or a tag lies outside the file or has too many values.
    """
    size, fault = file.seek(0, io.SEEK_END), None
    try:
        entries = _entries(file)
    except (struct.error, OverflowError, ValueError, OSError):  # at a place that no file has
        entries, fault = {}, "its directory of tags is cut short"
    for tag, entry in entries.items():
        if tag in _DECIDING and entry.place + entry.size > size:
            fault = f"its tag {tag} of {entry.size} bytes at byte {entry.place} is outside the file of {size} bytes"
        if entry.values > _MOST and entry.size > entry.values:  # a text or a block of bytes is one value to Pillow
            fault = f"its tag {tag} has {entry.values} values"
    file.seek(0)
    if fault is not None:
        message = f"the TIFF is damaged or cut short ({fault}); write the file again or drop the sample"
        raise ImageError(message, "image_undecodable")


def _entries(file: IO[bytes]) -> dict[int, Entry]:
    """The tags of the first directory; none of a file that is no TIFF.

    Raises:
        struct.error: it is cut short.
    """
    file.seek(0)
    head = file.read(16)
    if head[:4] not in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return {}
    end, is_big = "<" if head[:2] == b"II" else ">", b"+" in head[2:4]
    of_count, of_entry, inline = ("Q", "HHQ8s", 8) if is_big else ("H", "HHI4s", 4)
    (start,) = struct.unpack_from(f"{end}{'Q' if is_big else 'I'}", head, 8 if is_big else 4)
    file.seek(start)
    (number,) = struct.unpack(f"{end}{of_count}", file.read(struct.calcsize(f"{end}{of_count}")))
    length = struct.calcsize(f"{end}{of_entry}")
    start += struct.calcsize(f"{end}{of_count}")
    entries: dict[int, Entry] = {}
    for at in range(start, start + min(number, 2**16) * length, length):
        tag, kind, count, value = struct.unpack(f"{end}{of_entry}", file.read(length))
        size = count * _BYTES.get(kind, 0)
        place = at + length - inline if size <= inline else struct.unpack(f"{end}{'Q' if is_big else 'I'}", value)[0]
        entries.setdefault(tag, Entry(kind, count, place, size))
    return entries


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
        raise damaged(image, f"its tags cannot be read, {type(error).__name__}: {error}") from error
    if fault is not None:
        raise damaged(image, fault)
    if tile > max_pixels:
        raise ImageError(
            f"the tiles of the TIFF are {tile} pixels each, more than ImageLimits.max_pixels={max_pixels}, and are "
            "decoded whole; save it in strips or smaller tiles",
            "image_too_large",
        )


def check_strips(image: Image.Image) -> None:
    """Refuse a TIFF whose strips hold fewer pixels than they have to, where Pillow takes them; others pass.

    Args:
        image: what Pillow opened, not decoded, and `check_tiff` let pass.

    Raises:
        ImageError: pixels are missing.
    """
    if not isinstance(image, TiffImageFile) or image.fp is None or image.tell():
        return
    tags = image.tag_v2
    compression, is_ycbcr = tags.get(_COMPRESSION, _RAW), tags.get(_PHOTOMETRIC) == _YCBCR
    if compression == _JPEG and (fault := _jpeg_strips_fault(tags, content_of(image.fp))):
        raise damaged(image, fault)
    if is_ycbcr and compression not in (_RAW, _OLD_JPEG, _JPEG) and tags.get(_SUBSAMPLING) == (1, 1):
        _decode_as_rgb(image, image.fp)


def _decode_as_rgb(image: TiffImageFile, file: IO[bytes]) -> None:
    """Decode a copy that calls its YCbCr RGB, of which libtiff does not leave strips out that it cannot read."""
    end = "<" if image.tag_v2.prefix == b"II" else ">"
    changed = bytearray(content_of(file))
    struct.pack_into(f"{end}H", changed, _entries(io.BytesIO(changed))[_PHOTOMETRIC].place, _RGB)
    try:
        Image.open(io.BytesIO(bytes(changed)), formats=["TIFF"]).load()
    except Exception as error:  # as of any damaged image
        raise damaged(image, f"{type(error).__name__}: {error}") from error


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
    for (start, length), (following, _) in pairwise(sorted(set(zip(offsets, lengths, strict=True)))):
        if start + length > following:
            return f"two of its {name}, at bytes {start} and {following}, overlap"
    return None


def _raw_bytes(tags: Mapping[int, Any], width: int, rows: int, planes: int, *, is_tiled: bool) -> list[int]:
    """Bytes that each strip or tile has to have where nothing is compressed; 1 where colour has a size of its own."""
    bits = _several(tags.get(_BITS, 1))
    per_pixel = max(bits) if planes > 1 else sum(bits) if len(bits) > 1 else sum(bits) * tags.get(_SAMPLES, 1)
    is_subsampled = tags.get(_PHOTOMETRIC) == _YCBCR and tags.get(_SUBSAMPLING) != (1, 1)
    row = 0 if is_subsampled else -(-width * per_pixel // 8)
    across = -(-tags[_WIDTH] // width)
    starts = range(0, tags[_LENGTH], rows)
    heights = [rows if is_tiled else min(rows, tags[_LENGTH] - start) for start in starts]
    return [max(1, row * height) for height in heights for _ in range(across)] * planes


def _jpeg_strips_fault(tags: Mapping[int, Any], data: bytes) -> str | None:
    """JPEG that fills a strip or tile is as wide and high as that, and has the marker of its end."""
    if not tags.get(_JPEG_TABLES, JPEG_END).endswith(JPEG_END):
        return "its JPEG tables have no end"
    is_tiled = _TILES in tags
    names = (_TILES, _TILE_BYTES) if is_tiled else (_STRIPS, _STRIP_BYTES)
    width = tags[_TILE_WIDTH if is_tiled else _WIDTH]
    rows = tags[_TILE_LENGTH] if is_tiled else min(tags.get(_ROWS, tags[_LENGTH]), tags[_LENGTH])
    sizes = {(rows, width), (rows if is_tiled else tags[_LENGTH] % rows or rows, width)}
    for start, length in zip(*(_several(tags[name]) for name in names), strict=True):
        jpeg = data[start : start + length]
        if jpeg.rfind(JPEG_END) < 0:
            return f"the JPEG at byte {start} of it has no end"
        if tags.get(_PLANAR, 1) == 1 and (size := jpeg_size(jpeg)) not in sizes:
            return f"the JPEG at byte {start} of it has {size} rows and columns, where {rows} x {width} are expected"
    return None


def _several(value: Any) -> tuple[int, ...]:
    """The values of a tag that may have one or many."""
    return () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
