"""plan_bins: from lengths to a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from vlmpack.errors import ConfigError, check_choice
from vlmpack.plan.exact_fill import best_fit_decreasing, exact_fill
from vlmpack.plan.length_table import LengthTable
from vlmpack.plan.lengths import (
    LARGEST,
    Budget,
    Overlength,
    check_overlength,
    check_seed,
    checked_capacity,
    checked_lengths,
)
from vlmpack.plan.packing_buffer import fill_rows, rolling_fill
from vlmpack.plan.plan import Plan
from vlmpack.plan.prefix_groups import ALONE, Needs, PrefixGroups, large_groups, make_items, parts

STRATEGIES: Mapping[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "exact_fill": exact_fill,
    "best_fit_decreasing": best_fit_decreasing,
    "rolling_fill": rolling_fill,
}
"""Strategy name -> function of lengths int64 [N] and a capacity that returns the bin of each sample, int64 [N]."""


def split_rows(plan: Plan, multiple: int) -> Plan:
    """Split the rows with the most samples in two until the number of rows is a multiple of `multiple`.

    This makes as few splits as possible, and drops, repeats or invents no sample. The second half of a split row
    follows the first.

    Raises:
        ConfigError: there are fewer samples than rows needed.
    """
    missing = -len(plan) % checked_capacity(multiple, "a number of rows")
    if len(plan.sample_ids) < len(plan) + missing:
        raise ConfigError(
            f"{len(plan.sample_ids)} samples cannot fill {len(plan) + missing} rows, the next multiple of {multiple}; "
            "use fewer ranks or less accumulation, or drop what is left over"
        )
    bounds = plan.bounds
    while missing:
        samples = np.diff(bounds)
        rows = np.argsort(-samples, kind="stable")[:missing]
        rows = rows[samples[rows] > 1]
        cuts = [int(bounds[row]) + middle(plan.lengths[plan.sample_ids[bounds[row] : bounds[row + 1]]]) for row in rows]
        bounds = np.insert(bounds, rows + 1, cuts)
        missing -= len(rows)
    return replace(plan, bounds=bounds)


def split_groups(plan: Plan) -> Plan:
    """Plan again without `whole_groups`."""
    order = np.concatenate([plan.sample_ids, plan.dropped])
    is_used = np.isin(np.arange(len(order)), plan.sample_ids)
    names = ("lengths", "capacity", "budgets", "overlength", "strategy", "seed", "groups")
    settings: dict[str, Any] = {name: getattr(plan, name) for name in names}
    bin_of = _bins(plan.needs, order[is_used[order]], plan.strategy, plan.overlength, whole_groups=False)
    return Plan.from_assignment(bin_of, order, **settings)


def middle(lengths: Sequence[int] | np.ndarray) -> int:
    """Return how many samples to keep in the first half, so that both halves have about as many tokens (n >= 2)."""
    before = np.cumsum(lengths)[:-1]
    return 1 + int(np.abs(2 * before - np.sum(lengths)).argmin())


WITH_BUDGETS = ("exact_fill", "rolling_fill")
"""Strategies for multi-constraint bin packing. With budgets, both fill rows through a packing buffer."""


def plan_bins(
    lengths: Sequence[int] | np.ndarray | LengthTable,
    capacity: int,
    *,
    strategy: str = "exact_fill",
    budgets: Sequence[Budget] = (),
    overlength: Overlength = "error",
    seed: int | None = None,
    groups: PrefixGroups | None = None,
    whole_groups: bool = False,
) -> Plan:
    """Choose which samples share a row.

    Args:
        lengths: N whole numbers of at least 1, the tokens of each sample; or the length table of a data set. With a
            table, sample ids in the plan are indices in the data set, and samples that the table refuses are dropped.
        capacity: maximum tokens of a row.
        strategy: one of `STRATEGIES`. Without budgets, the default never makes more rows than best-fit-decreasing.
        budgets: further limits of a row; with a table, `table.budgets(...)`.
        overlength: what to do with a sample that is too large for a row: "error", "drop", or "own_row".
        seed: shuffles the samples first and the rows last. None: samples keep the order given, and rows are ordered by
            their first samples. The same seed gives the same plan.
        groups: groups of samples that share a prefix, which a row computes once (`VLMCollator(share_prefixes=True)`);
            with a table, `table.groups`. Capacity and budgets then limit the computed tokens and costs. A group is
            placed in one row, or split into pieces that each fit a row. None: nothing is shared.
        whole_groups: give a group that is too large its own row, in place of splitting it, if its prefix takes more
            than a quarter of a row. PackedTrainer computes such a row in pieces (`StepConfig(capacity=...)`).

    Raises:
        SampleError: a length is not finite, whole and positive; a sample is shorter than the prefix it shares; or, with
            `overlength="error"`, samples are too large. Names the first such sample, and lists the ones that are too
            large.
        ConfigError: there are no samples, the capacity is not a whole number of at least 1, or a setting is unknown.
    """
    capacity = checked_capacity(capacity)
    sizes = checked_lengths(lengths.tokens if isinstance(lengths, LengthTable) else lengths)
    _check_settings(len(sizes), strategy, budgets, overlength, seed)
    if isinstance(lengths, LengthTable):
        sizes = lengths.by_place(sizes)
        budgets = [replace(budget, costs=lengths.by_place(budget.costs)) for budget in budgets]
        if groups is not None:
            groups = lengths.groups_by_place(groups)
    needs = Needs.of(sizes, capacity, budgets, groups)
    if overlength == "error":
        needs.refuse_too_large()
    shuffle = None if seed is None else np.random.default_rng(seed)
    order = np.arange(len(sizes)) if shuffle is None else shuffle.permutation(len(sizes))
    settings: dict[str, Any] = {"capacity": capacity, "budgets": tuple(budgets), "overlength": overlength}
    settings |= {"strategy": strategy, "groups": groups, "lengths": sizes, "whole_groups": whole_groups}
    settings["seed"] = None if seed is None else int(seed)  # JSON cannot hold numpy's numbers
    bin_of = _bins(needs, order[(sizes > 0)[order]], strategy, overlength, whole_groups=whole_groups)
    plan = Plan.from_assignment(bin_of, order, **settings)
    return plan if shuffle is None else plan.rearranged(shuffle.permutation(len(plan)))


def _bins(
    needs: Needs, samples: np.ndarray, strategy: str, overlength: Overlength, *, whole_groups: bool
) -> np.ndarray:
    """Return the bin of each sample, int64 [N]; -1: none.

    Args:
        needs: what all samples need.
        samples: int64 [M]: the samples to plan, in planning order.
        strategy: as in `plan_bins`; so are the arguments that follow.
        overlength: what to do with samples that are too large.
        whole_groups: whether large groups get their own rows.
    """
    bin_of, bins = np.full(len(needs.of_samples), -1), 0
    is_too_large = needs.too_large[samples]
    fitting, alone = samples[~is_too_large], samples[is_too_large]
    if whole_groups:
        grouped, bin_of_grouped = large_groups(needs, samples if overlength == "own_row" else fitting)
        bin_of[grouped], bins = bin_of_grouped, bin_of_grouped.max(initial=-1) + 1
        fitting, alone = fitting[bin_of[fitting] < 0], alone[bin_of[alone] < 0]
    if overlength == "own_row":
        bin_of[alone] = bins + np.arange(len(alone))
        bins += len(alone)
    if len(fitting):
        bin_of[fitting] = bins + _place_items(needs, fitting, strategy)
    return bin_of


def _place_items(needs: Needs, samples: np.ndarray, strategy: str) -> np.ndarray:
    """Return the bin of each of `samples`. Whole groups, or pieces of them, are packed as single items."""
    place = partial(_place, strategy=strategy)
    if not len(needs.groups):
        return place(needs.of_samples.take(samples, axis=0), needs.limits)
    item_of = make_items(needs, samples, place)
    return place(needs.sums(samples, item_of), needs.limits)[item_of]


def _place(costs: np.ndarray, limits: np.ndarray, *, strategy: str) -> np.ndarray:
    """Return the bin of each item or branch, int64 [U], from its costs [U, D] and the limits [D], tokens first.

    A branch without tokens (a sample that equals its prefix) counts as one token, and a limit of 0 (used up by the
    prefix) counts as 1, because the strategies need positive numbers.
    """
    lengths, limits = np.maximum(costs[:, 0], 1), np.maximum(limits, 1)
    if len(limits) == 1:
        return STRATEGIES[strategy](lengths, int(limits[0]))
    return fill_rows(np.column_stack([lengths, costs[:, 1:]]), limits.tolist())


def cut_group(needs: Sequence[tuple[int, ...]], prefix: tuple[int, ...], limits: tuple[int, ...]) -> list[list[int]]:
    """Split samples that share one prefix into pieces that each fit a row, longest branches first.

    Args:
        needs: n tuples (tokens, *costs), one per sample; each sample fits a row alone.
        prefix: (tokens, *costs) of the prefix.
        limits: (tokens, *costs) that a row may hold.

    Returns:
        The samples of each piece as indices into `needs`, ascending. Pieces are ordered by their first samples.
    """
    samples = np.arange(len(needs))
    group = PrefixGroups(
        of_samples=np.zeros_like(samples), parents=np.array([ALONE]), tokens=np.array([prefix[0] or 1])
    )
    columns = np.array(needs, np.int64).reshape(len(needs), -1)
    together = Needs(groups=group, of_samples=columns, of_groups=np.array([prefix]), limits=np.array(limits))
    piece_of = make_items(together, samples, partial(_place, strategy="best_fit_decreasing"))
    return [piece.tolist() for piece in parts(piece_of)]


def _check_settings(
    samples: int, strategy: str, budgets: Sequence[Budget], overlength: Overlength, seed: int | None
) -> None:
    if samples > LARGEST:
        raise ConfigError(f"a plan holds at most {LARGEST} samples, got {samples}; plan in parts")
    check_choice("strategy", strategy, STRATEGIES)
    check_overlength(overlength)
    check_seed(seed)
    if budgets and strategy not in WITH_BUDGETS:
        raise ConfigError(
            f"{strategy} packs by tokens only, not by {', '.join(budget.name for budget in budgets)}; choose "
            f"{' or '.join(WITH_BUDGETS)}"
        )
    if len({budget.name for budget in budgets}) != len(budgets):
        raise ConfigError(f"two budgets have the same name: {', '.join(budget.name for budget in budgets)}")
    for budget in budgets:
        if len(budget.costs) != samples:
            raise ConfigError(f"budget {budget.name!r} has costs of {len(budget.costs)} samples, not of {samples}")
