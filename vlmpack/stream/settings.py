"""What a stream is told about its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from vlmpack.errors import ConfigError, check_kind
from vlmpack.plan import OVERSIZE, Oversize, checked_capacity
from vlmpack.plan.rolling import ROWS_WAITING


@final
@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """How rows are made from samples that come one by one."""

    capacity: int
    """Tokens that a row may hold."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """What else a row may hold only so much of, by name: vision patches, images."""
    buffer_tokens: int | None = None
    """Rows are made while at least this many tokens wait; None: four rows' worth."""
    min_fill: float = 0.0
    """Share of the capacity, 0 to 1, below which a row waits for more samples once before it is given out."""
    drop_last: bool = False
    """At the end, leave out rows below `min_fill`."""
    oversize: Oversize = "error"
    """A sample that exceeds a row by itself: refuse it, leave it out and count it, or give it a row of its own."""

    def __post_init__(self) -> None:
        checked_capacity(self.capacity)
        check_kind("limits", self.limits, Mapping, '{"images": 8}')
        for name, limit in self.limits.items():
            checked_capacity(limit, f"the limit of {name!r}")
        if self.buffer_tokens is not None and not self.buffer_tokens >= 0:
            raise ConfigError(f"buffer_tokens must be at least 0, got {self.buffer_tokens}")
        if not 0 <= self.min_fill <= 1:
            raise ConfigError(f"min_fill must lie between 0 and 1, got {self.min_fill}")
        if self.oversize not in OVERSIZE:
            raise ConfigError(f"oversize must be one of {', '.join(OVERSIZE)}, got {self.oversize!r}")

    @property
    def enough_waiting(self) -> int:
        """Tokens that have to wait before a row is made."""
        return ROWS_WAITING * self.capacity if self.buffer_tokens is None else self.buffer_tokens

    @property
    def least_tokens(self) -> float:
        """Tokens of a row that is full enough."""
        return self.min_fill * self.capacity
