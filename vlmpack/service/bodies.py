"""Bodies of requests: received under caps, uncompressed: the client compresses only if the server asks it to.

A body that is too large is read on for a while all the same, and thrown away. A server that answers and closes while
the client still sends resets the connection; the client sees no answer but a network error, which it retries.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import final

import anyio

from vlmpack.service.limits import ServiceLimits
from vlmpack.service.messages import Rejected

DISCARDED_BYTES = 1024 * 2**20
"""Bytes of a body that is too large that are thrown away before the connection is cut."""
BEGINNING_BYTES = 65_536
"""Bytes of a refused body that are kept, for the name of the request."""


@final
@dataclass(kw_only=True)
class BodyReader:
    """Receives bodies, all of them together within a budget."""

    limits: ServiceLimits
    """Of the service."""
    held: int = 0
    """Bytes that are being received now."""

    async def read(self, pieces: AsyncIterator[bytes], *, encoding: str, most: int) -> bytes:
        """Receive a body.

        Args:
            pieces: of the body, as they come in.
            encoding: value of Content-Encoding.
            most: bytes.

        Raises:
            Rejected: 408 too slow, 413 too large, 415 compressed, 429 too many at one time.
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
                    await _discard(pieces)
                    detail = f"a body of more than {most:,} bytes: send smaller or fewer datums in a request"
                    raise Rejected(detail, status=413, beginning=(b"".join(parts) + piece)[:BEGINNING_BYTES])
                if self.held > self.limits.bodies_bytes:
                    raise Rejected("too many requests are being received: try again", status=429, retry_after=1)
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
