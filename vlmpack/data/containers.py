"""Files of videos whose structure shows that they were cut short: libav reads what is there and reports nothing.

| container             | what the file says of its own length                              |
|-----------------------|-------------------------------------------------------------------|
| mp4, mov (ISO BMFF)   | the size in front of each box of the outermost level              |
| mkv, webm (EBML)      | the size of the segment; a live recording has none                |
| avi (RIFF)            | the size of each chunk of the outermost level                     |

Only these sizes are read, not what lies between them.
"""

from __future__ import annotations

import io
from typing import IO

from vlmpack.data.pixels import ImageError

_BOX, _WIDE_BOX, _CHUNK = 8, 16, 8
"""Bytes of the header of a box, of a box with a size of 64 bits, and of a chunk."""
_FIRST_BOXES = (b"ftyp", b"styp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot")
"""Names of boxes with which mp4 and mov begin."""
_EBML, _SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
_UNFINISHED = 0xFFFFFF00
"""Sizes of RIFF from here on, and 0, were never filled in: the file was written to a pipe."""


def check_whole(file: IO[bytes]) -> None:
    """Refuse a file of a video that ends before it says that it does; the file is read from its start again.

    Raises:
        ImageError: it was cut short (reason ``"video_undecodable"``).
    """
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    start = file.read(12)
    if start.startswith(_EBML):
        end = _end_of_segment(file)
    elif start.startswith(b"RIFF") and start.endswith(b"AVI "):
        end = _end_of_chunks(file, size)
    elif start[4:8] in _FIRST_BOXES:
        end = _end_of_boxes(file, size)
    else:
        end = 0
    file.seek(0)
    if end > size:
        raise ImageError(
            f"the file of the video was cut short: by its own structure it has {end} bytes, and {size} are there; copy "
            "or download it again, or drop the sample",
            "video_undecodable",
        )


def _end_of_boxes(file: IO[bytes], size: int) -> int:
    """Where the last box ends; what is no box, such as a trailer of the camera, ends the search."""
    at = 0
    while at + _BOX <= size:
        file.seek(at)
        header = file.read(_WIDE_BOX)
        length, name = int.from_bytes(header[:4], "big"), header[4:8]
        if length == 1:
            length = int.from_bytes(header[8:], "big")
        if length < _BOX or not name.isalnum():  # 0: up to the end of the file
            break
        at += length
    return at


def _end_of_segment(file: IO[bytes]) -> int:
    """Where the first segment ends; 0: it does not say."""
    file.seek(len(_EBML))
    header = _read_size(file)
    if header is None:
        return 0
    file.seek(header, io.SEEK_CUR)
    if file.read(len(_SEGMENT)) != _SEGMENT:
        return 0
    length = _read_size(file)
    return 0 if length is None else file.tell() + length


def _read_size(file: IO[bytes]) -> int | None:
    """A number of EBML, whose first bit that is set says how many bytes it has; None: all ones, which is unknown."""
    first = file.read(1)
    if not first or not first[0]:
        return None
    more = 8 - first[0].bit_length()
    value = int.from_bytes(bytes([first[0] & (0x7F >> more)]) + file.read(more), "big")
    return None if value == (1 << 7 * (more + 1)) - 1 else value


def _end_of_chunks(file: IO[bytes], size: int) -> int:
    """Where the last chunk ends: large files have several, each padded to an even size."""
    at = 0
    while at + _CHUNK <= size:
        file.seek(at)
        name, length = file.read(4), int.from_bytes(file.read(4), "little")
        if name != b"RIFF" or not 0 < length < _UNFINISHED:
            break
        at += _CHUNK + length
        at += at % 2 if at < size else 0
    return at
