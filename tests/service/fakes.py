"""An engine of a few numbers with the manners of the real one: exact to the bit, and different for another order.

A model is a vector. A datum's gradient is its tokens, scaled by where its row lies, so that another division into rows
or another order of sums gives other bits; a step is AdamW without its moments' corrections.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vlmpack.errors import RequestError
from vlmpack.service.wire import messages

SIZE = 5
ROW = 3
"""Datums of a row."""


@dataclass(frozen=True)
class FakeBase:
    name: str = "base/fake"
    arch: str = "fake"
    tokenizer_id: str = "nowhere"


class PickleCodec:
    """In place of the wire format: tests send and read the objects themselves."""

    def decode(self, kind: str, body: bytes) -> messages.Request:
        request = pickle.loads(body)
        assert type(request).__name__ == kind
        return request

    def encode(self, outcome: messages.Outcome) -> messages.Reply:
        return messages.Reply(content_type="application/pickle", body=pickle.dumps(outcome))


@dataclass
class FakeModel:
    weights: np.ndarray
    moment: np.ndarray = field(default_factory=lambda: np.zeros(SIZE))
    steps: int = 0
    gradient: np.ndarray = field(default_factory=lambda: np.zeros(SIZE))
    lora: messages.LoraConfig | None = None


class FakeRows:
    def __init__(self, engine: FakeEngine, requests: Sequence[messages.ForwardBackward]) -> None:
        self.engine = engine
        self.requests = requests
        self.model = engine.all[requests[0].model_id]
        self.before = self.model.gradient.copy()
        datums = [(request, datum) for request in requests for datum in request.data]
        self.rows = [datums[at : at + ROW] for at in range(0, len(datums), ROW)]
        self.losses: dict[int, list[float]] = {id(request): [] for request in requests}

    @property
    def rows_left(self) -> int:
        return len(self.rows)

    def run_row(self) -> None:
        self.engine.wait("row")
        row = self.rows.pop(0)
        self.engine.log.append(("row", row[0][0].model_id, tuple(request.seq_id for request, _ in row)))
        for place, (request, datum) in enumerate(row):
            if request.loss_fn == "broken":
                raise RuntimeError("the engine broke")
            values = _numbers(datum)
            self.losses[id(request)].append(float(values @ self.model.weights))
            if not request.forward_only and request.loss_fn != "late":
                self.model.gradient = self.model.gradient + values / (1.0 + 1e-9 * (place + len(row)))

    def results(self) -> list[messages.ForwardBackwardResult | messages.Failure]:
        return [
            messages.Failure(message="datum 0: the ratio overflows", category="user")
            if request.loss_fn == "late"
            else messages.ForwardBackwardResult(
                logprobs=tuple(np.full(2, loss, np.float32) for loss in self.losses[id(request)]),
                metrics={"loss:sum": sum(self.losses[id(request)])},
            )
            for request in self.requests
        ]

    def cancel(self) -> None:
        self.model.gradient = self.before


def _numbers(datum: messages.Datum) -> np.ndarray:
    assert isinstance(datum.chunks[0], messages.TextChunk)
    return np.resize(datum.chunks[0].tokens, SIZE) / 7.0


class FakeSampler:
    """Samples tokens that depend on the snapshot and the seed alone, one step a slice."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.waiting: list[tuple[str, Path | None, messages.Sample]] = []
        self.fails_next = False

    @property
    def is_idle(self) -> bool:
        return not self.waiting

    def close(self, folder: Path | None) -> None:
        self.waiting = [entry for entry in self.waiting if entry[1] != folder]

    def add(self, key: str, folder: Path | None, prompt: Any, request: messages.Sample) -> None:
        self.waiting.append((key, folder, request))

    def step(self) -> list[tuple[str, messages.SampleResult | messages.Failure]]:
        self.engine.wait("sample")
        if self.fails_next:
            self.fails_next = False
            raise RuntimeError("the sampler broke")
        key, folder, request = self.waiting.pop(0)
        self.engine.log.append(("sample", request.sampling_session_id, (request.seq_id,)))
        assert request.params.seed is not None
        seeds = [request.params.seed + number for number in range(request.num_samples)]
        value = 0.0 if folder is None else float(np.load(folder / "model.npz")["weights"].sum())
        sequences = tuple(
            messages.SampledSequence(
                tokens=np.random.default_rng(seed).integers(0, 9, 3).astype(np.int32),
                logprobs=np.full(3, value, np.float32),
                stop_reason="length",
            )
            for seed in seeds
        )
        return [(key, messages.SampleResult(sequences=sequences))]


