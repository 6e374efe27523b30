"""A client in the test's own thread: requests by their short names, and replies waited for."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from service.fakes import FakeEngine, PickleCodec

from vlmpack.service.limits import ServiceLimits
from vlmpack.service.queue import queue as queues
from vlmpack.service.queue.checkpoints import StateFolder
from vlmpack.service.queue.journal import CheckpointRow, SamplingRow
from vlmpack.service.queue.queue import RequestQueue
from vlmpack.service.wire import codec as wire
from vlmpack.service.wire import messages

ADAM = messages.AdamParams(learning_rate=0.1, beta1=0.9, beta2=0.95, eps=1e4, weight_decay=0.0, grad_clip_norm=0.0)


def datum(*tokens: int) -> messages.Datum:
    return messages.Datum(chunks=(messages.TextChunk(tokens=np.array(tokens, np.int32)),))


def forward_backward(
    model: str, seq: int, *datums: messages.Datum, loss: str = "ok", forward_only: bool = False
) -> messages.Request:
    data = datums or (datum(seq, 2, 3),)
    return messages.ForwardBackward(model_id=model, seq_id=seq, data=data, loss_fn=loss, forward_only=forward_only)


def optim_step(model: str, seq: int, *, rate: float = 0.1) -> messages.Request:
    return messages.OptimStep(model_id=model, seq_id=seq, adam=replace(ADAM, learning_rate=rate))


def save(model: str, seq: int, name: str, *, overwrite: bool = False, ttl: int | None = None) -> messages.Request:
    return messages.SaveWeights(model_id=model, seq_id=seq, name=name, overwrite=overwrite, ttl_seconds=ttl)


def save_for_sampler(
    model: str, seq: int, name: str | None = None, *, number: int | None = None, ttl: int | None = None
) -> messages.Request:
    return messages.SaveForSampler(
        model_id=model, seq_id=seq, name=name, sampling_session_seq_id=number, ttl_seconds=ttl
    )


def load(model: str, seq: int, path: str, *, optimizer: bool = True) -> messages.Request:
    return messages.LoadWeights(model_id=model, seq_id=seq, path=path, optimizer=optimizer)


def create(session: str, number: int = 0, *, seed: int | None = 1, rank: int = 4) -> messages.Request:
    lora = messages.LoraConfig(rank=rank, seed=seed)
    return messages.CreateModel(session_id=session, model_seq_id=number, base_model="base/fake", lora=lora)


def create_from(session: str, number: int, path: str, *, optimizer: bool = True) -> messages.Request:
    return messages.CreateFromCheckpoint(session_id=session, model_seq_id=number, path=path, optimizer=optimizer)


def sample(sampler: str, seq: int, *, seed: int | None = 3, count: int = 1) -> messages.Request:
    prompt = (messages.TextChunk(tokens=np.array([1, 2], np.int32)),)
    return messages.Sample(
        sampling_session_id=sampler,
        seq_id=seq,
        prompt=prompt,
        num_samples=count,
        params=messages.SamplingParams(seed=seed),
    )


class Client:
    """Talks to a queue."""

    def __init__(self, queue: RequestQueue) -> None:
        self.queue = queue

    def post(self, request: messages.Request) -> str:
        return self.queue.submit(request, pickle.dumps(request))

    def reply(self, request_id: str, timeout: float = 20.0) -> Any:
        return asyncio.run(self.queue.reply(request_id, timeout))

    def outcome(self, request_id: str) -> Any:
        """What came of a request; waited for."""
        reply = self.reply(request_id)
        assert isinstance(reply, messages.Reply), reply
        outcome = pickle.loads(reply.body)
        return SimpleNamespace(**outcome) if isinstance(outcome, dict) else outcome

    def call(self, request: messages.Request) -> Any:
        return self.outcome(self.post(request))

    def model(self, **settings: Any) -> str:
        """A new model of a new session."""
        session = self.queue.create_session()
        self.call(create(session, **settings))
        return f"{session}:train:0"

    def samplers(self, session: str) -> list[str]:
        return [row.id for row in self.queue.journal.rows(SamplingRow, session=session)]

    def checkpoints(self) -> list[CheckpointRow]:
        return self.queue.journal.rows(CheckpointRow)

    def delete_checkpoint(self, path: str) -> None:
        self.queue.journal.drop_checkpoint(self.queue.journal.checkpoint(path))

    def set_ttl(self, path: str, seconds: int | None) -> None:
        expires = None if seconds is None else time.time() + seconds
        self.queue.journal.set_expiry(self.queue.journal.checkpoint(path), expires)

    def sampler(self, session: str = "") -> str:
        """Sampling session 0 of a session, by default a new one, on the base model."""
        session = session or self.queue.create_session()
        return self.queue.create_sampling_session(session, 0, path=None, base_model="base/fake")


@contextmanager
def served(
    state: Path,
    engine: FakeEngine | None = None,
    *,
    start: bool = True,
    limits: ServiceLimits = ServiceLimits(),  # noqa: B008 (frozen)
    codec: PickleCodec | None = None,
) -> Iterator[tuple[Client, FakeEngine]]:
    """A queue on a state folder, and its engine."""
    engine = engine or FakeEngine()
    folder = StateFolder(state, base_model=engine.base.name)
    codec = codec or PickleCodec()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "decode", codec.decode)
        patch.setattr(wire, "encode", codec.encode)
        queue = RequestQueue(cast("Any", engine), cast("Any", engine.sampler), folder, limits=limits)
        if start:
            queue.start()
        try:
            yield Client(queue), engine
        finally:
            if engine.gate is not None:
                engine.gate.release(10_000)
            queue.close()


class Clock:
    """The clock of queues, moved by hand."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.time = 1000.0, time.time
        patch.setattr(queues, "time", self)

    def monotonic(self) -> float:
        return self.now


def until(is_so: Any, seconds: float = 20.0) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


def is_failure(outcome: messages.Outcome, *words: str) -> bool:
    text = str(outcome)
    return type(outcome).__name__ == "Failure" and all(word in text for word in words)
