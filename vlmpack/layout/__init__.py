"""Map tokens between padded batches and packed rows: pure index math on tensors."""

from __future__ import annotations

from vlmpack.layout.batch import METADATA_KEY, HostMetadata, Media, PaddedBatch, lengths_from_mask
from vlmpack.layout.media import Grid, MediaTable, Medium
from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.row import IGNORE, PackedRow, pack, roll_left, unpack
from vlmpack.layout.segments import Layout, Precision, Segments, SlotRule
from vlmpack.layout.sharing import share, unshare

__all__ = [
    "IGNORE",
    "METADATA_KEY",
    "Grid",
    "HostMetadata",
    "Layout",
    "Media",
    "MediaTable",
    "Medium",
    "PackedRow",
    "PaddedBatch",
    "Precision",
    "PrefixTree",
    "Segments",
    "SlotRule",
    "lengths_from_mask",
    "pack",
    "roll_left",
    "share",
    "unpack",
    "unshare",
]
