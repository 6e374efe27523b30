"""Context parallelism: one packed row split over ranks, with Ulysses or all-gather KV, and images spread over ranks."""

from __future__ import annotations

from vlmpack.context_parallel.mesh import Parallel, sum_counts, sum_gradients
from vlmpack.context_parallel.partition import Partition
from vlmpack.context_parallel.plans import plan_for

__all__ = [
    "Parallel",
    "Partition",
    "plan_for",
    "sum_counts",
    "sum_gradients",
]
