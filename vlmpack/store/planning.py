"""StoreSettings, and from lengths to rows: the plan, the samples that are left out, and the counts of a store."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import pairwise
from math import lcm
from typing import Any, final

import numpy as np

from vlmpack.collate.collator import VLMCollator, sample_id_of
from vlmpack.collate.skipped import SkipLog
from vlmpack.errors import ConfigError, SampleError, check_whole_number
from vlmpack.layout.segments import SlotRule
from vlmpack.loading.resumable import MapStyle, sample_at
from vlmpack.plan.length_table import LengthTable
from vlmpack.plan.lengths import OVERSIZE, Budget, Oversize, refuse_too_large, round_up, too_large
from vlmpack.plan.plan import Plan
from vlmpack.plan.planner import plan_bins, split_rows, strategy_name
from vlmpack.store.manifest import Counts, FixedSizes
from vlmpack.store.records import IMAGES, Images
from vlmpack.store.symbols import check_storable


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreSettings:
    """Settings of the plan and of the files of a store."""

    capacity: int
    """Tokens that a row may hold."""
    max_patches: int | None = None
    """Most patches of the vision tower in a row; None: no limit."""
    max_images: int | None = None
    """Most images and videos in a row; None: no limit."""
    strategy: str = "exact_fill"
    """Placement of samples: see `plan_bins`."""
    oversize: Oversize = "error"
    """Treatment of a sample that exceeds a row by itself: "error", "drop" (listed) or "own_row"."""
    seed: int | None = None
    """Shuffles samples and rows; None: samples keep their order."""
    rows_multiple: int = 1
    """Rows of many samples are cut in two until the number of rows is a multiple of this: ranks times accumulation."""
    images: Images = "bytes"
    """Images are kept as encoded "bytes", or as a "reference" to their files."""
    shard_rows: int = 128
    """Rows of a file. A kill costs the work on one file."""

    def __post_init__(self) -> None:
        limits = {"max_patches": self.max_patches, "max_images": self.max_images}
        counts = {"capacity": self.capacity, "rows_multiple": self.rows_multiple, "shard_rows": self.shard_rows}
        counts |= {name: limit for name, limit in limits.items() if limit is not None}
        for name, value in counts.items():
            object.__setattr__(self, name, check_whole_number(f"StoreSettings.{name}", value))
        if self.seed is not None:
            seed = check_whole_number("StoreSettings.seed", self.seed, at_least=0, remedy="or None for no shuffle")
            object.__setattr__(self, "seed", seed)
        object.__setattr__(self, "strategy", strategy_name(self.strategy))
        if self.oversize not in OVERSIZE:
            raise ConfigError(f"oversize must be one of {', '.join(OVERSIZE)}, got {self.oversize!r}")
        if self.images not in IMAGES:
            raise ConfigError(f"images must be one of {', '.join(IMAGES)}, got {self.images!r}")


def check_collator(collator: VLMCollator, settings: StoreSettings) -> None:
    """Refuse the collator unless its rows can be stored.

    Raises:
        ConfigError: its samples have more than a row can hold; it pads, fixes sizes that are fixed when rows are read,
            or has slots that do not fit the capacity.
    """
    check_storable(collator)
    slots = collator.slots
    if collator.layout != "packed":
        raise ConfigError("rows are stored by VLMCollator(layout='packed'); this one has layout='padded'")
    if slots.pad_to is not None:
        raise ConfigError(
            f"slots.pad_to={slots.pad_to}: rows are stored without padding, and get a fixed width when they are read, "
            "by PackedDataset(pad_to_max_length=True); leave it out"
        )
    unit = lcm(slots.multiple, slots.row_multiple)
    if settings.capacity % unit:
        raise ConfigError(
            f"a capacity of {settings.capacity} tokens is no multiple of {unit}, which slots and rows are rounded up "
            f"to (multiple={slots.multiple}, row_multiple={slots.row_multiple}); choose "
            f"{settings.capacity // unit * unit or unit} or {(settings.capacity // unit + 1) * unit}"
        )


# ---------------------------------------------------------------------- the plan


def check_refused(table: LengthTable, collator: VLMCollator) -> None:
    """Raise unless the collator would go on with the samples that are left.

    Raises:
        SampleError: a sample was refused, and `on_bad` is "raise".
        ConfigError: more were refused than the collator's limit of skipped samples allows, or all.
    """
    skip_log = SkipLog(limit=collator.skip_log.limit)
    refused = {refusal.index: refusal for refusal in table.refused}
    with skip_log.at_once():
        for before, place in pairwise([-1, *sorted(refused), table.measured]):
            if place - before > 1:
                skip_log.use(place - before - 1)
            if place == table.measured:
                break
            refusal = refused[place]
            error = SampleError(refusal.detail, index=place, reason=refusal.reason, sample_id=refusal.sample_id)
            if collator.leaves_out(error.reason):
                skip_log.note(error)
            elif collator.on_bad == "skip":
                skip_log.refuse(error)
            else:
                remedy = "on_bad='skip' (--on-bad skip) leaves them out and lists them"
                count = f"{len(refused)} sample(s) cannot be used in all; {remedy}"
                raise SampleError(
                    f"{error.detail}. {count}", index=place, reason=error.reason, sample_id=error.sample_id
                )
    if not len(table):
        raise ConfigError(f"none of {table.measured} samples can be packed: {table.reasons or 'the data set is empty'}")


def plan_rows(table: LengthTable, settings: StoreSettings, slots: SlotRule, dataset: MapStyle) -> Plan:
    """Plan which samples share a row; a sample's id in the plan is its place in the table.

    Samples count as long as their slots are, and prefixes that a table has groups of once a row. The data set is read
    for the id of a sample that is refused.

    Raises:
        SampleError: samples exceed a row by themselves, and `oversize` is "error"; lists their places.
        ConfigError: there are too few samples for `rows_multiple`.
    """
    lengths = round_up(table.tokens, slots.multiple)
    budgets = table.budgets(patches=settings.max_patches, images=settings.max_images)
    if slots.max_segments is not None:
        budgets = (*budgets, Budget(name="samples", costs=np.ones_like(lengths), limit=slots.max_segments))
    if settings.oversize == "error":
        _refuse_too_large(table, lengths, settings.capacity, budgets, dataset)
    plan = plan_bins(
        lengths,
        settings.capacity,
        strategy=settings.strategy,
        budgets=budgets,
        oversize=settings.oversize,
        seed=settings.seed,
        groups=table.groups,
    )
    if not len(plan):
        raise ConfigError(f"all {len(table)} samples exceed a row of {settings.capacity} tokens; raise the capacity")
    return split_rows(plan, settings.rows_multiple)


def _refuse_too_large(
    table: LengthTable, lengths: np.ndarray, capacity: int, budgets: tuple[Budget, ...], dataset: MapStyle
) -> None:
    """Refuse samples as `plan_bins` does, by their places in the data set instead of those in the table."""
    by_place = [dataclasses.replace(budget, costs=table.by_place(budget.costs)) for budget in budgets]
    lengths = table.by_place(lengths)
    try:
        refuse_too_large(too_large(lengths, capacity, by_place), lengths, capacity, by_place)
    except SampleError as error:
        name = None if error.index is None else sample_id_of(sample_at(dataset, error.index))
        raise SampleError(error.detail, index=error.index, reason=error.reason, sample_id=name) from None


# ---------------------------------------------------------------------- samples in no row, and totals


def left_out(table: LengthTable, plan: Plan, dataset: MapStyle) -> list[dict[str, Any]]:
    """List the samples that are in no row, by their places.

    Args:
        table: with the refused ones.
        plan: with those that exceed a row.
        dataset: of which the ids of the latter are read.
    """
    entries = [*(dataclasses.asdict(refusal) for refusal in table.refused), *_dropped(table, plan, dataset)]
    return sorted(entries, key=lambda entry: entry["index"])


def _dropped(table: LengthTable, plan: Plan, dataset: MapStyle) -> Iterator[dict[str, Any]]:
    limits = [("tokens", plan.lengths, plan.capacity), *((b.name, b.costs, b.limit) for b in plan.budgets)]
    for at in plan.dropped.tolist():
        over = ", ".join(f"{costs[at]} {name} (a row holds {most})" for name, costs, most in limits if costs[at] > most)
        place = int(table.sample_ids[at])
        yield {
            "index": place,
            "sample_id": sample_id_of(sample_at(dataset, place)),
            "reason": "oversize",
            "detail": f"it exceeds a row by itself: {over}; raise the limit, or choose oversize='own_row'",
        }


def count(table: LengthTable, plan: Plan) -> Counts:
    """Count samples, rows and what is in them."""
    packed = plan.sample_ids
    return Counts(
        total=table.measured,
        refused=len(table.refused),
        dropped=len(plan.dropped),
        samples=len(packed),
        rows=len(plan),
        tokens=int(table.tokens[packed].sum()),
        targets=int(table.targets[packed].sum()),
        images=int(table.images[packed].sum()),
        videos=int(table.videos[packed].sum()),
        patches=int(_media_sums(table, plan)["patches"].sum()),
    )


def _media_sums(table: LengthTable, plan: Plan) -> dict[str, np.ndarray]:
    """int64 [G] each: patches and media that each row computes, those of shared prefixes once."""
    groups = table.groups
    needs = {"patches": (table.patches, None), "media": (table.images + table.videos, None)}
    if groups is not None:
        needs = {"patches": (table.patches, groups.patches), "media": (needs["media"][0], groups.images)}
    return {name: plan.sums(*values) for name, values in needs.items()}


def fixed_sizes(table: LengthTable, plan: Plan, slots: SlotRule) -> FixedSizes:
    """Return the largest sizes of any row."""
    widths, media = round_up(plan.tokens, slots.row_multiple), _media_sums(table, plan)
    return FixedSizes(
        longest_row=int(widths.max()),
        longest_segment=int(table.tokens[plan.sample_ids].max()),
        most_segments=int(np.diff(plan.bounds).max()),
        most_images=int(media["media"].max()),
        most_patches=int(media["patches"].max()),
    )


def fill_ratio(table: LengthTable, plan: Plan) -> float:
    """Return real tokens per token of row; rows count as wide as the capacity, or wider where they exceed it.

    Tokens of shared prefixes count once a row.
    """
    tokens = plan.sums(table.tokens, None if table.groups is None else table.groups.tokens)
    return float(tokens.sum() / np.maximum(plan.tree_tokens, plan.capacity).sum())
