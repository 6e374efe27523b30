"""Collectives with exact backward passes; every byte that ranks send to each other is counted.

Two kinds of all-gather differ in what the ranks do with the result, and so in their backward passes:

    `all_gather`         each rank computes something different: the backward pass is a reduce-scatter
    `all_gather_equal`   all ranks compute the same: each keeps the gradient of its part, and nothing is sent

R ranks, n entries per rank along the first dimension.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Exchange = Callable[[torch.Tensor], torch.Tensor]
"""Function of this rank's tensor; returns this rank's result of an exchange between all ranks."""


@final
class Collectives:
    """The collectives of one process group, as called by one of its ranks."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """`group`: the ranks; None: this process alone, so that nothing is sent."""
        self._group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        """Number of ranks."""
        self.rank = 0 if group is None else dist.get_rank(group)
        """Index of this rank in the group."""
        self.members = [0] if group is None else dist.get_process_group_ranks(group)
        """The ranks of the group, counted in the job."""
        self.sent: Counter[str] = Counter()
        """Bytes that this rank sent to others since the counter was created or cleared, by purpose. Ring algorithms are
        assumed: an all-gather sends (R - 1) parts, an all-reduce 2 (R - 1) / R times the tensor."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Collectives:
        """Return `self`: process groups cannot be copied, so the copy of a model uses the same ones."""
        return self

    # ------------------------------------------------------------------ differentiable

    def all_to_all(
        self, x: torch.Tensor, what: str, send: Sequence[int] | None = None, receive: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Send one part of `x` along its first dimension to each rank, in the order of ranks.

        Args:
            x: [n, ...].
            what: name under which bytes are counted.
            send: number of entries for each rank; None: n / R each.
            receive: number of entries from each rank; None: n / R each.
        """
        sizes = list(send or self._even(x)), list(receive or self._even(x))
        return self._apply(
            x, lambda x: self._send_parts(x, what, *sizes), lambda grad: self._send_parts(grad, what, *sizes[::-1])
        )

    def all_gather(self, x: torch.Tensor, what: str) -> torch.Tensor:
        """Gather [n, ...] of each rank into [R n, ...] on all ranks, which then compute different things."""

        def scatter(grad: torch.Tensor) -> torch.Tensor:
            parts = self._send_parts(grad, what, self._even(grad), self._even(grad))
            return parts.unflatten(0, (self.size, -1)).sum(0)

        return self._apply(x, lambda x: self._gather(x, what), scatter)

    def all_gather_equal(self, x: torch.Tensor, what: str) -> torch.Tensor:
        """Gather [n, ...] of each rank into [R n, ...] on all ranks, which then compute the same."""
        return self._apply(x, lambda x: self._gather(x, what), lambda grad: grad.chunk(self.size)[self.rank])

    def all_reduce(self, x: torch.Tensor, what: str) -> torch.Tensor:
        """Sum over all ranks, which then compute the same."""

        def total(x: torch.Tensor) -> torch.Tensor:
            out = x.clone()
            self.all_reduce_(out, what)
            return out

        return self._apply(x, total, lambda grad: grad)

    def _apply(self, x: torch.Tensor, run: Exchange, back: Exchange) -> torch.Tensor:
        return x if self.size == 1 else _Collective.apply(x, run, back)  # pyright: ignore[reportReturnType]

    # ------------------------------------------------------------------ plain

    def all_reduce_(self, x: torch.Tensor, what: str, op: Any = dist.ReduceOp.SUM) -> None:
        """Sum over all ranks in place, or reduce by another operation. No gradient."""
        if self.size > 1:
            self.sent[what] += 2 * (self.size - 1) * _bytes(x) // self.size
            dist.all_reduce(x, op, group=self._group)

    def all_gather_objects(self, value: Any, what: str) -> list[Any]:
        """Gather an object of each rank on the host: first the number of its bytes, then the bytes."""
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        counts = self._gather(torch.tensor([len(own)], device="cpu"), what).tolist()
        padded = self._gather(F.pad(own, (0, max(counts) - len(own))), what).split(max(counts))
        return [pickle.loads(part[:count].numpy().tobytes()) for part, count in zip(padded, counts, strict=True)]

    def _send_parts(self, x: torch.Tensor, what: str, send: list[int], receive: list[int]) -> torch.Tensor:
        out = x.new_empty(sum(receive), *x.shape[1:])
        self.sent[what] += _bytes(x) - send[self.rank] * _bytes(x[:1])
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=self._group)
        return out

    def _gather(self, x: torch.Tensor, what: str) -> torch.Tensor:
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        self.sent[what] += (self.size - 1) * _bytes(x)
        dist.all_gather(list(out.chunk(self.size)), x.contiguous(), group=self._group)
        return out

    def _even(self, x: torch.Tensor) -> list[int]:
        return [x.shape[0] // self.size] * self.size


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


class _Collective(Function):
    """A collective, and the collective of its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: Exchange, back: Exchange):
        ctx.back = back
        return run(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any):  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.back(*grad_outputs), None, None


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Route:
    """One rank's side of an exchange: `all_to_all_single(got, own[send], receive_counts, send_counts)`."""

    send: torch.Tensor
    """int64, on the host: indices of the rank's own entries, in the order in which they are sent, rank by rank."""
    send_counts: tuple[int, ...]
    """Number of entries for each rank."""
    receive_counts: tuple[int, ...]
    """Number of entries from each rank."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Transfers:
    """All N entries that ranks send to each other in one exchange."""

    source: np.ndarray
    """int64 [N]: the rank that has each entry."""
    local: np.ndarray
    """int64 [N]: its index on that rank."""
    target: np.ndarray
    """int64 [N]: the rank that needs it."""
    ranks: int
    """Number of ranks."""

    def arriving(self, rank: int) -> np.ndarray:
        """Return the indices of the entries that `rank` receives, in the order of arrival: int64."""
        arriving = np.flatnonzero(self.target == rank)
        return arriving[np.argsort(self.source[arriving], kind="stable")]

    def route(self, rank: int) -> Route:
        """Return the route of `rank`."""
        leaving = np.flatnonzero(self.source == rank)
        leaving = leaving[np.argsort(self.target[leaving], kind="stable")]
        return Route(
            send=torch.from_numpy(self.local[leaving]),
            send_counts=self._counts(self.target[leaving]),
            receive_counts=self._counts(self.source[self.target == rank]),
        )

    def _counts(self, ranks: np.ndarray) -> tuple[int, ...]:
        return tuple(np.bincount(ranks, minlength=self.ranks).tolist())
