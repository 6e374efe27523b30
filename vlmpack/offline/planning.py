"""From lengths to rows: what may be left out, which samples share a row, and what the rows come to."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from vlmpack.collate import SkipLog, VLMCollator, sample_id_of
from vlmpack.errors import ConfigError, SampleError
from vlmpack.layout import SlotRule
from vlmpack.loading import MapStyle, sample_at
from vlmpack.offline.manifest import Counts, FixedSizes
from vlmpack.offline.settings import StoreSettings
from vlmpack.offline.unchanged import sample_digest
from vlmpack.plan import (
    Budget,
    LengthTable,
    Plan,
    Refused,
    plan_bins,
    refuse_too_large,
    round_up,
    split_rows,
    too_large,
)


def check_refused(table: LengthTable, collator: VLMCollator) -> None:
    """Raise unless the collator would go on with the samples that are left.

    Raises:
        SampleError: a sample was refused, and `on_bad` is "raise".
        ConfigError: more were refused than the skip limit allows, or all.
    """
    skip_log = SkipLog(limit=collator.skip_log.limit)
    refused = {one.index: one for one in table.refused}
    with skip_log.at_once():
        for before, place in pairwise([-1, *sorted(refused), table.given]):
            if place - before > 1:
                skip_log.use(place - before - 1)
            if place == table.given:
                break
            error = _error(refused[place])
            if collator.leaves_out(error.reason):
                skip_log.note(error)
            elif collator.on_bad == "skip":
                skip_log.refuse(error)
            else:
                raise _with_count(error, len(table.refused))
    if not len(table):
        raise ConfigError(f"none of {table.given} samples can be packed: {table.reasons or 'the data set is empty'}")


def _error(one: Refused) -> SampleError:
    return SampleError(one.detail, index=one.index, reason=one.reason, sample_id=one.sample_id)


def _with_count(error: SampleError, count: int) -> SampleError:
    detail = f"{error.detail}. {count} sample(s) cannot be used in all; on_bad='skip' leaves them out and lists them"
    return SampleError(detail, index=error.index, reason=error.reason, sample_id=error.sample_id)


def plan_rows(table: LengthTable, settings: StoreSettings, slots: SlotRule, dataset: MapStyle) -> Plan:
    """Which samples share a row; a sample's id in the plan is its place in the table.

    Samples count as long as their slots are. The data set is asked for the id of a sample that is refused.

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
    )
    if not len(plan):
        raise ConfigError(f"all {len(table)} samples exceed a row of {settings.capacity} tokens; raise the capacity")
    return split_rows(plan, settings.rows_multiple)


def _refuse_too_large(
    table: LengthTable, lengths: np.ndarray, capacity: int, budgets: tuple[Budget, ...], dataset: MapStyle
) -> None:
    """As `plan_bins` does it, with the samples' places in the data set instead of those in the table."""
    by_place = [dataclasses.replace(one, costs=table.by_place(one.costs)) for one in budgets]
    lengths = table.by_place(lengths)
    try:
        refuse_too_large(too_large(lengths, capacity, by_place), lengths, capacity, by_place)
    except SampleError as error:
        name = None if error.index is None else _id_at(dataset, error.index)
        raise SampleError(error.detail, index=error.index, reason=error.reason, sample_id=name) from None


def _id_at(dataset: MapStyle, place: int) -> int | str | None:
    """The id that a sample brings: a table of lengths keeps those of refused samples only."""
    return sample_id_of(sample_at(dataset, place))


# ---------------------------------------------------------------------- what it comes to


def left_out(table: LengthTable, plan: Plan, dataset: MapStyle, collator: VLMCollator) -> list[dict[str, Any]]:
    """One entry for each sample that is in no row, by its place.

    Args:
        table: with the refused ones.
        plan: with those that exceed a row.
        dataset: of which the ids of these, and the digests of all, are read.
        collator: that refused them.
    """
    entries = [*(dataclasses.asdict(one) for one in table.refused), *_dropped(table, plan, dataset)]
    for entry in entries:
        entry["digest"] = sample_digest(sample_at(dataset, entry["index"]), collator)
    return sorted(entries, key=lambda one: one["index"])


def _dropped(table: LengthTable, plan: Plan, dataset: MapStyle) -> Iterator[dict[str, Any]]:
    limits = [("tokens", plan.lengths, plan.capacity), *((b.name, b.costs, b.limit) for b in plan.budgets)]
    for at in plan.dropped.tolist():
        over = ", ".join(f"{costs[at]} {name} (a row holds {most})" for name, costs, most in limits if costs[at] > most)
        place = int(table.sample_ids[at])
        yield {
            "index": place,
            "sample_id": _id_at(dataset, place),
            "reason": "oversize",
            "detail": f"it exceeds a row by itself: {over}; raise the limit, or choose oversize='own_row'",
        }


def reasons(entries: list[dict[str, Any]]) -> dict[str, int]:
    """How many samples were left out for each reason, the most frequent first."""
    return dict(Counter(entry["reason"] for entry in entries).most_common())


def count(table: LengthTable, plan: Plan) -> Counts:
    """Samples, rows and what is in them."""
    columns = ("tokens", "targets", "images", "videos", "patches")
    sums: dict[str, np.ndarray] = {**table.__dict__, "tokens": table.tokens}
    return Counts(
        given=table.given,
        refused=len(table.refused),
        dropped=len(plan.dropped),
        samples=len(plan.sample_ids),
        rows=len(plan),
        **{name: int(sums[name][plan.sample_ids].sum()) for name in columns},
    )


def fixed_sizes(table: LengthTable, plan: Plan, slots: SlotRule) -> FixedSizes:
    """The largest sizes of any row."""
    widths = round_up(plan.tokens, slots.row_multiple)
    return FixedSizes(
        longest_row=int(widths.max()),
        longest_segment=int(table.tokens[plan.sample_ids].max()),
        most_segments=int(np.diff(plan.bounds).max()),
        most_images=int(plan.sums(table.images + table.videos).max()),
        most_patches=int(plan.sums(table.patches).max()),
    )


def fill(table: LengthTable, plan: Plan) -> float:
    """Real tokens per token of row; rows count as wide as the capacity, or wider where they exceed it."""
    tokens = plan.sums(table.tokens)
    return float(tokens.sum() / np.maximum(plan.tokens, plan.capacity).sum())
