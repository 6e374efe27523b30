"""The engine on several ranks: rank 0 has the queue and the clients, every other rank does what it does.

    rank 0    HTTP ─ queue ─ mirrored engine ────┬── its own engine
                                 commands        │
    rank 1    follow ◀───────────────────────────┴── an engine with the same models

Each rank has the base model, or its part of it, and all client models. Rows are dealt to ranks, their gradients are
summed when a work is done, and every rank takes the same step. Files are rank 0's; `load` reads the state folder on
every rank. Sampling is rank 0's, too, unless the base model is sharded.

Commands are objects that rank 0 pickles and its own workers unpickle, over gloo on 127.0.0.1 or the address that
torchrun gives them; nothing that a client sends is ever unpickled.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from vlmpack.errors import RequestError
from vlmpack.service.engine import Engine
from vlmpack.service.ranks import Ranks
from vlmpack.service.rows import RowWork
from vlmpack.service.sampling import BatchedSampling

ENGINE = ("create", "create_from", "free", "load", "optim_step", "forward_backward")
"""Methods of an engine that every rank calls: what changes a model. Seeds have been drawn by the queue."""
WORK = ("run_row", "cancel")
SAMPLER = ("open", "close", "add", "step")
"""The same of works, and of the sampling engine of a sharded base model: all ranks make its passes, rank 0 chooses."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Command:
    """A call that every rank makes."""

    of: str | int
    """Whose method: "engine", "sampler", or the number of a work; "stop" ends the ranks."""
    method: str = ""
    """Its name."""
    arguments: tuple[Any, ...] = ()
    """Its arguments."""
    settings: dict[str, Any] | None = None
    """Its arguments by name."""


@final
class Rank:
    """The engine and the works of one rank."""

    def __init__(self, engine: Engine, ranks: Ranks) -> None:
        assert engine.ranks is ranks
        self.engine, self.ranks = engine, ranks
        self.works: dict[int, RowWork] = {}
        self.begun = 0
        """Works that were begun, which is the number of the next one, on every rank."""

    def run(self, command: Command) -> Any:
        """Make a call on this rank.

        Raises:
            RequestError: a client's mistake, which every rank has found.
            RuntimeError: it failed on some ranks.
        """
        self.begun += command.method == "forward_backward"
        return self.ranks.together(lambda: self._call(command), name=command.method)

    def _call(self, command: Command) -> Any:
        of: Any = {"engine": self.engine, "sampler": self.engine.sampler, **self.works}[command.of]
        result = getattr(of, command.method)(*command.arguments, **(command.settings or {}))
        if isinstance(result, RowWork):
            self.works = {self.begun: result, **{at: work for at, work in self.works.items() if work.rows_left}}
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


@final
class Mirror:
    """An object of rank 0 of which some methods are called on every rank; everything else is its own."""

    def __init__(self, rank: Rank, of: str | int, own: Any, on_all: tuple[str, ...]) -> None:
        self._rank, self._of, self._own, self._on_all = rank, of, own, on_all

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, name) if name in self._on_all else getattr(self._own, name)

    def _call(self, method: str, *arguments: Any, **settings: Any) -> Any:
        command = Command(of=self._of, method=method, arguments=arguments, settings=settings)
        self._rank.ranks.send(command)
        result = self._rank.run(command)
        return Mirror(self._rank, self._rank.begun, result, WORK) if isinstance(result, RowWork) else result

    @property
    def sampler(self) -> Any:
        """The sampling engine: of this rank; of all ranks if it computes with a sharded base model."""
        own = self._own.sampler
        runs_on_all = self._own.sharding is not None and isinstance(own, BatchedSampling)
        return Mirror(self._rank, "sampler", own, SAMPLER) if runs_on_all else own

    def stop(self) -> None:
        """Let the other ranks end."""
        self._rank.ranks.send(Command(of="stop"))


def lead(engine: Engine, ranks: Ranks) -> Any:
    """The engine of rank 0 for the queue: what changes a model is done by every rank; the others call `follow`."""
    return Mirror(Rank(engine, ranks), "engine", engine, ENGINE)
