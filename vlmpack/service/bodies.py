"""Bodies of requests: received under caps, before and after decompression.

A body that is too large is read on for a while all the same, and thrown away. A server that answers and closes while
the client still sends resets the connection; the client sees no answer but a network error, which it retries.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, final

import anyio
import anyio.to_thread

from vlmpack.service.limits import ServiceLimits

DISCARDED_BYTES = 1024 * 2**20
"""Bytes of a body that is too large that are thrown away before the connection is cut."""
PIECE_BYTES = 1024
"""Compressed bytes that are handed to a decompressor at one time: of zstd they become 32 MiB at most."""
BEGINNING_BYTES = 65_536
"""Bytes of a refused body that are kept, for the name of the request."""
WINDOW_BYTES = 2**27
"""Largest window of a zstd frame; a decompressor holds as much."""


@final
class HTTPError(Exception):
    """An answer with an error status."""

    def __init__(self, status: int, detail: str, *, retry_after: float | None = None, beginning: bytes = b"") -> None:
        """Say why a request is refused.

        Args:
            status: of the answer.
            detail: what was seen and the remedy.
            retry_after: seconds until the client should try again, of 429 and 503.
            beginning: of its body, decompressed, as far as it was received.
        """
        super().__init__(detail)
        self.status, self.retry_after, self.beginning = status, retry_after, beginning


@final
@dataclass(kw_only=True)
class BodyReader:
    """Receives bodies, all of them together within a budget."""

    limits: ServiceLimits
    """Of the service."""
    held: int = 0
    """Bytes that are being received now."""

    async def read(
        self, pieces: AsyncIterator[bytes], *, encoding: str, most: int, decoded: int | None = None
    ) -> bytes:
        """Receive a body and decompress it.

        Args:
            pieces: of the body, as they come in.
            encoding: value of Content-Encoding.
            most: bytes on the wire.
            decoded: bytes after decompression; None: as many.

        Raises:
            HTTPError: 408 too slow, 413 too large, 415 unknown compression, 400 damaged, 429 too many at one time.
        """
        is_plain = encoding in ("", "identity")
        if not is_plain:
            new_decompressor(encoding)  # refuses an unknown one at once
        try:
            with anyio.fail_after(self.limits.body_seconds):
                body = await self._receive(pieces, encoding, most)
        except TimeoutError as error:
            raise HTTPError(408, f"the body did not arrive within {self.limits.body_seconds:g} s") from error
        if is_plain:
            return body
        return await anyio.to_thread.run_sync(decompress, body, encoding, decoded or most)

    async def _receive(self, pieces: AsyncIterator[bytes], encoding: str, most: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        try:
            async for piece in pieces:
                size += len(piece)
                self.held += len(piece)
                if size > most:
                    await _discard(pieces)
                    detail = f"a body of more than {most:,} bytes: send smaller or fewer datums in a request"
                    raise HTTPError(413, detail, beginning=_beginning(b"".join(parts) + piece, encoding))
                if self.held > self.limits.bodies_bytes:
                    raise HTTPError(429, "too many requests are being received: try again", retry_after=1)
                parts.append(piece)
        finally:
            self.held -= size
        return b"".join(parts)


async def _discard(pieces: AsyncIterator[bytes]) -> None:
    left = DISCARDED_BYTES
    async for piece in pieces:
        left -= len(piece)
        if left < 0:
            return


# ---------------------------------------------------------------------- decompression


def new_decompressor(encoding: str) -> Any:
    """Return an object with `decompress(data)` and `eof`.

    Raises:
        HTTPError: 415, an encoding that is not one of zstd, gzip, deflate and identity.
    """
    if encoding not in DECOMPRESSORS:
        raise HTTPError(415, f"Content-Encoding {encoding!r}: send {', '.join(sorted([*DECOMPRESSORS, 'identity']))}")
    return DECOMPRESSORS[encoding]()


def decompress(body: bytes, encoding: str, most: int) -> bytes:
    """Decompress a body, which may say nothing or something false about its size.

    Raises:
        HTTPError: 413 larger than `most`, 400 damaged, cut off, or followed by something else.
    """
    decompressor = new_decompressor(encoding)
    pieces: list[bytes] = []
    size = 0
    for start in range(0, len(body), PIECE_BYTES):
        try:
            pieces.append(decompressor.decompress(body[start : start + PIECE_BYTES]))
        except Exception as error:  # each library has errors of its own
            raise HTTPError(400, f"the body is not {encoding} ({error}): send it again") from error
        size += len(pieces[-1])
        if size > most:
            beginning = b"".join(pieces)[:BEGINNING_BYTES]
            detail = (
                f"a body of more than {most:,} bytes after decompression: send smaller or fewer datums in a request"
            )
            raise HTTPError(413, detail, beginning=beginning)
        if decompressor.eof:
            if start + PIECE_BYTES < len(body) or decompressor.unused_data:
                raise HTTPError(400, f"the {encoding} body has something after its end: send it again")
            return b"".join(pieces)
    raise HTTPError(400, f"the {encoding} body is cut off: send it again, whole")


def _beginning(body: bytes, encoding: str) -> bytes:
    """Return what the beginning of a cut-off body decompresses to; nothing where it cannot be."""
    if encoding in ("", "identity"):
        return body[:BEGINNING_BYTES]
    try:
        return new_decompressor(encoding).decompress(body[:PIECE_BYTES])[:BEGINNING_BYTES]
    except Exception:  # each library has errors of its own
        return b""


def _zstd() -> Any:
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES).decompressobj()


DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "zstd": _zstd,
    "gzip": lambda: zlib.decompressobj(wbits=31),
    "deflate": lambda: zlib.decompressobj(),
}
