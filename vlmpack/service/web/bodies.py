"""Receive request bodies within limits. Bodies are uncompressed: the client compresses only if the server asks it to.

The reader keeps reading a body that is too large for a while, and discards it. If a server answers and closes while the
client is still sending, the connection is reset. Then the client sees a network error instead of the response, and
retries.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import final

import anyio

from vlmpack.service.limits import ServiceLimits
from vlmpack.service.wire.messages import Rejected

DISCARDED_BYTES = 1024 * 2**20
"""Bytes of a too large body to discard before the connection is closed."""
BEGINNING_BYTES = 65_536
"""Bytes of a refused body to keep, because they name the request."""


@final
@dataclass(kw_only=True)
class BodyReader:
    """Receives bodies, within a budget for all of them together."""

    limits: ServiceLimits
    """Limits of the service."""
    held: int = 0
    """Bytes of the bodies that are being received."""

    async def read(self, pieces: AsyncIterator[bytes], *, encoding: str, most: int) -> bytes:
        """Receive a body.

        Args:
            pieces: pieces of the body as they arrive.
            encoding: value of the Content-Encoding header.
            most: maximum size of the body in bytes.

        Raises:
            Rejected: status 408: the body arrived too slowly; 413: it is too large; 415: it is compressed; 429: too
                many bodies are being received.
        """
        if encoding not in ("", "identity"):
            raise Rejected(f"Content-Encoding {encoding!r:.40}: send the body as it is", status=415)
        try:
            with anyio.fail_after(self.limits.body_seconds):
                return await self._receive(pieces, most)
        except TimeoutError as error:
            message = f"the body did not arrive within {self.limits.body_seconds:g} s"
            raise Rejected(message, status=408) from error

    async def _receive(self, pieces: AsyncIterator[bytes], most: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        try:
            async for piece in pieces:
                size += len(piece)
                self.held += len(piece)
                if size > most:
                    await discard(pieces, most=DISCARDED_BYTES)
                    detail = f"a body of more than {most:,} bytes: send smaller or fewer datums in a request"
                    raise Rejected(detail, status=413, beginning=(b"".join(parts) + piece)[:BEGINNING_BYTES])
                if self.held > self.limits.bodies_bytes:
                    raise Rejected("too many requests are being received: try again", status=429, retry_after=1)
                parts.append(piece)
        finally:
            self.held -= size
        return b"".join(parts)


async def discard(pieces: AsyncIterator[bytes], *, most: int) -> None:
    """Receive at most this many further bytes of a body, and forget them."""
    async for piece in pieces:
        most -= len(piece)
        if most < 0:
            return
