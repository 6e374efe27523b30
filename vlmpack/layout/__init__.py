"""Where every token lives: pure index maths on tensors."""

from __future__ import annotations

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
    check_is_tensor,
    host_grids,
    host_seconds,
    lengths_from_mask,
    seconds_of,
    whole_numbers,
)
from vlmpack.layout.buckets import Bucket, Buckets
from vlmpack.layout.device import (
    Wait,
    around_graph,
    nothing_on_host,
    on_host,
    outside_graph,
    recorded_waits,
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
    stretches,
    unshift_labels,
    without_successor,
)
from vlmpack.layout.row import OnlyPacked, PackedRow
from vlmpack.layout.segments import Segments, checked_boundaries
from vlmpack.layout.slots import Layout, Precision, SlotRule, round_up
from vlmpack.layout.spaced import Spaced

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
    "recorded_waits",
    "require",
    "roll_left",
    "round_up",
    "seconds_of",
    "shift_labels",
    "stops_of_tokens",
    "stretches",
    "to_device",
    "unpack",
    "unshift_labels",
    "whole_numbers",
    "without_successor",
]
