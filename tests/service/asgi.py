"""One request to an ASGI app, without a socket."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from service.fakes import FakeBase, FakeEngine

from vlmpack.service.engine.engine import BaseModel
from vlmpack.service.limits import ServiceLimits
from vlmpack.service.queue.checkpoints import StateFolder
from vlmpack.service.queue.queue import RequestQueue
from vlmpack.service.web.http import Endpoints, make_app

BASE = FakeBase().name
KEY = "tml-a-key-of-the-tests"
MODEL = BaseModel(
    name=BASE, arch="fake", tokenizer_id="/nowhere", max_context=4096, is_vision=False, eos=(), decode=str
)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Client:
    """Sends requests to an app."""

    app: Any
    queue: Any = None
    bodies: Any = None

    def session(self) -> str:
        return self.post("create_session", tags=[], sdk_version="0.38.0").json()["session_id"]

    def model(self) -> str:
        """Create a session and a model in it."""
        session_id = self.session()
        body = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4}}
        self.retrieve(self.post("create_model", **body).json()["request_id"])
        return f"{session_id}:train:0"

    def post(self, path: str, /, **body: Any) -> Answer:
        return self.send("POST", f"/api/v1/{path}", json.dumps(body).encode())

    def protobuf(self, body: bytes, **headers: str) -> Answer:
        kind = {"content-type": "application/x-protobuf"}
        return self.send("POST", "/api/v1/forward_backward", body, headers={**kind, **headers})

    def get(self, path: str, **parameters: Any) -> Answer:
        return self.send("GET", f"/api/v1/{path}", parameters=parameters)

    def retrieve(self, request_id: str) -> Answer:
        return self.post("retrieve_future", request_id=request_id)

    def send(
        self,
        method: str,
        path: str,
        body: bytes | Sequence[bytes] = b"",
        *,
        headers: Mapping[str, str] | None = None,
        key: str | None = KEY,
        parameters: Mapping[str, Any] | None = None,
        leaves: bool = False,
    ) -> Answer:
        """Send a request; `leaves`: the client is gone after the last piece of its body, which is not whole."""
        pieces = [body] if isinstance(body, bytes) else list(body)
        sent = {**({} if key is None else {"x-api-key": key}), **(headers or {})}
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "scheme": "http",
            "query_string": "&".join(f"{name}={value}" for name, value in (parameters or {}).items()).encode(),
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in sent.items()],
            "server": ("127.0.0.1", 8000),
        }
        return asyncio.run(_exchange(self.app, scope, pieces, leaves=leaves))


@contextmanager
def client_of(state: Path, limits: ServiceLimits, gate: threading.Semaphore | None = None) -> Iterator[Client]:
    """A client of a queue on a tiny engine."""
    engine, folder = FakeEngine(gate), StateFolder(state, base_model=BASE)
    queue = RequestQueue(cast("Any", engine), cast("Any", engine.sampler), folder, limits=limits)
    queue.start()
    endpoints = Endpoints(queue, MODEL, key=KEY)
    client = Client(app=None, queue=queue, bodies=endpoints.bodies)
    client.app = make_app(endpoints.routes(), endpoints=endpoints)
    try:
        yield client
    finally:
        if gate is not None:
            gate.release(1000)
        queue.close()


async def _exchange(app: Any, scope: dict[str, Any], pieces: list[bytes], *, leaves: bool) -> Answer:
    messages: list[Any] = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages.append({"type": "http.disconnect"} if leaves else {"type": "http.request", "body": b""})
    answer = Answer(status=0, headers={}, body=b"")

    async def receive() -> Any:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            answer.body += message.get("body", b"")

    await app(scope, receive, send)
    return answer
