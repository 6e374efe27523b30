"""Rows for Megatron-Core and from it: THD batches, parts of a row and their rolls, recipes and their rules."""

from __future__ import annotations

from vlmpack.megatron.recipe import Engine, GraphScope, Packing, Recipe
from vlmpack.megatron.rules import validate
from vlmpack.megatron.shard import Halo, LocalRow, shard, unshard
from vlmpack.megatron.thd import (
    Boundaries,
    from_megatron,
    installed_version,
    packed_seq_fields,
    packed_seq_params,
    to_megatron,
)

__all__ = [
    "Boundaries",
    "Engine",
    "GraphScope",
    "Halo",
    "LocalRow",
    "Packing",
    "Recipe",
    "from_megatron",
    "installed_version",
    "packed_seq_fields",
    "packed_seq_params",
    "shard",
    "to_megatron",
    "unshard",
    "validate",
]
