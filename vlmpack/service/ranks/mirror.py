"""The engine on several ranks: rank 0 has the queue and the clients, and all other ranks mirror its calls.

    rank 0    HTTP ─ queue ─ Mirror ────┬── its own engine and sampler
                           calls        │
    rank 1    follow ◀──────────────────┴── an engine and a sampler with the same models

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
from vlmpack.service.ranks.group import Ranks

ON_ALL = {
    "engine": ("create", "create_from", "free", "load", "optim_step", "forward_backward"),
    "work": ("run_row", "cancel"),
    "sampler": ("close", "add", "step"),
}
"""Methods that every rank calls: of the engine, because they change a model (the queue has drawn all seeds before); of
a `RowWork`; and of the sampler of a sharded base model, because all ranks run its passes. All others run on rank 0."""

Call = tuple[str | int, str, tuple[Any, ...], dict[str, Any]]
"""A call that every rank makes: the owner of the method ("engine", "sampler", or the number of a `RowWork`), the
method, its positional and its keyword arguments."""


@final
class Rank:
    """The engine, the sampler and the running `RowWork`s of one rank."""

    def __init__(self, ranks: Ranks, *, engine: Any, sampler: Any) -> None:
        self.ranks = ranks
        self._owners: dict[str | int, Any] = {"engine": engine, "sampler": sampler}
        self._begun = 0
        """Number of `RowWork`s started. It is the key of the latest one, and the same on every rank."""

    def run(self, call: Call) -> Any:
        """Make a call on this rank, as all ranks do.

        Raises:
            RequestError: a client's mistake, which all ranks found.
            RuntimeError: the call failed on some ranks.
        """
        self._begun += call[1] == "forward_backward"
        return self.ranks.together(lambda: self._call(*call), name=call[1])

    def _call(self, of: str | int, method: str, arguments: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        result = getattr(self._owners[of], method)(*arguments, **settings)
        if method == "forward_backward":
            done = [key for key, work in self._owners.items() if isinstance(key, int) and not work.rows_left]
            for key in done:
                del self._owners[key]
            self._owners[self._begun] = result
        return result

    def mirror(self, of: str) -> Any:
        """Return a proxy of the engine or the sampler, for rank 0; the other ranks call `follow`."""
        return Mirror(self, of, self._owners[of], ON_ALL[of])

    def call_on_all(self, call: Call) -> Any:
        """Make a call on every rank; for rank 0."""
        self.ranks.send(call)
        result = self.run(call)
        return Mirror(self, self._begun, result, ON_ALL["work"]) if call[1] == "forward_backward" else result

    def follow(self) -> None:
        """Make the calls of rank 0 until it sends None. Called by every other rank.

        Raises:
            ConnectionError: the connection to rank 0 is lost.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun signals all ranks: rank 0 drains, stops the others
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while (call := self.ranks.receive()) is not None:
            try:
                self.run(call)
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
        return self._rank.call_on_all((self._of, method, arguments, settings))
