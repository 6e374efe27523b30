"""Map tokens between padded batches and packed rows: pure index maths on tensors."""

from __future__ import annotations

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
    lengths_from_mask,
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
from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.row import (
    IGNORE,
    DepthTargets,
    OnlyPacked,
    PackedRow,
    check_none_on_padding,
    roll_left,
    shift_labels,
    stops_of_tokens,
    unshift_labels,
)
from vlmpack.layout.segments import Layout, Precision, Segments, SlotRule, checked_boundaries, ranges, round_up
from vlmpack.layout.sharing import MIN_SHARED, content_numbers, find_prefix_tree, share, unshare

__all__ = [
    "IGNORE",
    "IMAGE",
    "METADATA_KEY",
    "MIN_SHARED",
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
    "PrefixTree",
    "Segments",
    "SlotRule",
    "Spaced",
    "around_graph",
    "check_is_tensor",
    "check_none_on_padding",
    "checked_boundaries",
    "content_numbers",
    "find_prefix_tree",
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
    "share",
    "shift_labels",
    "stops_of_tokens",
    "to_device",
    "unpack",
    "unshare",
    "unshift_labels",
    "whole_numbers",
]
