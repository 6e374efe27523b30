"""One row over many ranks: who holds which token, who computes which image; recipes, and rows for Megatron."""

from __future__ import annotations

from vlmpack.layout import Layout
from vlmpack.parallel.exchange import Exchange
from vlmpack.parallel.gradients import sum_counts, sum_gradients
from vlmpack.parallel.halo import Halo
from vlmpack.parallel.heads import Attend, attend_by_heads, to_heads, to_tokens
from vlmpack.parallel.keys import attend_by_keys
from vlmpack.parallel.media import MediaRoute, MediaShare
from vlmpack.parallel.megatron import (
    Boundaries,
    from_megatron,
    packed_seq_fields,
    packed_seq_params,
    to_megatron,
)
from vlmpack.parallel.mesh import Parallel
from vlmpack.parallel.partition import Partition, tail_as_segment
from vlmpack.parallel.recipe import Engine, GraphScope, Packing, Recipe
from vlmpack.parallel.route import Route
from vlmpack.parallel.shard import LocalRow, shard, unshard
from vlmpack.parallel.validate import validate

__all__ = [
    "Attend",
    "Boundaries",
    "Engine",
    "Exchange",
    "GraphScope",
    "Halo",
    "Layout",
    "LocalRow",
    "MediaRoute",
    "MediaShare",
    "Packing",
    "Parallel",
    "Partition",
    "Recipe",
    "Route",
    "attend_by_heads",
    "attend_by_keys",
    "from_megatron",
    "packed_seq_fields",
    "packed_seq_params",
    "shard",
    "sum_counts",
    "sum_gradients",
    "tail_as_segment",
    "to_heads",
    "to_megatron",
    "to_tokens",
    "unshard",
    "validate",
]
