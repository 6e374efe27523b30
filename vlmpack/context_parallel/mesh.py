"""The ranks that train together, by the dimensions of a mesh, and sums over ranks for a loop without Trainer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any, NoReturn, TypeVar, final

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vlmpack.context_parallel.collectives import Collectives
from vlmpack.context_parallel.vision import VisionRanks
from vlmpack.errors import ConfigError, LayoutError
from vlmpack.layout.device import on_host, require
from vlmpack.layout.row import PackedRow

T = TypeVar("T")
NAMES = {
    "replicate": ("replicate", "dp_replicate"),
    "data": ("data", "dp", "fsdp", "dp_shard"),
    "expert": ("expert", "ep"),
    "context": ("context", "cp", "sp"),
    "tensor": ("tensor", "tp"),
    "pipeline": ("pipeline", "pp"),
}
"""The dimensions of a mesh, and their names in PyTorch, transformers and accelerate."""

_OWN_ROWS = ("replicate", "data", "expert")


@final
class Parallel:
    """The ranks that train a model together; pass it to `enable_packing`.

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "context"))
        enable_packing(model, parallel=Parallel(mesh))

    All ranks of a context group get the same row, and each computes its part. All ranks of a tensor group get the same
    row too, and each computes its part of every layer. Each step checks it. Other ranks have rows of their own, and a
    sampler counts by `data_rank` and `data_ranks`.

    All ranks of the job call the same modules equally often, whatever their rows contain: a rank without an image runs
    a blank one through the vision tower and ignores the result.
    """

    sizes: dict[str, int]
    """Number of ranks along each dimension of `NAMES`. The experts of transformers' meshes have no ranks of their own:
    the data and tensor ranks share them."""
    mesh: DeviceMesh | None
    """The mesh; with `context=`, one with dimensions "data", "context" and "tensor"; None: this process is alone."""
    data_ranks: int
    """Number of different rows in a step, `num_replicas` of a sampler: ranks that share a row count once."""
    data_rank: int
    """Index of this rank's rows among those of all `data_ranks`: `rank` of a sampler."""
    collectives: Collectives
    """The ranks that share a row."""
    vision: VisionRanks
    """The ranks that compute images together: those of one row, or all ranks with `balance_vision`."""

    def __init__(self, mesh: DeviceMesh | None = None, *, context: int = 1, balance_vision: bool = False) -> None:
        """Read the mesh.

        Args:
            mesh: a mesh of all ranks whose dimensions have names of `NAMES`; None: `enable_packing` finds the mesh of a
                model that transformers has loaded with `distributed_config=`. If there is none, every rank has rows of
                its own.
            context: number of ranks that share a row, for a mesh without a context dimension: consecutive ranks that
                would have rows of their own.
            balance_vision: deal the images of each step to ranks by their cost, whichever rows have them. All ranks
                must take equally many steps, in evaluation too.

        Raises:
            ConfigError: the mesh has another dimension, or pipeline stages; or `context` does not fit it.
        """
        self.same_calls = True
        """Whether a rank without an image runs a blank one. False only if `enable_packing` was given no `Parallel` for
        a model with a mesh, and its ranks need none."""
        self._context, self._balance_vision = context, balance_vision
        self._is_known = mesh is not None
        if mesh is not None:
            self._read(mesh)

    def find_mesh(self, model: Any) -> None:
        """Read the mesh on a model, unless a mesh was given.

        Raises:
            ConfigError: as for a given mesh; or the model is on a mesh with other groups of tensor ranks.
        """
        found = mesh_of(model)
        if not self._is_known:
            self._read(_mesh_of_job() if found is None else found)
            self._is_known = True
        elif found is not None:
            its, own = Collectives(tensor_group(model)).members, self._same_row["tensor"].members
            if {*its} != {*own}:
                raise ConfigError(
                    f"Parallel has the tensor ranks {own}, but this {type(model).__name__} was loaded on {its}: leave "
                    "the mesh out, so that it is found on the model, and make a Parallel for each model"
                )

    def _read(self, mesh: DeviceMesh | None) -> None:
        if self._context > 1 and _sizes(mesh)["context"] != self._context:
            mesh = _with_context(mesh, self._context)
        if mesh is None and self._balance_vision:
            raise ConfigError(
                "balance_vision=True deals images to the ranks of a job, and there is none yet: call "
                "init_process_group before, or leave it out on a single rank"
            )
        self.mesh, self.sizes = mesh, _sizes(mesh)
        self.data_rank, self.data_ranks = 0, 1
        self._same_row = {kind: Collectives() for kind in ("context", "tensor")}
        self._own_rows: list[Collectives] = []
        for name, kind, size in _dimensions(mesh):
            assert mesh is not None
            if kind in _OWN_ROWS:
                self.data_rank = self.data_rank * size + mesh.get_local_rank(name)
                self.data_ranks *= size
            if size > 1 and kind in _OWN_ROWS:
                self._own_rows.append(Collectives(mesh.get_group(name)))
            elif size > 1:
                self._same_row[kind] = Collectives(mesh.get_group(name))
        self.collectives = self._same_row["context"]
        self.vision = VisionRanks.of_row(self.collectives)
        if mesh is not None and self._balance_vision:
            self.vision = VisionRanks.of_step(_ranks_of_parts(mesh))

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse to tell about ranks before the mesh is known."""
        if name not in type(self).__annotations__:
            raise AttributeError(name)
        raise ConfigError(
            "Parallel() finds the mesh on a model: call enable_packing(model, parallel=...) before you read its ranks"
        )

    @property
    def ranks(self) -> int:
        """Return the number of context-parallel ranks."""
        return self.collectives.size

    @property
    def sent(self) -> dict[str, int]:
        """Bytes that this rank sent to others for rows that they compute together, by purpose."""
        return {**self.collectives.sent, **self.vision.sent}

    def __repr__(self) -> str:
        if not self._is_known:
            return "Parallel(the mesh of the model)"
        sizes = [f"{size} {name}" for name, size in self.sizes.items() if size > 1]
        return f"Parallel({' x '.join(sizes) or 1} ranks, this is data rank {self.data_rank})"

    def check_same_row(self, row: PackedRow) -> None:
        """Check that the ranks of each context and tensor group have the same row, by a digest of four numbers.

        With different rows they would deadlock, or exchange wrong data. On an accelerator this is an asynchronous
        assertion that fails before the row's first exchange, and the host does not wait.

        Raises:
            LayoutError: they have different rows. Names the ranks.
        """
        for name, group in self._same_row.items():
            if group.size > 1:
                all_RX = group.all_gather_equal(_digest(row)[None], "check")
                same_R = (all_RX == all_RX[:1]).all(1)
                ranks = group.members
                if on_host(same_R):
                    ranks = [ranks[0], *(rank for rank, same in zip(ranks, same_R.tolist(), strict=True) if not same)]
                require(same_R.all(), _DIFFERENT.format(ranks=ranks, name=name), LayoutError)

    def sum_over_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` over all data ranks. Backward, each rank's `x` gets the gradient of the sum."""
        for group in self._own_rows:
            x = group.all_reduce(x, "routers")
        return x

    def check_same_towers(self, media: str, calls: int, ids: torch.Tensor, family: str) -> None:
        """Check that all data ranks call a tower equally often, for a family whose media cannot be left blank.

        Else a rank without images would wait forever for the others, or they for it. Asynchronous on an accelerator.

        Args:
            media: "images" or "audio".
            calls: number of calls of a tower for this rank's row.
            ids: the row's token ids, whose device is used.
            family: name of the family.

        Raises:
            LayoutError: ranks have other numbers of calls. Names the ranks.
        """
        for group in self._own_rows:
            all_R = group.all_gather_equal(ids.new_tensor([calls]), "check")
            message = _OTHER_TOWERS[media].format(ranks=group.members, family=family)
            require((all_R == all_R[:1]).all(), message, LayoutError)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parallel:
        """Return `self`: process groups cannot be copied, so the copy of a model uses the same ones."""
        return self

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            "a model whose rows are shared by ranks cannot be pickled, because the others cannot come along; save its "
            "weights (save_pretrained, state_dict), or call disable_packing first"
        )


