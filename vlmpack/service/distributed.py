"""The engine on several ranks: rank 0 has the queue and the clients, every other rank does what it does.

    rank 0    HTTP ─ queue ─ DistributedEngine ──┬── its own engine
                                 commands        │
    rank 1    follow ◀───────────────────────────┴── an engine with the same models

Each rank has the base model, or its part of it, and all client models. Rows are dealt to ranks, their gradients are
summed when a work is done, and every rank takes the same step. Files are rank 0's; `load` reads the state folder on
every rank. Sampling is rank 0's, too, unless the base model is sharded.

Commands are objects that rank 0 pickles and its own workers unpickle, over gloo on 127.0.0.1 or the address that
torchrun gives them; nothing that a client sends is ever unpickled.
"""

from __future__ import annotations

import secrets
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from vlmpack.errors import RequestError
from vlmpack.service.datums import EncodedRequest, EncodedSequence
from vlmpack.service.engine import BaseModel, Engine, EngineConfig, Weights
from vlmpack.service.messages import (
    AdamParams,
    Failure,
    ForwardBackward,
    ForwardBackwardResult,
    LoraConfig,
    OptimStepResult,
    Sample,
)
from vlmpack.service.ranks import Ranks
from vlmpack.service.row_work import RowWork
from vlmpack.service.rows import WorkCount
from vlmpack.service.sampling import BatchedSampling, Finished, SamplingEngine

# ---------------------------------------------------------------------- commands


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Command:
    """A call of the engine that every rank makes."""

    method: str
    """Its name: a method of `Engine`, of its sampling engine or of a work; or "stop"."""
    arguments: dict[str, Any]
    """Its arguments by name; of a work's methods `work`, its number."""


@final
class Rank:
    """The engine and the works of one rank."""

    def __init__(self, engine: Engine, ranks: Ranks) -> None:
        assert engine.ranks is ranks
        self.engine, self.ranks = engine, ranks
        self.works: dict[int, RowWork] = {}

    def run(self, command: Command) -> Any:
        """Make a call on this rank.

        Raises:
            RequestError: a client's mistake, which every rank has found.
            RuntimeError: it failed on some ranks.
        """
        return self.ranks.together(lambda: self._call(command), name=command.method)

    def _call(self, command: Command) -> Any:
        engine, given = self.engine, command.arguments
        match command.method:
            case "create":
                return engine.create(**given)
            case "create_from":
                return engine.create_from(**given)
            case "free":
                return engine.free(**given)
            case "load":
                return engine.load(**given)
            case "optim_step":
                return engine.optim_step(**given)
            case "forward_backward":
                self.works[given["work"]] = work = engine.forward_backward(given["requests"])
                return work
            case "run_row":
                (work := self.works[given["work"]]).run_row()
                if not work.rows_left:
                    del self.works[given["work"]]
                return None
            case "cancel":
                return self.works.pop(given["work"]).cancel()
            case "open_sampling":
                return engine.sampler.open(**given)
            case "close_sampling":
                return engine.sampler.close(**given)
            case "add_sample":
                return engine.sampler.add(**given)
            case "step_sampling":
                return engine.sampler.step()
            case other:
                raise AssertionError(other)


def follow(engine: Engine, ranks: Ranks) -> None:
    """Do what rank 0 does until it stops; for every rank but that one.

    Raises:
        ConnectionError: rank 0 is gone.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it to all: rank 0 drains, and stops the others then
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank = Rank(engine, ranks)
    while True:
        command: Command = ranks.receive()
        if command.method == "stop":
            return
        try:
            rank.run(command)
        except (RequestError, RuntimeError, OSError):
            continue  # rank 0 tells its queue


# ---------------------------------------------------------------------- rank 0


@final
class DistributedWork:
    """A work whose rows are dealt to the ranks."""

    def __init__(self, engine: DistributedEngine, number: int, work: RowWork) -> None:
        self._engine, self._number, self._work = engine, number, work

    @property
    def rows_left(self) -> int:
        """Rows that have not run."""
        return self._work.rows_left

    @property
    def work(self) -> WorkCount:
        """Counts of computed rows."""
        return self._work.work

    def run_row(self) -> None:
        """Compute the next rows, one on each rank."""
        self._engine.call("run_row", work=self._number)

    def cancel(self) -> None:
        """Forget everything: no model has changed."""
        if self._work.rows_left:
            self._engine.call("cancel", work=self._number)

    def results(self) -> list[ForwardBackwardResult | Failure]:
        """One for each request, in order."""
        return self._work.results()


@final
class DistributedSampling:
    """Sampling from a sharded base model: every rank makes the same passes, rank 0's choices count."""

    def __init__(self, engine: DistributedEngine, sampler: SamplingEngine) -> None:
        self._engine, self._sampler = engine, sampler

    @property
    def sampled_tokens(self) -> int:
        """Tokens sampled so far."""
        return self._sampler.sampled_tokens

    @property
    def is_idle(self) -> bool:
        """Return whether there is nothing to do and nothing to return."""
        return self._sampler.is_idle

    def open(self, session_id: str, folder: Path | None) -> None:
        """Call `SamplingEngine.open` on every rank."""
        self._engine.call("open_sampling", session_id=session_id, folder=folder)

    def close(self, session_id: str) -> None:
        """Call `SamplingEngine.close` on every rank."""
        self._engine.call("close_sampling", session_id=session_id)

    def add(self, key: str, session_id: str, prompt: EncodedSequence, request: Sample) -> None:
        """Call `SamplingEngine.add` on every rank; a random seed is drawn once."""
        if request.params.seed is None:
            request = replace(request, params=replace(request.params, seed=secrets.randbits(63)))
        self._engine.call("add_sample", key=key, session_id=session_id, prompt=prompt, request=request)

    def step(self) -> list[Finished]:
        """Call `SamplingEngine.step` on every rank."""
        return self._engine.call("step_sampling")


