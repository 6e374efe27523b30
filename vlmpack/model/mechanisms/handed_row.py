"""Hand a row on to modules that their model gives no keyword of it.

    model ── row ──▶ tower ──────────▶ blocks        the tower's own code passes no keywords on
                       └─── row ───────▶             `handing_class` of the tower, `taking_class` of each block

While the module that has the row runs, the row is in a context variable. Gradient checkpointing computes a block again
in the backward pass, when the tower does not run, and on a GPU in another thread. So a block takes the row when it is
called, before anything is checkpointed, and has it as a keyword from then on.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

from vlmpack.layout.device import around_graph
from vlmpack.model.mechanisms import subclass
from vlmpack.model.row import CONTEXT, RowContext

_ROW: ContextVar[RowContext | None] = ContextVar("vlmpack_handed_row", default=None)


def handed_row() -> RowContext | None:
    """The row that is handed on; None: there is none."""
    return _ROW.get()


@contextmanager
def handed_on(row: RowContext | None) -> Iterator[None]:
    """Hand a row on while something runs; None: no row, to anything inside."""
    token = _ROW.set(row)
    try:
        yield
    finally:
        _ROW.reset(token)


@functools.cache
def handing_class(base: Any) -> type[nn.Module]:
    """A subclass of a module's class that hands on the row that it is given; one a base class."""

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with handed_on(kwargs.get(CONTEXT)):
            return base.forward(self, *args, **kwargs)

    return subclass(base, {"forward": around_graph(forward)}, handing_class)


@functools.cache
def taking_class(base: Any) -> type[nn.Module]:
    """A subclass of a module's class that takes the row that is handed on; one a base class."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (row := handed_row()) is not None:
            kwargs[CONTEXT] = row
        return base.__call__(self, *args, **kwargs)

    return subclass(base, {"__call__": around_graph(call)}, taking_class)
