"""Which ranks share a row: what a user says once, and what the rest of this package asks."""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import Any, NoReturn, final

from torch.distributed.device_mesh import DeviceMesh

from vlmpack.errors import ConfigError
from vlmpack.layout import SlotRule
from vlmpack.parallel.exchange import Exchange


@final
class Parallel:
    """How ranks work together on packed rows; handed to `enable_packing`.

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "context"))
        enable_packing(model, parallel=Parallel(mesh))

    The ranks of one context group are given the same row, and each computes its stretch of it. With or without a
    context dimension, all ranks of the job call the same modules as often as each other, whatever is in their rows:
    a rank without an image puts a blank one through the vision tower and reads nothing of it.
    """

    def __init__(self, mesh: DeviceMesh | None = None, *, context: str = "context") -> None:
        """Read the mesh.

        Args:
            mesh: a mesh with a dimension of that name, whose ranks share a row; None: each rank has rows of its own.
            context: the name.

        Raises:
            ConfigError: the mesh has no such dimension.
        """
        self.exchange = Exchange(None if mesh is None else _group(mesh, context))
        """The ranks that share a row."""

    def __repr__(self) -> str:
        shared = f"{self.ranks} ranks share a row, this is rank {self.exchange.rank}"
        return f"Parallel({shared if self.ranks > 1 else 'each rank has rows of its own'})"

    @property
    def ranks(self) -> int:
        """How many ranks share a row."""
        return self.exchange.size

    @property
    def sent(self) -> dict[str, int]:
        """Bytes that this rank sent to the others of its context group, by what they were for."""
        return dict(self.exchange.sent)

    def slots(self, rule: SlotRule) -> SlotRule:
        """`rule` for rows that can be cut into as many parts of one size as there are ranks."""
        return replace(rule, row_multiple=lcm(rule.row_multiple, self.ranks))

    def __deepcopy__(self, memo: dict[int, Any]) -> Parallel:
        """Processes cannot be copied: the copy of a model talks to the same ones."""
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
