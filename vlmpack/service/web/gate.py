"""What a connection passes before it reaches an endpoint: limits on connections, the key, and limits on bodies.

A connection may wait for its client only for a limited time: for a request, or for the client to read a response. When
too many connections are open, the one that has waited longest is closed to admit the new one. So nobody who can connect
to the port, with or without the key, can use up the connections or the process's file descriptors.

Bodies are uncompressed: the client compresses only if the server asks it to. A body that is too large is read on for a
while, and discarded. If a server answers and closes while the client is still sending, the connection is reset. Then
the client sees a network error instead of the response, and retries.
"""

from __future__ import annotations

import hmac
import logging
import resource
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast, final

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from vlmpack.errors import RequestError
from vlmpack.service.limits import ServiceLimits
from vlmpack.service.wire.codec import JSON, to_json
from vlmpack.service.wire.messages import Rejected

log = logging.getLogger("vlmpack.service")

KEEP_ALIVE = 75
"""Seconds that an idle connection stays open; the client sends a heartbeat every 10 s."""
FILES = 65_536
"""Number of open files that the process asks for; the system may allow fewer."""
OPEN_PATHS = ("/", "/metrics", "/healthz", "/api/v1/healthz")
"""Paths served without the key."""
UNREAD_BYTES = 4 * 2**20
"""Bytes of the body to read and discard when the key is wrong, so that the client sees the response."""
DOWNLOADS = "/api/v1/downloads/"
"""Prefix of download paths, which need a signature instead of the key."""
LOGGED = 120
"""Maximum number of characters of a path in the log."""
DISCARDED_BYTES = 1024 * 2**20
"""Bytes of a too large body to discard before the connection is closed."""
BODY_RATE = 100_000
"""Bytes that give a body one more second to arrive. A client may send four large bodies at once over a slow line."""
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
        parts: list[bytes] = []
        size, seconds = 0, self.limits.body_seconds
        try:
            with anyio.move_on_after(seconds) as scope:
                async for piece in pieces:
                    scope.deadline += len(piece) / BODY_RATE
                    parts.append(piece)
                    size += len(piece)
                    self.held += len(piece)
                    if size > most or self.held > self.limits.bodies_bytes:
                        break
            if size > most:
                with anyio.move_on_after(seconds):
                    await discard(pieces, most=DISCARDED_BYTES)
                detail = f"a body of more than {most:,} bytes: send smaller or fewer datums in a request"
                raise Rejected(detail, status=413, beginning=b"".join(parts)[:BEGINNING_BYTES])
            if self.held > self.limits.bodies_bytes:
                raise Rejected("too many requests are being received: try again", status=429)
            if scope.cancelled_caught:
                detail = f"the body did not arrive within {seconds:g} s and a second for each {BODY_RATE:,} bytes"
                raise Rejected(f"{detail}: send smaller requests", status=408)
        finally:
            self.held -= size
        return b"".join(parts)


async def discard(pieces: AsyncIterator[bytes], *, most: int) -> None:
    """Receive at most this many further bytes of a body, and forget them."""
    async for piece in pieces:
        most -= len(piece)
        if most < 0:
            return


# ---------------------------------------------------------------------- connections


def raise_file_limit() -> int:
    """Raise the process's limit of open files as far as `FILES` and the system allow, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= FILES:
        return FILES
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


@final
class Connection(H11Protocol):
    """A connection of uvicorn with limits on idle connections.

    Args:
        most: maximum number of open connections. Beyond it, the one that has waited longest for its client is closed.
        header_seconds: time for the first request's header to arrive.
    """

    def __init__(self, *args: Any, most: int, header_seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most, self._header_seconds = most, header_seconds
        self.since = self.loop.time()

    @property
    def is_waiting(self) -> bool:
        """Return whether the client has to act: send a request, of which a part does not count, or read a response."""
        return self.cycle is None or self.cycle.response_complete or self.flow.write_paused

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        every = cast("set[Connection]", self.connections)
        opened = [each for each in every if each.transport.get_write_buffer_size() or not each.transport.is_closing()]
        if len(opened) > self._most:
            waiting = [each for each in opened if each.is_waiting and each is not self]
            min(waiting, key=lambda each: each.since, default=self).end()

    def pause_writing(self) -> None:
        self.since = self.loop.time()
        super().pause_writing()

    def on_response_complete(self) -> None:
        self.since = self.loop.time()
        super().on_response_complete()

    def close_if_late(self) -> None:
        """Close the connection if it has waited too long.

        uvicorn's own timer is not enough: it stops at the first byte of a header.
        """
        seconds = self._header_seconds if self.cycle is None else KEEP_ALIVE
        if self.is_waiting and self.loop.time() > self.since + seconds:
            self.end()

    def end(self) -> None:
        """Close the connection. A client that reads nothing would keep it open, if it were only closed."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()


# ---------------------------------------------------------------------- the key


def answer(value: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Make a JSON response."""
    return Response(to_json(value), status_code=status, media_type=JSON, headers=dict(headers or {}))


@final
class Gate:
    """ASGI middleware that checks the key, logs each request, and answers for internal errors.

    Args:
        app: the app behind it.
        key: the key that clients have to send.
        seconds: how long to read the body of a request with a wrong key, so that its client sees the response.
    """

    def __init__(self, app: ASGIApp, *, key: str, seconds: float) -> None:
        self._app, self._key, self._seconds = app, key.encode("utf-8"), seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, seen = time.perf_counter(), {"status": 0, "bytes": 0}

        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen["status"] = message["status"]
            else:
                seen["bytes"] += len(message.get("body", b""))
            await send(message)

        try:
            if self._is_allowed(scope):
                await self._app(scope, receive, send_and_count)
            else:
                with anyio.move_on_after(self._seconds), suppress(ClientDisconnect):
                    await discard(Request(scope, receive).stream(), most=UNREAD_BYTES)
                detail = "the key (X-API-Key) is not this service's; it stands in the service's key file"
                refusal = answer({"detail": detail}, status=401, headers={"Connection": "close"})
                await refusal(scope, receive, send_and_count)
        except Exception as error:  # Starlette has answered
            if not isinstance(error, RequestError | ClientDisconnect):
                log.error("%s %s failed", scope["method"], _logged(scope["path"]), exc_info=error)
        finally:
            milliseconds = (time.perf_counter() - start) * 1000
            sizes = f"{seen['status']} {milliseconds:.1f} ms {seen['bytes']} bytes"
            log.info("%s %s %s", scope["method"], _logged(scope["path"]), sizes)

    def _is_allowed(self, scope: Scope) -> bool:
        is_open = scope["path"] in OPEN_PATHS or scope["path"].startswith(DOWNLOADS)
        if is_open and scope["method"] in ("GET", "HEAD"):
            return True
        headers = dict(reversed(scope["headers"]))  # of a repeated header, the first
        sent = headers.get(b"x-api-key") or headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        return hmac.compare_digest(sent, self._key)


def _logged(path: str) -> str:
    """Return a path for the log, without signatures, because a signature opens a file."""
    return DOWNLOADS if path.startswith(DOWNLOADS) else ascii(path[:LOGGED])[1:-1]
