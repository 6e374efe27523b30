"""The same as plain loops over samples and bins: slow, obvious, and the truth for tests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import gcd

import numpy as np

from vlmpack.plan import Plan, PrefixGroups

Bins = list[list[int]]
"""The samples of each bin, in the order in which they were placed."""


def naive_best_fit(lengths: Sequence[int], capacity: int) -> Bins:
    """Place the longest sample left in the fullest bin that has room for it, again and again."""
    bins: Bins = []
    for sample in sorted(range(len(lengths)), key=lambda sample: -lengths[sample]):
        room = [capacity - sum(lengths[other] for other in samples) for samples in bins]
        fitting = [(left, at) for at, left in enumerate(room) if left >= lengths[sample]]
        if not fitting:
            bins.append([])
        bins[min(fitting)[1] if fitting else -1].append(sample)
    return bins


def naive_best_sum(lengths: Sequence[int], room: int) -> int:
    """The largest sum within `room` of any subset, from all sums that there are."""
    sums = {0}
    for length in lengths:
        sums |= {total + length for total in sums if total + length <= room}
    return max(sums)


def naive_lower_bound(lengths: Sequence[int], capacity: int) -> int:
    """The bound L2, threshold by threshold, the bound by parts of a bin, and that by pairs above a third of a bin."""
    unit = gcd(*lengths)
    lengths, capacity = [length // unit for length in lengths], capacity // unit
    bounds = [-(-sum(((parts + 1) * n - 1) // capacity for n in lengths) // parts) for parts in range(2, 17)]
    for threshold in range(capacity // 2 + 1):
        alone = [n for n in lengths if n > capacity - threshold]
        big = [n for n in lengths if capacity - threshold >= n > capacity // 2]
        small = [n for n in lengths if capacity // 2 >= n >= threshold]
        over = max(0, sum(small) - sum(capacity - n for n in big))
        bounds.append(len(alone) + len(big) + -(-over // capacity))
    thirds = sorted(n for n in lengths if 3 * n > capacity)
    bounds.append(0)
    while thirds:  # the longest goes with the shortest, or alone
        if thirds.pop() + (thirds or [capacity])[0] <= capacity:
            thirds.pop(0)
        bounds[-1] += 1
    return max(bounds)


def naive_least_imbalance(costs: Sequence[float], ranks: int) -> float:
    """The least that the most loaded rank can have when all get equally many rows, by trying all."""
    each = len(costs) // ranks
    splits = (split for split in product(range(ranks), repeat=len(costs)) if _equal_counts(split, ranks, each))
    return min(max(_loads(costs, split, ranks)) for split in splits)


def _equal_counts(split: Sequence[int], ranks: int, each: int) -> bool:
    return all(split.count(rank) == each for rank in range(ranks))


def _loads(costs: Sequence[float], split: Sequence[int], ranks: int) -> list[float]:
    return [sum(cost for cost, rank in zip(costs, split, strict=True) if rank == at) for at in range(ranks)]


# ---------------------------------------------------------------------- prefixes


def naive_tokens(row: Sequence[int], lengths: Sequence[int], groups: PrefixGroups) -> set[tuple[str, int, int]]:
    """The different tokens of a row: a token of a prefix belongs to the outermost group whose prefix holds it."""
    tokens = set()
    for sample in row:
        path, group = [], int(groups.of_samples[sample])
        while group >= 0:
            path.append(group)
            group = int(groups.parents[group])
        for position in range(lengths[sample]):
            owner = next((("group", group) for group in path[::-1] if position < groups.tokens[group]), None)
            tokens.add((*(owner or ("sample", sample)), position))
    return tokens


def naive_pairs(row: Sequence[int], lengths: Sequence[int], groups: PrefixGroups) -> int:
    """Each token attends to those before it on its path, and to itself."""
    return sum(position + 1 for _, _, position in naive_tokens(row, lengths, groups))


def fewest_rows(lengths: Sequence[int], capacity: int, groups: PrefixGroups) -> int:
    """The fewest rows of all ways to share samples out, by trying them."""
    best = len(lengths)

    def place(sample: int, rows: list[list[int]]) -> None:
        nonlocal best
        if len(rows) >= best:
            return
        if sample == len(lengths):
            best = len(rows)
            return
        for row in [*rows, []]:
            if len(naive_tokens([*row, sample], lengths, groups)) <= capacity:
                row.append(sample)
                place(sample + 1, [*rows, row] if len(row) == 1 else rows)
                row.pop()

    place(0, [])
    return best


def checked(plan: Plan) -> Plan:
    """The plan, counted again: every sample is in one row or dropped, and no row holds more than it may."""
    assert sorted([*plan.sample_ids.tolist(), *plan.dropped.tolist()]) == list(range(len(plan.lengths)))
    groups = plan.groups or PrefixGroups.of_keys([None] * len(plan.lengths), np.zeros(len(plan.lengths), int))
    costs = [plan.sums(budget.costs, budget.shared) <= budget.limit for budget in plan.budgets]
    for number, row in enumerate(plan.bins):
        assert row
        if plan.overlength != "own_row" if len(row) == 1 else not plan.whole_groups:
            assert len(naive_tokens(row, plan.lengths.tolist(), groups)) <= plan.capacity
            assert all(fits[number] for fits in costs)
    return plan
