"""One row over many ranks: who holds which token, who computes which image."""

from __future__ import annotations

from vlmpack.parallel.media import MediaShare, Route
from vlmpack.parallel.partition import Layout, Partition, tail_as_segment
from vlmpack.parallel.shard import LocalRow, shard, unshard

__all__ = ["Layout", "LocalRow", "MediaShare", "Partition", "Route", "shard", "tail_as_segment", "unshard"]
