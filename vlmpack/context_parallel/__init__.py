"""Context parallelism: one packed row over many ranks, with Ulysses or all-gather KV, and images spread over ranks."""

from __future__ import annotations

from vlmpack.context_parallel.attention import Attend, GatheredKV, attend_by_heads, to_heads, to_tokens
from vlmpack.context_parallel.collectives import Collectives, Route, Transfers
from vlmpack.context_parallel.mesh import Parallel, sum_counts, sum_gradients
from vlmpack.context_parallel.partition import Partition, tail_as_segment
from vlmpack.context_parallel.vision import MediaRoute, MediaShare
from vlmpack.layout import Layout

__all__ = [
    "Attend",
    "Collectives",
    "GatheredKV",
    "Layout",
    "MediaRoute",
    "MediaShare",
    "Parallel",
    "Partition",
    "Route",
    "Transfers",
    "attend_by_heads",
    "sum_counts",
    "sum_gradients",
    "tail_as_segment",
    "to_heads",
    "to_tokens",
]
