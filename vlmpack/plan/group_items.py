"""Groups of samples as items of a plan: a group is placed as a whole, or in pieces that each repeat its prefix.

    capacity 10, a prefix P of 4 tokens, branches of 5, 3, 2 and 1 tokens
    the group                P 5 3 2 1          15 tokens: too many
    room for branches        10 - 4 = 6         packed as samples are: 5 1 | 3 2
    its pieces               P 5 1    P 3 2     10 and 9 tokens

A group in a group is one branch of it; one that is too large is cut first, and its pieces are branches.
U units, D things that a row may hold only so much of, tokens first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np

from vlmpack.plan.algorithms import lower_bound
from vlmpack.plan.lengths import divided_up
from vlmpack.plan.prefix_groups import ALONE, PrefixGroups

Place = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Assigns units with the costs int64 [U, D] to bins of the limits int64 [D]: the bin of each, int64 [U]."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Needs:
    """Costs of samples and of the prefixes of their groups."""

    groups: PrefixGroups
    """Of N samples."""
    of_samples: np.ndarray
    """int64 [N, D]: what each sample needs alone."""
    of_groups: np.ndarray
    """int64 [K, D]: what each prefix needs, from the start of a sample."""
    limits: np.ndarray
    """int64 [D]: what a row may hold; no sample exceeds it alone."""

    def sums(self, samples: np.ndarray, item_of: np.ndarray) -> np.ndarray:
        """int64 [items, D]: what each item needs, every prefix in it counted once."""
        things = zip(self.of_samples.T, self.of_groups.T, strict=True)
        return np.stack([self.groups.row_sums(samples, item_of, *needs) for needs in things], axis=1)


def make_items(needs: Needs, samples: np.ndarray, place: Place) -> np.ndarray:
    """Join the samples of each outermost group to an item; one that exceeds a row is cut.

    Args:
        needs: of all samples.
        samples: int64 [M], in the order in which they are planned.
        place: packs the branches of a group that is cut.

    Returns:
        int64 [M]: the item of each sample; items are numbered in the order of their first samples.
    """
    item_of = _by_first(_outermost(needs.groups, samples))
    over = np.any(needs.sums(samples, item_of) > needs.limits, axis=1)
    if not over.any():
        return item_of
    cut = np.flatnonzero(over[item_of])
    bounds = np.flatnonzero(np.diff(item_of[cut := cut[np.argsort(item_of[cut], kind="stable")]], prepend=-1))
    pieces, first = item_of.copy(), len(over)
    for members in np.split(cut, bounds[1:]):
        pieces[members] = first + _cut(needs, samples[members], place)
        first += len(members)
    return _by_first(pieces)


def _outermost(groups: PrefixGroups, samples: np.ndarray) -> np.ndarray:
    """int64 [M]: the outermost group of each sample, or a number of its own behind those of the groups."""
    group = groups.of_samples[samples]
    return np.where(group < 0, len(groups) + np.arange(len(samples)), np.append(groups.roots, 0)[group])


def _by_first(numbers: np.ndarray) -> np.ndarray:
    """int64 [M]: the same partition, numbered from 0 in the order of first entries."""
    _, first, inverse = np.unique(numbers, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse.reshape(-1)]


def _cut(needs: Needs, samples: np.ndarray, place: Place) -> np.ndarray:
    """Cut the samples of one outermost group into pieces that fit a row each, the innermost groups first.

    Returns:
        int64 [M]: the piece of each sample, any numbers below M.
    """
    groups = needs.groups
    of_groups = np.append(needs.of_groups, np.zeros_like(needs.limits)[None], axis=0)
    added = of_groups[:-1] - of_groups[groups.parents]
    innermost = groups.of_samples[samples]
    beyond = needs.of_samples[samples] - of_groups[innermost]
    units: defaultdict[int, list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
    """(members that stand for their units, costs of the units) in each group that is not cut yet."""
    order = np.argsort(innermost, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(innermost[order])) + 1):
        units[int(innermost[members[0]])].append((members, beyond[members]))
    piece_of = np.arange(len(samples))
    """The member that stands for the unit of each; followed to its end when all groups are cut."""
    for group in reversed(_with_ancestors(groups, list(units))):  # children have higher numbers than their parents
        members = np.concatenate([ids for ids, _ in units[group]])
        costs = np.concatenate([each for _, each in units.pop(group)])
        order = np.argsort(members)
        members, costs = members[order], costs[order]
        room = needs.limits - of_groups[group]
        bin_of = np.zeros(len(members), np.int64) if (costs.sum(0) <= room).all() else place(costs, room)
        _, first, bin_of = np.unique(bin_of, return_index=True, return_inverse=True)
        sums = np.zeros((len(first), len(needs.limits)), np.int64)
        np.add.at(sums, bin_of.reshape(-1), costs)
        stand_in = members[first]
        piece_of[members] = stand_in[bin_of.reshape(-1)]
        units[int(groups.parents[group])].append((stand_in, sums + added[group]))
    while (piece_of != (further := piece_of[piece_of])).any():
        piece_of = further
    return piece_of


def _with_ancestors(groups: PrefixGroups, inner: list[int]) -> list[int]:
    """These groups and all around them, rising."""
    found: set[int] = set()
    for group in inner:
        while group != ALONE and group not in found:
            found.add(group)
            group = int(groups.parents[group])
    return sorted(found)


def group_bound(groups: PrefixGroups, samples: np.ndarray, sizes: np.ndarray, of_groups: np.ndarray, limit: int) -> int:
    """Rows that samples need at the very least, however groups are cut.

    The best of three bounds: everything over the limit, prefixes counted once; all branches without their prefixes; and
    one sample of each outermost group, the largest, as two of them share nothing.

    Args:
        groups: of N samples.
        samples: int64 [M]: those in rows.
        sizes: int64 [N]: what each needs alone, at most `limit`.
        of_groups: int64 [K]: what each prefix needs.
        limit: of a row.
    """
    if not len(samples):
        return 0
    together = groups.row_sums(samples, np.zeros(len(samples), np.int64), sizes, of_groups)
    branches = sizes[samples] - groups.shared(of_groups)[samples]
    item_of = _by_first(_outermost(groups, samples))
    largest = np.zeros(int(item_of.max()) + 1, np.int64)
    np.maximum.at(largest, item_of, sizes[samples])
    return max(divided_up(int(together[0]), limit), lower_bound(branches, limit), lower_bound(largest, limit))
