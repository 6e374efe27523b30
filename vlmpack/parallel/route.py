"""What one rank sends and gets in one exchange of all ranks, as index arrays for one all-to-all."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
import torch

from vlmpack.layout import to_device


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Route:
    """One rank's side of an exchange: `all_to_all_single(got, own[send], receive_counts, send_counts)`."""

    send: torch.Tensor
    """int64, on the host: places among the rank's own, in the order in which they are sent: rank after rank."""
    send_counts: tuple[int, ...]
    """How many go to each rank."""
    receive_counts: tuple[int, ...]
    """How many come from each rank."""

    def sent_from(self, device: torch.device) -> torch.Tensor:
        """`send` on `device`, copied there once, without making the host wait."""
        if device not in self._on_device:
            self._on_device[device] = to_device(self.send.numpy(), device)
        return self._on_device[device]

    @cached_property
    def _on_device(self) -> dict[torch.device, torch.Tensor]:
        return {}


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Transfers:
    """All that goes from any rank to any, N things."""

    source: np.ndarray
    """int64 [N]: the rank that has each."""
    local: np.ndarray
    """int64 [N]: where that rank has it."""
    target: np.ndarray
    """int64 [N]: the rank that needs it."""
    ranks: int
    """How many ranks there are."""

    def arriving(self, rank: int) -> np.ndarray:
        """int64: which of the N come to `rank`, in the order in which they come."""
        mine = np.flatnonzero(self.target == rank)
        return mine[np.argsort(self.source[mine], kind="stable")]

    def route(self, rank: int) -> Route:
        """The side of `rank`."""
        leaving = np.flatnonzero(self.source == rank)
        leaving = leaving[np.argsort(self.target[leaving], kind="stable")]
        return Route(
            send=torch.from_numpy(self.local[leaving]),
            send_counts=self._counts(self.target[leaving]),
            receive_counts=self._counts(self.source[self.target == rank]),
        )

    def _counts(self, ranks: np.ndarray) -> tuple[int, ...]:
        return tuple(np.bincount(ranks, minlength=self.ranks).tolist())
