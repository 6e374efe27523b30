"""Sums over ranks that a training loop of one's own needs: of targets before a step, of gradients after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vlmpack.parallel.exchange import Exchange

_BUCKET = 1 << 25
"""Numbers that are sent together."""


def sum_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Add up every gradient over all ranks of the mesh, in place: whole parameters, or each rank's part of them.

    What a rank has after its backward pass is the part of a gradient that comes from its tokens. Every rank of the mesh
    has to call this with gradients for the same parameters, as ranks of a `Parallel` have.

    Args:
        model: whose gradients.
        mesh: the ranks: the context dimension of a mesh, or all dimensions over which nothing else (DDP, FSDP2) adds
            up.
    """
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    for bucket in _buckets(grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads):
        flat = torch.cat([grad.flatten() for grad in bucket])
        _add_up(flat, mesh)
        for grad, total in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
            grad.copy_(total.view_as(grad))


def sum_counts(count: int | torch.Tensor, mesh: DeviceMesh) -> int:
    """The sum over all ranks of the mesh of a number that each has: its row's targets. Waits for the others."""
    total = torch.as_tensor(count, dtype=torch.int64).reshape(1).to(mesh.device_type)
    _add_up(total, mesh)
    return int(total)


def _add_up(x: torch.Tensor, mesh: DeviceMesh) -> None:
    for dim in range(mesh.ndim):
        Exchange(mesh.get_group(dim)).add_up(x, "sums")


def _buckets(grads: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Runs of gradients of one type and device, in order."""
    bucket: list[torch.Tensor] = []
    numbers = 0
    for grad in grads:
        other = bucket and (bucket[0].dtype != grad.dtype or bucket[0].device != grad.device)
        if other or numbers >= _BUCKET:
            yield bucket
            bucket, numbers = [], 0
        bucket.append(grad)
        numbers += grad.numel()
    if bucket:
        yield bucket
