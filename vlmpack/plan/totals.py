"""What the rows of a plan hold: counts over all of them, and the largest sizes of any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np

from vlmpack.plan.length_table import LengthTable
from vlmpack.plan.lengths import round_up
from vlmpack.plan.plan import Plan


@final
@dataclass(frozen=True, kw_only=True)
class Counts:
    """Samples, rows, and totals over all rows."""

    total: int
    """Samples of the data set."""
    refused: int
    """Samples that cannot be used, or are longer than the collator's `max_length`."""
    dropped: int
    """Samples that exceed a row by themselves."""
    samples: int
    """Samples in rows: those that are left."""
    rows: int
    """Rows."""
    tokens: int
    """Tokens of all samples."""
    targets: int
    """Tokens that are trained on."""
    images: int
    """Images."""
    videos: int
    """Videos."""
    patches: int
    """Patches that go into the vision tower."""


@final
@dataclass(frozen=True, kw_only=True)
class FixedSizes:
    """Largest sizes of any row: they are allocated, or captured in a CUDA graph, once for all rows."""

    longest_row: int
    """Tokens of the longest row, what slots and rows are rounded up by included."""
    longest_segment: int
    """Tokens of the longest sample."""
    most_segments: int
    """Samples."""
    most_images: int
    """Images and videos."""
    most_patches: int
    """Patches."""


def totals_of(table: LengthTable, plan: Plan, *, row_multiple: int = 1) -> dict[str, Any]:
    """Count samples, rows and what is in them.

    Args:
        table: lengths of the samples.
        plan: rows of this table: its sample ids are places in the data set, its lengths those of slots.
        row_multiple: rows are rounded up to a multiple of this.

    Returns:
        `counts`: Counts, `sizes`: FixedSizes, and `fill_ratio`: tokens of samples per token of row, 0 to 1.
    """
    place, groups = table.by_place, plan.groups
    tokens = plan.sums(place(table.tokens), getattr(groups, "tokens", None))  # of each row, shared prefixes once
    patches = plan.sums(place(table.patches), getattr(groups, "patches", None))
    media = plan.sums(place(table.images + table.videos), getattr(groups, "images", None))
    names = ("tokens", "targets", "images", "videos")
    packed = {name: place(getattr(table, name))[plan.sample_ids] for name in names}
    counts = Counts(
        total=table.measured,
        refused=len(table.refused),
        dropped=len(plan.dropped) - len(table.refused),
        samples=len(plan.sample_ids),
        rows=len(plan),
        patches=int(patches.sum()),
        **{name: int(values.sum()) for name, values in packed.items()},
    )
    sizes = FixedSizes(
        longest_row=int(round_up(plan.tokens, row_multiple).max()),
        longest_segment=int(packed["tokens"].max()),
        most_segments=int(np.diff(plan.bounds).max()),
        most_images=int(media.max()),
        most_patches=int(patches.max()),
    )
    fill_ratio = round(float(tokens.sum() / np.maximum(plan.tree_tokens, plan.capacity).sum()), 6)
    return {"counts": counts, "sizes": sizes, "fill_ratio": fill_ratio}
