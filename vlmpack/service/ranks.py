"""Ranks that compute rows of one work: every rank has the same plan, each computes its rows, gradients are summed.

    rank 0   row 0   row 2   row 4 ┐
    rank 1   row 1   row 3         ┘ one sum of the gradients, when the last row has run; results go to all ranks

All of it goes over a process group of its own: gloo for objects, whatever the devices.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, final

import torch
from torch import distributed as dist

from vlmpack.service.clients import Gradients

IDLE = timedelta(days=3650)
"""Longest time that a rank blocks until there is work."""
BUCKET = 2**24
"""Numbers that are summed in one call."""
FAILED = 1
"""Exit status of a rank that cannot go on."""

Result = TypeVar("Result")


@final
class Ranks:
    """The ranks of a data-parallel engine, of which this is one."""

    def __init__(self) -> None:
        """Join the default process group, which has been initialised."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._control: Any = dist.new_group(backend="gloo", timeout=IDLE)

    def send(self, value: Any) -> None:
        """Send an object from rank 0 to all others, which call `receive`."""
        dist.broadcast_object_list([value], src=0, group=self._control)

    def receive(self) -> Any:
        """Receive what rank 0 sends; blocks until then.

        Raises:
            ConnectionError: rank 0 is gone.
        """
        values = [None]
        try:
            dist.broadcast_object_list(values, src=0, group=self._control)
        except RuntimeError as error:
            raise ConnectionError("rank 0 is gone") from error
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """The objects of all ranks, on every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._control)
        return values

    def spread(self, value: Result) -> Result:
        """The value of rank 0, on every rank."""
        if self.rank:
            return self.receive()
        self.send(value)
        return value

    def together(self, call: Callable[[], Result], *, name: str) -> Result:
        """Make a call that every rank makes, and return this rank's result if all succeeded.

        Raises:
            Exception: what all ranks raised alike.
            RuntimeError: some failed.
        """
        result: Any = None
        error: Exception | None = None
        try:
            result = call()
        except Exception as raised:
            error = raised
        messages = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if all(message is None for message in messages):
            return result
        if error is not None and all(message == messages[0] for message in messages):
            raise error
        raise RuntimeError(f"{name} failed: " + "; ".join(f"rank {r}: {m}" for r, m in enumerate(messages) if m))

    def sum(self, gradients: Gradients | None, parameters: Sequence[torch.Tensor]) -> Gradients | None:
        """The sum of a gradient over the ranks; of a parameter without one on every rank there is none.

        Args:
            gradients: this rank's; None: it computed none.
            parameters: of the model, whose shapes gradients have.
        """
        mine = [gradient is not None for gradient in gradients or [None] * len(parameters)]
        there = [any(rank) for rank in zip(*self.gather(mine), strict=True)]
        if not any(there):
            return None
        ours = gradients or [None] * len(parameters)
        summed: Gradients = [
            (torch.zeros_like(parameter) if gradient is None else gradient) if is_there else None
            for gradient, parameter, is_there in zip(ours, parameters, there, strict=True)
        ]
        for bucket in _buckets([gradient for gradient in summed if gradient is not None]):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            dist.all_reduce(flat)
            for gradient, total in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(total.view_as(gradient))
        return summed


def _buckets(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Neighbours of one type, of about `BUCKET` numbers."""
    buckets: list[list[torch.Tensor]] = []
    for tensor in tensors:
        last = buckets[-1] if buckets else []
        if last and last[0].dtype == tensor.dtype and sum(t.numel() for t in last) + tensor.numel() <= BUCKET:
            last.append(tensor)
        else:
            buckets.append([tensor])
    return buckets


def end(status: int) -> NoReturn:
    """End this process at once. All is on the disk; process groups whose other ranks are gone cannot be destroyed."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)
