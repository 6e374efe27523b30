"""A proxy in front of the service that loses requests, loses replies and doubles requests, by a fixed rule.

client ──▶ FaultyProxy ──▶ server

request n of a kind:  n % 3 == 0   sent twice; the client gets the second reply
                      n % 5 == 2   sent; the reply is lost (the connection is closed)
                      n % 7 == 4   lost before it is sent
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from contextlib import suppress

EXEMPT = ("/api/v1/retrieve_future", "/api/v1/telemetry", "/api/v1/session_heartbeat", "/api/v1/client/config")
"""Paths that are only lost now and then: they are asked for all the time, or the client never repeats them."""


class FaultyProxy:
    """An HTTP/1.1 proxy on a port of its own, in a thread of its own."""

    def __init__(self, port: int) -> None:
        self.upstream = port
        self.counts: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.port = 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    def __enter__(self) -> FaultyProxy:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive()

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**26)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await asyncio.sleep(0.05)  # until their sockets are closed

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                request = head + await reader.readexactly(_length(head))
                reply = await self._answer(head.split(b" ")[1].decode(), request)
                if reply is None:
                    break
                writer.write(reply)
                await writer.drain()
        writer.close()

    async def _answer(self, path: str, request: bytes) -> bytes | None:
        """The reply, or None: the connection breaks."""
        kind = path.split("?")[0]
        self.counts[kind] += 1
        n = self.counts[kind]
        fault = self._fault(kind, n)
        self.done[fault] += 1
        if fault == "lost":
            return None
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            if fault == "doubled":
                await self._send(request)
            reply = await self._send(request)
            return None if fault == "reply lost" else reply
        return None

    def _fault(self, kind: str, n: int) -> str:
        if kind in EXEMPT:
            n = n // 3 if n % 3 == 0 else 1
        if n % 3 == 0:
            return "doubled"
        if n % 5 == 2:
            return "reply lost"
        return "lost" if n % 7 == 4 else "none"

    async def _send(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.upstream, limit=2**26)
        try:
            writer.write(request)
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            return head + await reader.readexactly(_length(head))
        finally:
            writer.close()


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return 0