@final
class DistributedEngine:
    """`Engine` for the queue of rank 0: what changes a model is done by every rank."""

    def __init__(self, engine: Engine, ranks: Ranks) -> None:
        """Lead the other ranks, which call `follow`."""
        self._rank, self._ranks, self._engine = Rank(engine, ranks), ranks, engine
        self._numbers = 0
        self.base: BaseModel = engine.base
        """The base model, as clients see it."""
        self.config: EngineConfig = engine.config
        """Settings."""
        runs_on_all = engine.sharding is not None and isinstance(engine.sampler, BatchedSampling)
        self.sampler: SamplingEngine = DistributedSampling(self, engine.sampler) if runs_on_all else engine.sampler
        """The sampling engine: of this rank; of all ranks if it computes with a sharded base model."""

    @property
    def counts(self) -> WorkCount:
        """Counts of the rows computed on all ranks since the engine began."""
        return self._engine.counts

    def call(self, method: str, **arguments: Any) -> Any:
        """Make a call on every rank; returns this rank's result."""
        command = Command(method=method, arguments=arguments)
        self._ranks.send(command)
        return self._rank.run(command)

    def stop(self) -> None:
        """Let the other ranks end."""
        self._ranks.send(Command(method="stop", arguments={}))

    # ------------------------------------------------------------------ this rank's own

    def encode(self, request: ForwardBackward) -> EncodedRequest:
        """Call `Engine.encode` on this rank; any thread."""
        return self._engine.encode(request)

    def encode_prompt(self, request: Sample) -> EncodedSequence:
        """Call `Engine.encode_prompt` on this rank; any thread."""
        return self._engine.encode_prompt(request)

    def models(self) -> tuple[str, ...]:
        """Ids of the client models."""
        return self._engine.models()

    def save(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        """Call `Engine.save` on this rank: all ranks have the same weights and moments."""
        self._engine.save(model_id, folder, optimizer=optimizer)

    def open_weights(self, folder: Path | None) -> Weights:
        """Call `Engine.open_weights` on this rank."""
        return self._engine.open_weights(folder)

    # ------------------------------------------------------------------ every rank's

    def create(self, model_id: str, lora: LoraConfig | None) -> None:
        """Call `Engine.create` on every rank; a random seed is drawn once."""
        if lora is not None and lora.seed is None:
            lora = replace(lora, seed=secrets.randbits(63))
        self.call("create", model_id=model_id, lora=lora)

    def create_from(self, model_id: str, folder: Path, *, optimizer: bool) -> LoraConfig | None:
        """Call `Engine.create_from` on every rank."""
        return self.call("create_from", model_id=model_id, folder=folder, optimizer=optimizer)

    def free(self, model_id: str) -> None:
        """Call `Engine.free` on every rank."""
        self.call("free", model_id=model_id)

    def load(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        """Call `Engine.load` on every rank."""
        self.call("load", model_id=model_id, folder=folder, optimizer=optimizer)

    def forward_backward(self, requests: Sequence[EncodedRequest]) -> DistributedWork:
        """Call `Engine.forward_backward` on every rank."""
        number, self._numbers = self._numbers, self._numbers + 1
        return DistributedWork(self, number, self.call("forward_backward", work=number, requests=list(requests)))

    def optim_step(self, model_id: str, adam: AdamParams) -> OptimStepResult:
        """Call `Engine.optim_step` on every rank."""
        return self.call("optim_step", model_id=model_id, adam=adam)
