"""plan_bins: lengths in, a plan out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vlmpack.errors import ConfigError
from vlmpack.plan.lengths import (
    LARGEST,
    OVERSIZE,
    Budget,
    Oversize,
    check_seed,
    checked_capacity,
    checked_lengths,
    refuse_too_large,
    too_large,
)
from vlmpack.plan.plan import Plan
from vlmpack.plan.rolling import rolling_fill
from vlmpack.plan.strategies import STRATEGIES, strategy_name
from vlmpack.plan.table import LengthTable

WITH_BUDGETS = ("exact_fill", "rolling_fill")
"""Strategies that know several limits; with them, both fill rows through a waiting room."""


def plan_bins(
    lengths: Sequence[int] | np.ndarray | LengthTable,
    capacity: int,
    *,
    strategy: str = "exact_fill",
    budgets: Sequence[Budget] = (),
    oversize: Oversize = "error",
    seed: int | None = None,
) -> Plan:
    """Choose which samples share a row.

    Args:
        lengths: N whole numbers, tokens of each sample, at least 1; or the table of a data set of N samples, whose
            places there are then the sample ids of the plan. Samples that the table refuses are dropped.
        capacity: tokens that a row may hold.
        strategy: one of `STRATEGIES`, or one of SeqPacker's short names; the default makes the fewest rows.
        budgets: what else a row may hold only so much of; with a table, `table.budgets(...)`.
        oversize: what to do with a sample that exceeds a row by itself: refuse to plan, leave it out, or give it a row
            of its own.
        seed: shuffles samples first and rows last; None: samples keep the order given, and rows that of their first
            samples. The same seed gives the same plan.

    Raises:
        SampleError: a length that is not finite, whole and positive, or, with `oversize="error"`, samples that are too
            long; names the first, and lists those that are too long.
        ConfigError: no samples, a capacity that is no whole number of at least 1, or a setting that does not exist.
    """
    capacity, name = checked_capacity(capacity), strategy_name(strategy)
    sizes = checked_lengths(lengths.tokens if isinstance(lengths, LengthTable) else lengths)
    _check_settings(len(sizes), name, budgets, oversize, seed)
    if isinstance(lengths, LengthTable):
        sizes = lengths.by_place(sizes)
        budgets = [replace(budget, costs=lengths.by_place(budget.costs)) for budget in budgets]
    over, usable = too_large(sizes, capacity, budgets), sizes > 0
    if oversize == "error":
        refuse_too_large(over, sizes, capacity, budgets)
    shuffle = None if seed is None else np.random.default_rng(seed)
    order = np.arange(len(sizes)) if shuffle is None else shuffle.permutation(len(sizes))
    bin_of = np.full(len(sizes), -1)
    if len(fitting := order[(usable & ~over)[order]]):
        bin_of[fitting] = _place(sizes, capacity, name, budgets, fitting)
    if oversize == "own_row":
        bin_of[over] = bin_of.max(initial=-1) + 1 + np.arange(over.sum())
    settings = {"capacity": capacity, "budgets": tuple(budgets), "oversize": oversize, "strategy": name}
    settings["seed"] = None if seed is None else int(seed)  # JSON knows no numbers of numpy's
    plan = Plan.from_assignment(bin_of, order, lengths=sizes, **settings)
    return plan if shuffle is None else plan.rearranged(shuffle.permutation(len(plan)))


def _place(
    lengths: np.ndarray, capacity: int, strategy: str, budgets: Sequence[Budget], samples: np.ndarray
) -> np.ndarray:
    """The bin of each of `samples`, which are placed in this order."""
    if not budgets:
        return STRATEGIES[strategy](lengths[samples], capacity)
    needs = [Budget(name=budget.name, costs=budget.costs[samples], limit=budget.limit) for budget in budgets]
    return rolling_fill(lengths[samples], capacity, needs)


def _check_settings(
    samples: int, strategy: str, budgets: Sequence[Budget], oversize: Oversize, seed: int | None
) -> None:
    if samples > LARGEST:
        raise ConfigError(f"a plan holds at most {LARGEST} samples, got {samples}; plan in parts")
    if oversize not in OVERSIZE:
        raise ConfigError(f"oversize must be one of {', '.join(OVERSIZE)}, got {oversize!r}")
    check_seed(seed)
    if budgets and strategy not in WITH_BUDGETS:
        raise ConfigError(
            f"{strategy} knows tokens only, not {', '.join(budget.name for budget in budgets)}; choose "
            f"{' or '.join(WITH_BUDGETS)}"
        )
    if len({budget.name for budget in budgets}) != len(budgets):
        raise ConfigError(f"two budgets have the same name: {', '.join(budget.name for budget in budgets)}")
    for budget in budgets:
        if len(budget.costs) != samples:
            raise ConfigError(
                f"budget {budget.name!r} has costs of {len(budget.costs)} samples, but there are {samples}"
            )
