"""Map tokens between padded batches and packed rows: pure index maths on tensors."""

from __future__ import annotations

from vlmpack.layout.arrays import ranges
from vlmpack.layout.batch import (
    IMAGE,
    METADATA_KEY,
    TEXT,
    VIDEO,
    Grid,
    HostMetadata,
    MaskSpans,
    Media,
    PaddedBatch,
    check_is_tensor,
    host_grids,
    host_seconds,
    lengths_from_mask,
    seconds_of,
    whole_numbers,
)
from vlmpack.layout.buckets import Bucket, Buckets, Spaced
from vlmpack.layout.device import (
    HostSync,
    around_graph,
    nothing_on_host,
    on_host,
    outside_graph,
    recorded_syncs,
    require,
    to_device,
)
from vlmpack.layout.packing import pack, unpack
from vlmpack.layout.roll import (
    IGNORE,
    DepthTargets,
    check_none_on_padding,
    roll_left,
    shift_labels,
    stops_of_tokens,
    unshift_labels,
    without_successor,
)
from vlmpack.layout.row import OnlyPacked, PackedRow
from vlmpack.layout.segments import Layout, Precision, Segments, SlotRule, checked_boundaries, round_up

__all__ = [
    "IGNORE",
    "IMAGE",
    "METADATA_KEY",
    "TEXT",
    "VIDEO",
    "Bucket",
    "Buckets",
    "DepthTargets",
    "Grid",
    "HostMetadata",
    "HostSync",
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
    "around_graph",
    "check_is_tensor",
    "check_none_on_padding",
    "checked_boundaries",
    "host_grids",
    "host_seconds",
    "lengths_from_mask",
    "nothing_on_host",
    "on_host",
    "outside_graph",
    "pack",
    "ranges",
    "recorded_syncs",
    "require",
    "roll_left",
    "round_up",
    "seconds_of",
    "shift_labels",
    "stops_of_tokens",
    "to_device",
    "unpack",
    "unshift_labels",
    "whole_numbers",
    "without_successor",
]
