"""The service's wire: what a training request costs beside the engine's work, and how long clients wait for each other.

    client ──body──▶ parse ─ journal ─▶ [encode: images to patches] ─▶ [rows] ─▶ reply ─ journal ──▶ client
                     └── wire ───────┘  └── engine, as in process ───────────┘   └── wire ───────────┘

A whole `vlmpack serve` in this process, on a socket. Bodies are made before the clock starts, as the client's own work
is not the server's; what is left of its part is a send and a read.
"""

from __future__ import annotations

import http.client
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, final

import numpy as np

from benchmarks.figures import BenchSettings, Figure, Target
from benchmarks.timing import CLOCKS, Clock, Spread, new_garbage_only

WIRE = Target(limit=0.05, better="lower")
LONGEST_WAIT = Target(limit=3.0, better="lower")
KEY, NAME = "tml-benchmark", "benchmark"
PROTOBUF = "application/x-protobuf"
LEAST_ROUNDS = 3
FLOAT32, INT64 = 1, 2
"""Types of tensors on the wire."""


@final
@dataclass
class EngineTime:
    """Seconds in the engine, by clock; encoding and rows of one request follow each other."""

    seconds: dict[Clock, float] = field(default_factory=lambda: dict.fromkeys(CLOCKS, 0.0))
    """Since the last `reset`."""

    def reset(self) -> None:
        """Begin at 0."""
        self.seconds = dict.fromkeys(CLOCKS, 0.0)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is done in the block."""
        before = now()
        try:
            yield
        finally:
            self.seconds = {clock: self.seconds[clock] + now()[clock] - before[clock] for clock in CLOCKS}

    def watch(self, engine: Any) -> None:
        """Count every encoding and every row of an engine."""
        encode, begin = engine.encode, engine.forward_backward

        def timed_encode(request: Any) -> Any:
            with self.counted():
                return encode(request)

        def timed_begin(requests: Any) -> Any:
            with self.counted():
                work = begin(requests)
            run_row = work.run_row

            def timed_row() -> None:
                with self.counted():
                    run_row()

            work.run_row = timed_row
            return work

        engine.encode, engine.forward_backward = timed_encode, timed_begin


def now() -> dict[Clock, float]:
    """Both clocks."""
    return {"wall": time.perf_counter(), "cpu": time.process_time()}


@final
class Connection:
    """One client's connection: requests by their paths, results waited for."""

    def __init__(self, port: int) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port)

    def send(self, path: str, body: bytes, kind: str = "application/json") -> tuple[int, bytes]:
        """POST; returns status and body of the answer."""
        headers = {"X-API-Key": KEY, "Content-Type": kind}
        self._http.request("POST", f"/api/v1/{path}", body, headers)
        answer = self._http.getresponse()
        return answer.status, answer.read()

    def call(self, path: str, **fields: Any) -> dict[str, Any]:
        """POST JSON; returns that of the answer."""
        status, body = self.send(path, json.dumps(fields).encode())
        assert status == 200, body
        return json.loads(body)

    def result(self, request_id: str) -> bytes:
        """Wait for a result."""
        status = 408
        body = b""
        while status == 408:
            status, body = self.send("retrieve_future", json.dumps({"request_id": request_id}).encode())
        assert status == 200 and not body.startswith(b'{"error"'), body
        return body

    def model(self, *, rank: int) -> str:
        """Create an adapter in a session of its own; returns its id."""
        session = self.call("create_session", tags=[], sdk_version="0.38.0")["session_id"]
        fields = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": NAME,
            "lora_config": {"rank": rank, "seed": 1},
        }
        self.result(self.call("create_model", **fields)["request_id"])
        return f"{session}:train:0"

    def train(self, body: bytes) -> bytes:
        """One training request, from its body to its result."""
        status, answer = self.send("forward_backward", body, PROTOBUF)
        assert status == 200, answer
        return self.result(json.loads(answer)["request_id"])

    def close(self) -> None:
        """Close it."""
        self._http.close()


