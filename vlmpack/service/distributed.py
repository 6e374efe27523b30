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
from typing import Any, final

from vlmpack.errors import RequestError
from vlmpack.service.datums import EncodedRequest, EncodedSequence
from vlmpack.service.engine import Engine
from vlmpack.service.messages import LoraConfig, Sample
from vlmpack.service.ranks import Ranks
from vlmpack.service.rows import RowWork
from vlmpack.service.sampling import BatchedSampling


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Command:
    """A call that every rank makes."""

    of: str
    """Whose method: "engine", "sampler", or "work"; "stop" ends the ranks."""
    method: str = ""
    """Its name."""
    arguments: tuple[Any, ...] = ()
    """Its arguments."""
    settings: dict[str, Any] | None = None
    """Its arguments by name."""
    work: int = -1
    """Number of the work that it is a method of, or that it begins."""


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
        of = {"engine": self.engine, "sampler": self.engine.sampler, "work": self.works.get(command.work)}[command.of]
        result = getattr(of, command.method)(*command.arguments, **(command.settings or {}))
        if isinstance(result, RowWork):
            self.works[command.work] = result
        elif isinstance(of, RowWork) and not of.rows_left:
            del self.works[command.work]
        return result


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
        if command.of == "stop":
            return
        try:
            rank.run(command)
        except (RequestError, RuntimeError, OSError):
            continue  # rank 0 tells its queue


# ---------------------------------------------------------------------- rank 0


class _Mirror:
    """An object of rank 0 of which some methods are called on every rank; everything else is its own."""

    _on_all: tuple[str, ...]

    def __init__(self, lead: DistributedEngine, of: str, own: Any) -> None:
        self._lead, self._of, self._own = lead, of, own

    def __getattr__(self, name: str) -> Any:
        if name not in self._on_all:
            return getattr(self._own, name)
        return lambda *arguments, **settings: self._lead.call(
            Command(of=self._of, method=name, arguments=arguments, settings=settings)
        )


@final
class DistributedSampling(_Mirror):
    """Sampling from a sharded base model: every rank makes the same passes, rank 0's choices count."""

    _on_all = ("open", "close", "step")

    def add(self, key: str, session_id: str, prompt: EncodedSequence, request: Sample) -> None:
        """Call `BatchedSampling.add` on every rank; a random seed is drawn once."""
        if request.params.seed is None:
            request = replace(request, params=replace(request.params, seed=secrets.randbits(63)))
        self._lead.call(Command(of=self._of, method="add", arguments=(key, session_id, prompt, request)))


@final
class DistributedWork:
    """A work whose rows are dealt to the ranks."""

    def __init__(self, lead: DistributedEngine, number: int, work: RowWork) -> None:
        self._lead, self._number, self._work = lead, number, work
        self.results = work.results

    @property
    def rows_left(self) -> int:
        """Rows that have not run."""
        return self._work.rows_left

    def run_row(self) -> None:
        """Compute the next rows, one on each rank."""
        self._lead.call(Command(of="work", method="run_row", work=self._number))

    def cancel(self) -> None:
        """Forget everything: no model has changed."""
        if self._work.rows_left:
            self._lead.call(Command(of="work", method="cancel", work=self._number))


@final
class DistributedEngine(_Mirror):
    """`Engine` for the queue of rank 0: what changes a model is done by every rank."""

    _on_all = ("create_from", "free", "load", "optim_step")

    def __init__(self, engine: Engine, ranks: Ranks) -> None:
        """Lead the other ranks, which call `follow`."""
        super().__init__(self, "engine", engine)
        self._rank, self._numbers = Rank(engine, ranks), 0
        runs_on_all = engine.sharding is not None and isinstance(engine.sampler, BatchedSampling)
        self.sampler: Any = DistributedSampling(self, "sampler", engine.sampler) if runs_on_all else engine.sampler
        """The sampling engine: of this rank; of all ranks if it computes with a sharded base model."""

    def call(self, command: Command) -> Any:
        """Make a call on every rank; returns this rank's result."""
        self._rank.ranks.send(command)
        return self._rank.run(command)

    def stop(self) -> None:
        """Let the other ranks end."""
        self._rank.ranks.send(Command(of="stop"))

    def create(self, model_id: str, lora: LoraConfig | None) -> None:
        """Call `Engine.create` on every rank; a random seed is drawn once."""
        if lora is not None and lora.seed is None:
            lora = replace(lora, seed=secrets.randbits(63))
        self.call(Command(of="engine", method="create", arguments=(model_id, lora)))

    def forward_backward(self, requests: Sequence[EncodedRequest]) -> DistributedWork:
        """Call `Engine.forward_backward` on every rank."""
        number, self._numbers = self._numbers, self._numbers + 1
        command = Command(of="engine", method="forward_backward", arguments=(list(requests),), work=number)
        return DistributedWork(self, number, self.call(command))
