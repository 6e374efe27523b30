"""The group of ranks that share a row, and sums over ranks for a training loop without Trainer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import lcm
from typing import Any, NoReturn, final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vlmpack.context_parallel.collectives import Collectives
from vlmpack.errors import ConfigError
from vlmpack.layout.segments import SlotRule


@final
class Parallel:
    """The ranks that share a packed row; pass it to `enable_packing`.

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "context"))
        enable_packing(model, parallel=Parallel(mesh))

    All ranks of a context group get the same row, and each computes its part. With or without a context dimension, all
    ranks of the job call the same modules equally often, whatever their rows contain: a rank without an image runs a
    blank one through the vision tower and ignores the result.
    """

    def __init__(self, mesh: DeviceMesh | None = None, *, context: str = "context") -> None:
        """Read the mesh.

        Args:
            mesh: a mesh with a dimension `context`, whose ranks share a row; None: each rank has its own rows.
            context: name of that dimension.

        Raises:
            ConfigError: the mesh has no dimension of that name.
        """
        self.collectives = Collectives(None if mesh is None else _group(mesh, context))
        """The ranks that share a row."""

    def __repr__(self) -> str:
        shared = f"{self.ranks} ranks share a row, this is rank {self.collectives.rank}"
        return f"Parallel({shared if self.ranks > 1 else 'each rank has rows of its own'})"

    @property
    def ranks(self) -> int:
        """Return the number of context-parallel ranks."""
        return self.collectives.size

    @property
    def sent(self) -> dict[str, int]:
        """Bytes that this rank sent to the others of its context group, by purpose."""
        return dict(self.collectives.sent)

    def slots(self, rule: SlotRule) -> SlotRule:
        """Return `rule` with a row width that can be split into equal parts, one for each rank."""
        return replace(rule, row_multiple=lcm(rule.row_multiple, self.ranks))

    def __deepcopy__(self, memo: dict[int, Any]) -> Parallel:
        """Return `self`: process groups cannot be copied, so the copy of a model uses the same ones."""
        return self

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            "a model whose rows are shared by ranks cannot be pickled, because the others cannot come along; save its "
            "weights (save_pretrained, state_dict), or call disable_packing first"
        )


def _group(mesh: DeviceMesh, context: str) -> Any:
    names = mesh.mesh_dim_names or ()
    if context not in names:
        raise ConfigError(
            f"the mesh has no dimension {context!r}, it has {list(names)}: name the one whose ranks share a row with "
            "Parallel(mesh, context=...), or leave the mesh out if none do"
        )
    return mesh.get_group(context)


_BUCKET = 1 << 25
"""Number of gradient elements to send together."""


def sum_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Sum all gradients over all ranks of the mesh, in place; for sharded parameters, each rank's shard.

    After its backward pass, a rank has the gradients from its own tokens. Every rank of the mesh must call this
    function with gradients for the same parameters, which the ranks of a `Parallel` always have.

    Args:
        model: the model whose gradients are summed.
        mesh: the context dimension of a mesh, or all dimensions over which nothing else (DDP, FSDP2) sums gradients.
    """
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    for bucket in _buckets(grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads):
        flat = torch.cat([grad.flatten() for grad in bucket])
        _all_reduce(flat, mesh)
        for grad, total in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
            grad.copy_(total.view_as(grad))


def sum_counts(count: int | torch.Tensor, mesh: DeviceMesh) -> int:
    """Sum a number over all ranks of the mesh, such as the number of targets of each rank's row. Blocks."""
    total = torch.as_tensor(count, dtype=torch.int64).reshape(1).to(mesh.device_type)
    _all_reduce(total, mesh)
    return int(total)


def _all_reduce(x: torch.Tensor, mesh: DeviceMesh) -> None:
    for dim in range(mesh.ndim):
        Collectives(mesh.get_group(dim)).all_reduce_(x, "sums")


def _buckets(grads: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Group consecutive gradients of the same dtype and device."""
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