_DIFFERENT = (
    "ranks {ranks} of one {name} group were given different rows; give all of them the same batch: let the sampler "
    "count num_replicas=parallel.data_ranks, rank=parallel.data_rank"
)


_OTHER_TOWERS = {
    "images": "some rows of ranks {ranks} have images and some have none: {family} cannot compute blank ones, and "
    "ranks would wait forever; give each data rank an image in each step, or none of them",
    "audio": "rows of ranks {ranks} have audio in different numbers of groups of lengths: {family} computes each group "
    "in a call, and ranks would wait forever; give all data ranks the same number, or set "
    "Parallel(balance_vision=True)",
}


def mesh_of(model: Any) -> DeviceMesh | None:
    """Return the mesh that transformers stored on a model; None: it was loaded without one."""
    manager = getattr(model, "_mesh_manager", None)
    if manager is not None:
        return manager.get_mesh(("pp", "dp_replicate", "fsdp", "tp"))
    mesh = getattr(model, "_device_mesh", None)
    if mesh is not None and mesh.mesh_dim_names is None:  # of transformers 5.17, which has tensor ranks alone
        mesh = DeviceMesh.from_group(mesh.get_group(), mesh.device_type, mesh_dim_names=("tensor",))
    return mesh


def tensor_group(model: Any) -> Any:
    """Return the group of the tensor ranks of a model's mesh; None: it has none."""
    mesh = mesh_of(model)
    names = [name for name, kind, size in _dimensions(mesh) if kind == "tensor" and size > 1]
    return mesh.get_group(names[0]) if mesh is not None and names else None


