"""The ASGI app: the routes of both faces, the key before them, errors as answers, and one log line a request."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Lifespan, Message, Receive, Scope, Send

from vlmpack.errors import RequestError
from vlmpack.service.bodies import BodyError
from vlmpack.service.http import HTTPError, answer, error_response

log = logging.getLogger("vlmpack.service")

OPEN_PATHS = ("/", "/metrics", "/healthz", "/api/v1/healthz")
"""Served without the key."""
UNREAD_BYTES = 4 * 2**20
"""Bytes of a body that are read and thrown away when the key is wrong, so that the client sees the answer."""
LOGGED = 120
"""Most characters of a path in the log."""


def make_app(
    routes: Sequence[BaseRoute],
    *,
    key: str,
    not_found: Callable[[Request, HTTPException], Awaitable[Response]],
    lifespan: Lifespan[Any] | None = None,
) -> ASGIApp:
    """Put routes, the key and errors together.

    Args:
        routes: of the service.
        key: clients send it as X-API-Key, or as Authorization: Bearer.
        not_found: answers for a path or method that is not among the routes.
        lifespan: of the app.
    """
    handled = (HTTPError, BodyError, RequestError, ClientDisconnect)
    handlers: Mapping[Any, Any] = {
        **dict.fromkeys(handled, _answer_error),
        404: not_found,
        405: not_found,
        Exception: _answer_ours,
    }
    return Gate(Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan), key=key)


def _answer_error(request: Request, error: Exception) -> Response:
    response = error_response(error)
    assert response is not None
    return response


def _answer_ours(request: Request, error: Exception) -> Response:
    return answer({"detail": "an error of the service, which its log has"}, status=500)


@final
class Gate:
    """Lets requests with the key through, logs each one, and answers for errors of ours."""

    def __init__(self, app: ASGIApp, *, key: str) -> None:
        """Keep the app behind it and the key."""
        self._app = app
        self._key = key.encode("utf-8")

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
                await _discard(receive)
                wrong = HTTPError(401, "the key (X-API-Key) is not this service's; it stands in the service's key file")
                await wrong.response()(scope, receive, send_and_count)
        except Exception as error:
            await _answer_failure(error, seen["status"], (scope, receive, send_and_count))
        finally:
            milliseconds = (time.perf_counter() - start) * 1000
            path = ascii(scope["path"][:LOGGED])[1:-1]
            sizes = f"{seen['status']} {milliseconds:.1f} ms {seen['bytes']} bytes"
            log.info("%s %s %s", scope["method"], path, sizes)

    def _is_allowed(self, scope: Scope) -> bool:
        if scope["path"] in OPEN_PATHS:
            return True
        headers = dict(reversed(scope["headers"]))  # of one sent twice the first
        sent = headers.get(b"x-api-key") or headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        return hmac.compare_digest(sent, self._key)


async def _discard(receive: Receive) -> None:
    left = UNREAD_BYTES
    while left > 0:
        message = await receive()
        left -= len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body", False):
            return


async def _answer_failure(error: Exception, status: int, exchange: tuple[Scope, Receive, Send]) -> None:
    """Answer for an error that no handler took, unless an answer is under way."""
    scope, receive, send = exchange
    response = error_response(error)
    if response is None:
        log.error("%s %s failed", scope["method"], ascii(scope["path"][:LOGGED])[1:-1], exc_info=error)
    if response is not None and not status:
        await response(scope, receive, send)
