"""Damage that Pillow decodes without an error, and that the structure of the file shows.

| format | compared                                                                                                    |
|--------|-------------------------------------------------------------------------------------------------------------|
| PNG    | every chunk up to IEND; the CRC of those behind the pixels, which Pillow does not compare                   |
| JPEG   | the end-of-image marker, where the file ends in zeros                                                       |
| WebP   | the list of chunks with the size of the file; more zeros at the end of pixels than one colour needs         |
| GIF    | what follows the first frame, where the file ends in zeros                                                  |

Zeros at the end are what a download leaves that reserved its file and did not finish. In what is not compressed (BMP,
PPM, plain TIFF) they are black pixels like any others. TIFF has a file of its own, `tiff.py`.
"""

from __future__ import annotations

import io
import os
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, final

from PIL import Image, ImageFile

from vlmpack.data.pixels import ImageError

ZEROS = bytes(512)
"""So many zero bytes end no compressed pixels."""
BLOCKS = 20
"""Blocks of pixels in a lossy WebP, at least, for each zero byte at its end."""
JPEG_END = b"\xff\xd9"
"""The marker of the end."""


def check_content(image: Image.Image) -> None:
    """Refuse an image that is cut short or filled up, where the structure of its file shows it.

    Args:
        image: what Pillow opened and has not decoded; others pass.

    Raises:
        ImageError: something is missing.
    """
    find = _FAULTS.get(image.format or "")
    if find is not None and (encoded := _file_of(image)) is not None and (fault := find(encoded)):
        raise damaged(image, fault)


def _file_of(image: Image.Image) -> bytes | None:
    """The encoded bytes of an image that was opened and not decoded; its file stays where it is."""
    if not isinstance(image, ImageFile.ImageFile) or image.fp is None or image.tell():
        return None
    return content_of(image.fp)


def content_of(file: IO[bytes]) -> bytes:
    """All bytes of an open file, which stays at its position."""
    if isinstance(file, io.BytesIO):
        return file.getvalue()
    at = file.tell()
    file.seek(0)
    content = file.read()
    file.seek(at)
    return content


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

        With it Pillow fills what is missing of an image with grey or black, without an error.
        """
        with self.lock:
            counted = self.threads > 0 or ImageFile.LOAD_TRUNCATED_IMAGES
            if counted:
                self.threads += 1
                ImageFile.LOAD_TRUNCATED_IMAGES = False
        try:
            yield
        finally:
            with self.lock:
                if counted:
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
    if not data.endswith(b"\0\0"):
        return None
    *_, (_, pixels) = [(0, 2), *_segments(data)]  # metadata in front of them may hold a whole JPEG of their own
    if data.rfind(JPEG_END, pixels) < 0:
        return "it ends in zeros, without the marker of its end"
    return None


def _segments(jpeg: bytes) -> Iterator[tuple[int, int]]:
    """Marker and place of each segment in front of the pixels, up to the one of theirs, DA."""
    at = 2
    while at + 4 <= len(jpeg) and jpeg[at] == 0xFF:
        if (marker := jpeg[at + 1]) == 0xFF:  # filled up
            at += 1
            continue
        yield marker, at
        if marker == 0xDA:
            return
        at += 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big")


def jpeg_size(jpeg: bytes) -> tuple[int, int]:
    """(height, width) that a JPEG gives itself, in the one of its segments whose marker is C0 to CF."""
    for marker, at in _segments(jpeg):
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # tables, an extension, arithmetic coding
            return int.from_bytes(jpeg[at + 5 : at + 7], "big"), int.from_bytes(jpeg[at + 7 : at + 9], "big")
    return 0, 0


def _webp_fault(data: bytes) -> str | None:
    """RIFF: its size at byte 4, chunks from byte 12: type (4 bytes), length (4), data, a byte if that is odd."""
    at, stop = 12, 8 + int.from_bytes(data[4:8], "little")
    if stop > len(data):
        return f"it has {len(data)} bytes of {stop}"
    while at + 8 <= stop:
        kind, end = data[at : at + 4], at + 8 + int.from_bytes(data[at + 4 : at + 8], "little")
        if not any(kind):
            return f"there are zeros where its chunk at byte {at} begins"
        if kind in (b"VP8 ", b"VP8L") and data.endswith(ZEROS, at + 8, end) and not _is_one_colour(data, at + 8, end):
            return f"its pixels end in {len(ZEROS)} zero bytes or more, at byte {end}"
        at = end + end % 2
    return None


def _is_one_colour(webp: bytes, start: int, end: int) -> bool:
    """Find out whether zeros at the end of pixels are what an encoder makes of an area of one colour at the bottom.

    As libwebp writes it, a zero byte of VP8 stands for 40 blocks of 16 x 16 pixels or more; half of them are required.
    One of VP8L stands for a pixel or more, and these are decoded.
    """
    zeros = end - start - len(webp[start:end].rstrip(b"\0"))
    if webp[start - 8 : start - 4] == b"VP8 ":
        width, height = (int.from_bytes(webp[at : at + 2], "little") & 0x3FFF for at in (start + 6, start + 8))
        return zeros * BLOCKS <= -(-width // 16) * -(-height // 16)
    try:
        image = Image.open(io.BytesIO(webp), formats=["WEBP"]).convert("RGBA")
    except Exception:  # whoever decodes it next sees this too
        return True
    rows = max(1, zeros // image.width)
    return rows <= image.height and bool(image.crop((0, image.height - rows, *image.size)).getcolors(1))


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


def damaged(image: Image.Image, fault: str) -> ImageError:
    """The error for an image whose file shows a fault."""
    return ImageError(
        f"the {image.format} data of {image.width} x {image.height} pixels are damaged or cut short ({fault}); write "
        "the file again or drop the sample",
        "image_undecodable",
    )


_FAULTS: dict[str, Callable[[bytes], str | None]] = {
    "PNG": _png_fault, "JPEG": _jpeg_fault, "MPO": _jpeg_fault, "WEBP": _webp_fault, "GIF": _gif_fault
}  # fmt: skip
"""By Pillow's name of the format: what is missing of a file, if anything is seen to be."""