def _mesh_of_job() -> DeviceMesh | None:
    """Return a mesh of all ranks, each with rows of its own; None: this process is alone."""
    if not is_distributed():
        return None
    device = "cpu" if dist.get_backend() == "gloo" else str(torch.accelerator.current_accelerator())
    return DeviceMesh(device, torch.arange(dist.get_world_size()), mesh_dim_names=("data",))


def _with_context(mesh: DeviceMesh | None, context: int) -> DeviceMesh:
    """Return a mesh ("data", "context", "tensor") of the same ranks, where consecutive data ranks share a row."""
    sizes = _sizes(mesh)
    ranks = prod(sizes[kind] for kind in _OWN_ROWS)
    if mesh is None or ranks % context or sizes["context"] > 1:
        fitting = [size for size in range(2, ranks + 1) if ranks % size == 0]
        raise ConfigError(
            f"context={context} does not fit {sizes['context']} context ranks of the mesh and {ranks} ranks with rows "
            f"of their own; {f'sizes that fit: {fitting}' if sizes['context'] == 1 else 'leave it out'}"
        )
    ranks_DCT = _ranks_of_parts(mesh).reshape(sizes["tensor"], -1, context).permute(1, 2, 0)
    return DeviceMesh(mesh.device_type, ranks_DCT, mesh_dim_names=("data", "context", "tensor"))


def _ranks_of_parts(mesh: DeviceMesh) -> torch.Tensor:
    """Return int64 [G, D, C]: the rank that has each of C parts of each of D rows, in G groups with the same rows."""
    kinds = [kind for _, kind, _ in _dimensions(mesh)]
    places = [1 if kind in _OWN_ROWS else 2 if kind == "context" else 0 for kind in kinds]
    sizes = [prod(size for size, at in zip(mesh.shape, places, strict=True) if at == place) for place in range(3)]
    return mesh.mesh.permute(sorted(range(mesh.ndim), key=places.__getitem__)).reshape(sizes)


def _sizes(mesh: DeviceMesh | None) -> dict[str, int]:
    """Return the number of ranks along each dimension of `NAMES`.

    Raises:
        ConfigError: the mesh has pipeline stages, or two tensor or context dimensions.
    """
    sizes = dict.fromkeys(NAMES, 1)
    for name, kind, size in _dimensions(mesh):
        if kind not in _OWN_ROWS and min(size, sizes[kind]) > 1:
            raise ConfigError(f"the mesh has a second {kind} dimension, {name!r}; rows are shared along one")
        sizes[kind] *= size
    if sizes["pipeline"] > 1:
        raise ConfigError(
            f"the mesh has {sizes['pipeline']} pipeline stages (pp_size), which cannot be trained: those of "
            "transformers send no gradients back. Divide the model over fsdp, tensor or expert ranks instead"
        )
    return sizes


def _dimensions(mesh: DeviceMesh | None) -> list[tuple[str, str, int]]:
    """Return (name, kind, size) of each dimension.

    Raises:
        ConfigError: a name is not known.
    """
    found: list[tuple[str, str, int]] = []
    if mesh is None:
        return found
    for name, size in zip(mesh.mesh_dim_names or ("",) * mesh.ndim, mesh.shape, strict=True):
        kind = next((kind for kind, names in NAMES.items() if name in names), None)
        if kind is None:
            names = ", ".join(name for names in NAMES.values() for name in names)
            raise ConfigError(f"a dimension of the mesh has the name {name!r}; names that say what it is for: {names}")
        found.append((name, kind, size))
    return found


def _digest(row: PackedRow) -> torch.Tensor:
    """Return int64 [4] of a row's boundaries, ids, labels and media, which other rows have only by chance."""
    ids = row.input_ids
    labels = ids if row.shift_labels is None else row.shift_labels
    weights = torch.arange(1, ids.shape[1] + 1, device=ids.device)
    boundaries = hash((row.segments.lengths, row.segments.slots, row.segments.total)) % 2**62
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    media = [x for x in row.media.to_hf().values() if x.device == ids.device]
    pixels = sum((x.contiguous().view(bits[x.element_size()]).sum() for x in media), ids.new_zeros(()))
    return torch.stack([ids.new_full((), boundaries), (ids * weights).sum(), (labels * weights).sum(), pixels])


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


# ---------------------------------------------------------------------- values of all ranks of the job


def is_distributed() -> bool:
    """Return whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized()


def gathered(value: T) -> list[T]:
    """Return the value of every rank of the job, rank after rank; each must call this. One process has its own."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
