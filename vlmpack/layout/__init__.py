"""Map tokens between padded batches and packed rows: pure index math on tensors."""

from __future__ import annotations

from vlmpack.layout.batch import METADATA_KEY, HostMetadata, Media, PaddedBatch
from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.row import PackedRow, pack, roll_left, unpack
from vlmpack.layout.segments import Segments, SlotRule
from vlmpack.layout.sharing import share, unshare

__all__ = [
    "METADATA_KEY",
    "HostMetadata",
    "Media",
    "PackedRow",
    "PaddedBatch",
    "PrefixTree",
    "Segments",
    "SlotRule",
    "pack",
    "roll_left",
    "share",
    "unpack",
    "unshare",
]
