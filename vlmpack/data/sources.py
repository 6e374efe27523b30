"""The encoded bytes behind an image or a video, from whatever a sample holds: an open file, and never a connection.

| source                               | read as                                                       |
|--------------------------------------|---------------------------------------------------------------|
| path, `file://` path                 | a regular local file                                          |
| bytes                                | themselves                                                    |
| `{"bytes": ..., "path": ...}`        | the bytes, or the path where they are None                    |
| `data:...;base64,...`                | the payload, strictly base64                                  |
| `http(s)://` and every other address | refused                                                       |
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from errno import ENAMETOOLONG
from pathlib import Path
from stat import S_ISREG
from typing import IO, Any, Literal, final
from urllib.parse import unquote

from vlmpack.data.pixels import ImageError

Kind = Literal["image", "video"]


def open_source(source: Any, *, kind: Kind, remedy: str, check_bytes: Callable[[int], None]) -> IO[bytes]:
    """Open the encoded bytes of an image or a video.

    Args:
        source: see the table at the top of the file.
        kind: the first word of the reason of an error, and what its message speaks of.
        remedy: the end of the message about a source of another type.
        check_bytes: raises an ImageError for too many bytes, before they are read.

    Raises:
        ImageError: there are none (`image_missing`, `image_remote`, `image_source`, or the same with `video`), or too
            many.
    """
    return _Opener(kind=kind, remedy=remedy, check_bytes=check_bytes).open(source)


def short(text: str) -> str:
    """Return both ends of a long path or address, quoted: its place and its name."""
    return repr(text if len(text) <= 80 else f"{text[:37]}...{text[-40:]}")


@final
@dataclass(frozen=True, kw_only=True)
class _Opener:
    """See `open_source`."""

    kind: Kind
    remedy: str
    check_bytes: Callable[[int], None]

    def open(self, source: Any) -> IO[bytes]:
        if isinstance(source, Mapping):
            for key in ("bytes", "path"):
                if source.get(key) is not None:
                    return self.open(source[key])
            keys = sorted(map(str, source))
            fault = f"{self._a_kind} dict must hold 'bytes' or 'path'; this one has the keys {keys}"
            raise ImageError(fault, f"{self.kind}_source")
        if isinstance(source, Path):
            return self._open_file(source)
        if isinstance(source, str):
            return self._open_text(source)
        if isinstance(source, (bytes, bytearray, memoryview)):
            return io.BytesIO(source)
        fault = f"{self._a_kind} of type {type(source).__name__} cannot be read; {self.remedy}"
        raise ImageError(fault, f"{self.kind}_source")

    @property
    def _a_kind(self) -> str:
        return "an image" if self.kind == "image" else "a video"

    def _open_text(self, text: str) -> IO[bytes]:
        scheme = text.split(":", 1)[0].lower()
        if scheme == "data":
            return io.BytesIO(self._decode_data_uri(text))
        if scheme == "file" and text[4:7] == "://":
            return self._open_file(_file_uri_path(text))
        if "://" in text[:32]:
            raise ImageError(
                f"the {self.kind} address {short(text)} is remote; nothing is fetched while samples are read: "
                f"download the {self.kind} first and give its path or bytes",
                f"{self.kind}_remote",
            )
        return self._open_file(Path(text))

    def _decode_data_uri(self, text: str) -> bytes:
        header, _, payload = text.partition(",")
        if not header.lower().endswith(";base64"):
            example = "data:image/png" if self.kind == "image" else "data:video/mp4"
            raise ImageError(f"the data URI {short(text)} is no {example};base64,<payload>", f"{self.kind}_source")
        self.check_bytes(len(payload) * 3 // 4)
        try:
            return base64.b64decode("".join(payload.split()), validate=True)
        except (binascii.Error, ValueError) as error:
            fault = f"the data URI {short(text)} is not valid base64: {error}"
            raise ImageError(fault, f"{self.kind}_source") from None

    def _open_file(self, path: Path) -> IO[bytes]:
        """A regular file; a device or a pipe, which may never end, is not one."""
        try:
            status = path.stat()
            if S_ISREG(status.st_mode):
                self.check_bytes(status.st_size)
                return path.open("rb")
        except (FileNotFoundError, NotADirectoryError, ValueError):  # a null byte
            pass
        except OSError as error:
            if error.errno != ENAMETOOLONG:
                fault = f"the {self.kind} file {short(str(path))} cannot be read: {error}"
                raise ImageError(fault, f"{self.kind}_missing") from error
        raise ImageError(f"there is no {self.kind} file at {short(str(path))}; check the path", f"{self.kind}_missing")


def _file_uri_path(uri: str) -> Path:
    """The path behind `file://`: literal, as qwen-vl-utils reads it, or percent-decoded (RFC 8089) if there is none."""
    rest = uri[len("file://localhost" if uri[7:17] == "localhost/" else "file://") :]
    return Path(rest) if _is_file(Path(rest)) else Path(unquote(rest))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name too long, a null byte
        return False