@contextmanager
def serving(model: Any, processor: Any, *, row_tokens: int) -> Iterator[tuple[int, EngineTime]]:
    """A service in this process on a state folder of its own; yields its port and the time of its engine."""
    import uvicorn

    from vlmpack.service import Base, Service, ServiceLimits, ServiceSettings, bind

    with tempfile.TemporaryDirectory() as folder:
        base = Base(name=NAME, source=NAME, model=model, processor=processor)
        settings = ServiceSettings(state=Path(folder), key=KEY, limits=ServiceLimits(row_tokens=row_tokens))
        service, engine_time = Service(base, settings), EngineTime()
        engine_time.watch(service.engine)
        listening = bind("127.0.0.1", 0)
        listening.listen()  # clients wait until the app has started
        server = uvicorn.Server(uvicorn.Config(service.app(), log_config=None, access_log=False, lifespan="on"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield listening.getsockname()[1], engine_time
        finally:
            server.should_exit = True
            thread.join()


def body_of(model_id: str, seq_id: int, data: Sequence[Any]) -> bytes:
    """A training request as the client sends it; `data` are datums of the service."""
    from vlmpack.service.protobuf import message

    request = message("ForwardBackwardRequest")(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    for datum in data:
        added = request.data.add()
        for chunk in datum.chunks:
            if "tokens" in vars(chunk):
                added.model_input.add().encoded_text.tokens = chunk.tokens.astype("<i4").tobytes()
                continue
            image = added.model_input.add().image
            image.data, image.format, image.expected_tokens = chunk.data, chunk.format, chunk.expected_tokens
        targets = datum.inputs["target_tokens"]
        weights = np.ones(len(targets), "<f4")
        for name, values, dtype in (("target_tokens", targets.astype("<i8"), INT64), ("weights", weights, FLOAT32)):
            tensor = added.loss_fn_inputs.add(key=name).value
            tensor.dense, tensor.dtype = values.tobytes(), dtype
            tensor.shape.append(len(values))
    return request.SerializeToString()


def measure_wire(port: int, engine_time: EngineTime, data: Sequence[Any], settings: BenchSettings) -> Iterator[Figure]:
    """Time whole requests of one client: what is not the engine's, over what is."""
    client = Connection(port)
    model_id = client.model(rank=8)
    rounds: dict[Clock, list[float]] = {clock: [] for clock in CLOCKS}
    seconds: list[float] = []
    with new_garbage_only():
        began, number = time.perf_counter(), 0
        while number <= LEAST_ROUNDS or time.perf_counter() - began < settings.seconds:
            number += 1
            body = body_of(model_id, number, data)
            engine_time.reset()
            before = now()
            client.train(body)
            after = now()
            if number == 1:  # libraries load
                continue
            seconds.append(after["wall"] - before["wall"])
            for clock in CLOCKS:
                inside = engine_time.seconds[clock]
                rounds[clock].append((after[clock] - before[clock] - inside) / inside)
    client.close()
    size = f"{len(data)} image datums"
    yield Figure.measured("service", f"{size} over the wire", Spread.of(seconds), "s")
    clocks = {clock: Spread.of(values).median for clock, values in rounds.items()}
    spread = Spread.of(rounds[settings.clock])
    yield Figure.measured("service", f"wire / engine, {size}", spread, "x", clocks=clocks, target=WIRE)


def measure_waits(port: int, data: Sequence[Any], *, clients: int, requests: int) -> Figure:
    """Let clients send small requests at once, each its next one when it has the result: longest wait over the mean."""
    connections = [Connection(port) for _ in range(clients)]
    models = [connection.model(rank=8) for connection in connections]
    bodies = [[body_of(model, number, data) for number in range(1, requests + 1)] for model in models]
    waits: list[float] = []
    together = threading.Barrier(clients)

    def run(client: Connection, own: Sequence[bytes]) -> None:
        together.wait()
        for body in own:
            begin = time.perf_counter()
            client.train(body)
            waits.append(time.perf_counter() - begin)

    _run_all([lambda at=at: run(connections[at], bodies[at]) for at in range(clients)])
    for connection in connections:
        connection.close()
    assert len(waits) == clients * requests
    value = max(waits) / mean(waits)
    return Figure(
        case="service", name=f"longest / mean wait, {clients} clients", value=value, unit="x", target=LONGEST_WAIT
    )


def _run_all(calls: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
