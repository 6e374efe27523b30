"""The engine on several ranks: rank 0 has the queue and the clients, and all other ranks mirror its calls.

    rank 0    HTTP ─ queue ─ mirrored engine ────┬── its own engine
                                 commands        │
    rank 1    follow ◀───────────────────────────┴── an engine with the same models

Each rank has the base model, or its shard of it, and all client models. Rows are distributed over the ranks, gradients
are summed at the end of a `RowWork`, and every rank takes the same optimizer step. Only rank 0 writes files; `load`
reads the state folder on every rank. Only rank 0 samples, unless the base model is sharded.

Commands are objects that rank 0 pickles and its own workers unpickle. They go over gloo, on 127.0.0.1 or the address
that torchrun sets. Nothing that a client sends is ever unpickled.
"""

from __future__ import annotations

import signal
from functools import partial
from typing import Any, final

from vlmpack.errors import RequestError
from vlmpack.service.engine import Engine
from vlmpack.service.ranks import Ranks
from vlmpack.service.rows import RowWork
from vlmpack.service.sampling import BatchedSampling

ENGINE = ("create", "create_from", "free", "load", "optim_step", "forward_backward")
"""Engine methods that every rank calls, because they change a model. The queue has drawn all seeds before."""
WORK = ("run_row", "cancel")
SAMPLER = ("close", "add", "step")
"""Methods that every rank calls of a `RowWork` (above) and of the sampling engine of a sharded base model. All ranks
run the sampling engine's passes, and rank 0 chooses the tokens."""


Call = tuple[str | int, str, tuple[Any, ...], dict[str, Any]]
"""A call that every rank makes: the owner of the method ("engine", "sampler", or the number of a `RowWork`), the
method, its positional and its keyword arguments."""


@final
class Rank:
    """The engine and the running `RowWork`s of one rank."""

    def __init__(self, engine: Engine, ranks: Ranks) -> None:
        assert engine.ranks is ranks
        self.engine, self.ranks = engine, ranks
        self.works: dict[int, RowWork] = {}
        self.begun = 0
        """Number of `RowWork`s started. It is the key of the latest one, and the same on every rank."""

    def run(self, call: Call) -> Any:
        """Make a call on this rank, as all ranks do.

        Raises:
            RequestError: a client's mistake, which all ranks found.
            RuntimeError: the call failed on some ranks.
        """
        self.begun += call[1] == "forward_backward"
        return self.ranks.together(lambda: self._call(*call), name=call[1])

    def _call(self, of: str | int, method: str, arguments: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        owner: Any = {"engine": self.engine, "sampler": self.engine.sampler, **self.works}[of]
        result = getattr(owner, method)(*arguments, **settings)
        if isinstance(result, RowWork):
            self.works = {self.begun: result, **{at: work for at, work in self.works.items() if work.rows_left}}
        return result


def follow(engine: Engine, ranks: Ranks) -> None:
    """Run the commands of rank 0 until it stops. Called by every other rank.

    Raises:
        ConnectionError: the connection to rank 0 is lost.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun signals all ranks: rank 0 drains and stops the others
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank = Rank(engine, ranks)
    while (call := ranks.receive()) is not None:
        try:
            rank.run(call)
        except (RequestError, RuntimeError, OSError):
            continue  # rank 0 reports it to its queue


@final
class Mirror:
    """A proxy on rank 0 that calls some methods of an object on every rank, and all others only on rank 0."""

    def __init__(self, rank: Rank, of: str | int, own: Any, on_all: tuple[str, ...]) -> None:
        self._rank, self._of, self._own, self._on_all = rank, of, own, on_all

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, name) if name in self._on_all else getattr(self._own, name)

    def _call(self, method: str, *arguments: Any, **settings: Any) -> Any:
        call = self._of, method, arguments, settings
        self._rank.ranks.send(call)
        result = self._rank.run(call)
        return Mirror(self._rank, self._rank.begun, result, WORK) if isinstance(result, RowWork) else result

    @property
    def sampler(self) -> Any:
        """The sampling engine: rank 0's own, or all ranks' mirrored one if it samples from a sharded base model."""
        own = self._own.sampler
        runs_on_all = self._own.sharding is not None and isinstance(own, BatchedSampling)
        return Mirror(self._rank, "sampler", own, SAMPLER) if runs_on_all else own

    def stop(self) -> None:
        """Stop the other ranks."""
        self._rank.ranks.send(None)


def lead(engine: Engine, ranks: Ranks) -> Any:
    """Return rank 0's engine for the queue; the other ranks call `follow`.

    Methods that change a model run on every rank.
    """
    return Mirror(Rank(engine, ranks), "engine", engine, ENGINE)
