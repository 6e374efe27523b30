"""One row over many ranks: who holds which token, who computes which image."""

from __future__ import annotations

from vlmpack.parallel.halo import Halo
from vlmpack.parallel.media import MediaRoute, MediaShare
from vlmpack.parallel.partition import Layout, Partition, tail_as_segment
from vlmpack.parallel.route import Route
from vlmpack.parallel.shard import LocalRow, shard, unshard

__all__ = [
    "Halo",
    "Layout",
    "LocalRow",
    "MediaRoute",
    "MediaShare",
    "Partition",
    "Route",
    "shard",
    "tail_as_segment",
    "unshard",
]
