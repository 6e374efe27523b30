"""Map tokens between padded batches and packed rows: pure index maths on tensors."""

from __future__ import annotations

from vlmpack.layout.arrays import ranges
from vlmpack.layout.batch import (
    FACTS_KEY,
    IMAGE,
    TEXT,
    VIDEO,
    BatchFacts,
    Grid,
    MaskSpans,
    Media,
    PaddedBatch,
    lengths_from_mask,
)
from vlmpack.layout.boundaries import checked_boundaries
from vlmpack.layout.buckets import Bucket, Buckets
from vlmpack.layout.depths import DepthTargets
from vlmpack.layout.device import around_graph, nothing_on_host, on_host, outside_graph, require, to_device
from vlmpack.layout.pack import pack, unpack
from vlmpack.layout.roll import IGNORE, roll_left, shift_labels, unshift_labels, without_successor
from vlmpack.layout.row import OnlyPacked, PackedRow
from vlmpack.layout.segments import Segments
from vlmpack.layout.slots import Layout, Precision, SlotRule
from vlmpack.layout.spaced import Spaced
from vlmpack.layout.waits import Wait, recorded_waits

__all__ = [
    "FACTS_KEY",
    "IGNORE",
    "IMAGE",
    "TEXT",
    "VIDEO",
    "BatchFacts",
    "Bucket",
    "Buckets",
    "DepthTargets",
    "Grid",
    "Layout",
    "MaskSpans",
    "Media",
    "OnlyPacked",
    "PackedRow",
    "PaddedBatch",
    "Precision",
    "Segments",
    "SlotRule",
    "Spaced",
    "Wait",
    "around_graph",
    "checked_boundaries",
    "lengths_from_mask",
    "nothing_on_host",
    "on_host",
    "outside_graph",
    "pack",
    "ranges",
    "recorded_waits",
    "require",
    "roll_left",
    "shift_labels",
    "to_device",
    "unpack",
    "unshift_labels",
    "without_successor",
]