class FakeEngine:
    """See the top of the file.

    Args:
        gate: taken before each row, step and slice: a test that holds it decides how far the engine goes.
        most_models: at one time.
    """

    def __init__(self, gate: threading.Semaphore | None = None, *, most_models: int = 100) -> None:
        self.most_models = most_models
        self.base = FakeBase()
        self.gate = gate
        self.all: dict[str, FakeModel] = {}
        self.sampler = FakeSampler(self)
        self.log: list[tuple[str, str, tuple[int, ...]]] = []
        self.save_error: OSError | None = None
        self.step_error: Exception | None = None

    def wait(self, _: str) -> None:
        if self.gate is not None:
            self.gate.acquire()

    def models(self) -> tuple[str, ...]:
        return tuple(self.all)

    def encode(self, request: messages.ForwardBackward) -> messages.ForwardBackward:
        for place, datum in enumerate(request.data):
            assert isinstance(datum.chunks[0], messages.TextChunk)
            if (datum.chunks[0].tokens < 0).any():
                raise RequestError(f"datum {place}: a token is negative; send ids of the vocabulary")
        return request

    def encode_prompt(self, request: messages.Sample) -> messages.Sample:
        if not request.prompt:
            raise RequestError("the prompt is empty; send a token at least")
        return request

    def create(self, model_id: str, lora: messages.LoraConfig | None) -> None:
        assert model_id not in self.all
        if len(self.all) >= self.most_models:
            raise RequestError(f"there are {len(self.all)} models, as many as this server has; finish sessions")
        if lora is not None and lora.rank > 64:
            raise RequestError(f"rank {lora.rank} is over 64; choose a smaller one")
        seed = 0 if lora is None else lora.seed
        assert seed is not None
        self.all[model_id] = FakeModel(weights=np.random.default_rng(seed).normal(size=SIZE), lora=lora)

    def create_from(self, model_id: str, folder: Path, *, optimizer: bool) -> messages.LoraConfig | None:
        assert model_id not in self.all
        self.all[model_id] = FakeModel(weights=np.zeros(SIZE))
        self.load(model_id, folder, optimizer=optimizer)
        self.all[model_id].lora = messages.LoraConfig(rank=4, seed=1)
        return self.all[model_id].lora

    def free(self, model_id: str) -> None:
        del self.all[model_id]

    def forward_backward(self, requests: Sequence[messages.ForwardBackward]) -> FakeRows:
        self.log.append(("group", requests[0].model_id, tuple(request.seq_id for request in requests)))
        return FakeRows(self, requests)

    def optim_step(self, model_id: str, adam: messages.AdamParams) -> dict[str, float]:
        self.wait("step")
        model = self.all[model_id]
        self.log.append(("step", model_id, ()))
        before = model.moment
        model.moment = adam.beta1 * model.moment + (1 - adam.beta1) * model.gradient
        if adam.learning_rate < 0:
            model.gradient, model.moment = np.zeros(SIZE), before
            raise RequestError("the gradient is not finite; it is dropped")
        if self.step_error is not None:
            error, self.step_error = self.step_error, None
            raise error
        model.weights = model.weights - adam.learning_rate * model.moment / (np.abs(model.moment) ** 0.5 + adam.eps)
        norm = float(np.linalg.norm(model.gradient))
        model.gradient = np.zeros(SIZE)
        model.steps += 1
        return {"grad_norm:mean": norm}

    def save(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        if self.save_error is not None:
            raise self.save_error
        assert not any(folder.iterdir())
        model = self.all[model_id]
        extra = {"moment": model.moment, "steps": np.array(model.steps)} if optimizer else {}
        np.savez(folder / "model.npz", weights=model.weights, **extra)

    def load(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        model = self.all[model_id]
        with np.load(folder / "model.npz") as file:
            model.weights = file["weights"]
            model.moment = file["moment"] if optimizer else np.zeros(SIZE)
            model.steps = int(file["steps"]) if optimizer else 0
        model.gradient = np.zeros(SIZE)
