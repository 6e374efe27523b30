"""The plan of an epoch, made from the lengths of samples: which samples share a row.

Lengths [5, 3, 4, 2, 6] at a capacity of 10, in two rows:

    row 0     0 0 0 0 0 1 1 1 3 3      samples [0, 1, 3]
    row 1     2 2 2 2 4 4 4 4 4 4      samples [2, 4]

    sample_ids  [0, 1, 3, 2, 4]        row after row
    bounds      [0, 3, 5]              where each row starts in `sample_ids`

N samples, D of them dropped, in G rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import numpy as np

from vlmpack.errors import ConfigError, check_choice
from vlmpack.plan.archive import digest_of_archive, read_archive, write_archive
from vlmpack.plan.exact_fill import best_fit_decreasing, exact_fill, stable_order
from vlmpack.plan.length_table import LengthTable
from vlmpack.plan.lengths import (
    LARGEST,
    Budget,
    Overlength,
    check_overlength,
    check_seed,
    checked_capacity,
    checked_lengths,
    divided_up,
)
from vlmpack.plan.packing_buffer import fill_rows, rolling_fill
from vlmpack.plan.prefix_groups import ALONE, Needs, PrefixGroups, attended_pairs, large_groups, make_items, parts

FORMAT = "vlmpack.plan"
NO_SAMPLES = np.zeros(0, np.int64)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Rows of sample ids.

    A sample id is an index into `lengths`; for a plan made from a length table, it is the index in the data set.
    Within a row, samples keep the order in which they were planned: as given, or shuffled by the seed.
    """

    sample_ids: np.ndarray
    """int64 [N - D]: the samples of all rows, one row after the other."""
    bounds: np.ndarray
    """int64 [G + 1]: where each row starts in `sample_ids`, and where the last row ends."""
    lengths: np.ndarray
    """int64 [N]: tokens of every sample to plan; 0 for samples that the length table refused."""
    dropped: np.ndarray
    """int64 [D], ascending: samples in no row, because they are too large for a row or were refused earlier."""
    capacity: int
    """Maximum tokens of a row."""
    budgets: tuple[Budget, ...] = ()
    """Further limits of a row: patches, images."""
    overlength: Overlength = "error"
    """What happened to samples that are too large for a row: refused, dropped, or each placed in its own row."""
    whole_groups: bool = False
    """Whether groups that are too large for a row have their own row too, if their prefix is long."""
    strategy: str = "exact_fill"
    """Bin packing strategy, see `plan_bins`."""
    seed: int | None = None
    """Seed of the shuffle; None: samples and rows are in the order given."""
    groups: PrefixGroups | None = None
    """Groups of samples that share a prefix, which a row computes once; None: nothing is shared."""

    @classmethod
    def from_assignment(cls, bin_of: np.ndarray, order: np.ndarray | None = None, **fields: Any) -> Plan:
        """Make a plan from the bin of each sample.

        Rows are ordered by their first samples.

        Args:
            bin_of: int64 [N]: bins 0 to G - 1, none of them empty; -1 for a dropped sample.
            order: int64 [N]: a permutation that gives the order of samples within rows; None: as given.
            fields: the other fields of the plan.
        """
        order = np.arange(len(bin_of)) if order is None else order
        placed = order[bin_of[order] >= 0]
        at, bounds = _rows(bin_of[placed])
        return cls(sample_ids=placed[at], bounds=bounds, dropped=np.flatnonzero(bin_of < 0), **fields)

    def rearranged(self, rows: np.ndarray) -> Plan:
        """Return this plan with its rows in another order.

        Args:
            rows: int64 [G]: a permutation of the rows.
        """
        sizes = np.diff(self.bounds)[rows]
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        at = np.arange(len(self.sample_ids)) + np.repeat(self.bounds[rows] - bounds[:-1], sizes)
        return replace(self, sample_ids=self.sample_ids[at], bounds=bounds)

    def renamed(self, stand_in: np.ndarray) -> Plan:
        """Return this plan with each sample replaced by another one of the same length and costs.

        Args:
            stand_in: int64 [N]: a permutation; entry i is the sample that replaces sample i.
        """
        return replace(self, sample_ids=stand_in[self.sample_ids])

    def excess(self, sample: int) -> str:
        """Say by what a sample exceeds a row on its own; "": by nothing."""
        needs = zip(self.needs.names, self.needs.of_samples[sample], self.needs.limits, strict=True)
        return ", ".join(f"{cost} {name} (a row holds {most})" for name, cost, most in needs if cost > most)

    def accumulation(self, samples_per_update: int, *, ranks: int = 1) -> int:
        """Return the rows that each rank accumulates for at least this many samples in an optimizer step, on average.

        Raises:
            ConfigError: the plan has fewer samples.
        """
        if samples_per_update > (samples := len(self.sample_ids)):
            raise ConfigError(f"samples_per_update={samples_per_update}: there are only {samples:,} samples; lower it")
        return divided_up(samples_per_update * len(self), samples * ranks)

    # ------------------------------------------------------------------ rows

    def __len__(self) -> int:
        """Return the number of rows, G."""
        return len(self.bounds) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        """Return the samples of one row, int64; negative indices count from the end.

        Raises:
            IndexError: there is no such row.
        """
        at = range(len(self))[row]
        return self.sample_ids[self.bounds[at] : self.bounds[at + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[row] for row in range(len(self)))

    @cached_property
    def bins(self) -> tuple[tuple[int, ...], ...]:
        """The samples of each row, as Python ints."""
        ids, bounds = self.sample_ids.tolist(), self.bounds.tolist()
        return tuple(tuple(ids[a:b]) for a, b in pairwise(bounds))

    def sums(self, values: np.ndarray, of_groups: np.ndarray | None = None) -> np.ndarray:
        """Sum a per-sample quantity over the samples of each row, [G].

        Args:
            values: [N]: the quantity of each sample.
            of_groups: [K]: the quantity of each group's prefix, counted from the start of a sample. The row then counts
                a shared prefix once instead of once per sample. None: every sample counts in full.

        Raises:
            ConfigError: `of_groups` does not have one entry per group of the plan.
        """
        groups = self.groups
        if of_groups is not None and len(of_groups) != (count := 0 if groups is None else len(groups)):
            raise ConfigError(
                f"{len(of_groups)} numbers of groups, but the plan has {count} groups; give one per group"
            )
        if groups is not None and of_groups is not None:
            row_of = np.repeat(np.arange(len(self)), np.diff(self.bounds))
            return groups.row_sums(self.sample_ids, row_of, values, of_groups)
        return np.add.reduceat(values[self.sample_ids], self.bounds[:-1]) if len(self) else values[:0]

    @cached_property
    def needs(self) -> Needs:
        """What samples and prefixes need of a row: tokens, and the cost of each budget."""
        return Needs.of(self.lengths, self.capacity, self.budgets, self.groups)

    @property
    def tokens(self) -> np.ndarray:
        """int64 [G]: tokens of each row, with every sample counted in full."""
        return self.sums(self.lengths)

    @cached_property
    def tree_tokens(self) -> np.ndarray:
        """int64 [G]: tokens that each row computes, with every shared prefix counted once."""
        return self.sums(self.lengths, None if self.groups is None else self.groups.tokens)

    @property
    def attended_pairs(self) -> np.ndarray:
        """int64 [G]: query-key pairs that each row computes, with every shared prefix counted once."""
        of_groups = None if self.groups is None else attended_pairs(self.groups.tokens)
        return self.sums(attended_pairs(self.lengths), of_groups)

    # ------------------------------------------------------------------ how good it is

    @property
    def fill(self) -> float:
        """Computed tokens over row capacity, 0 to 1; a row above the capacity counts as full."""
        tokens = self.tree_tokens
        return float(tokens.sum() / np.maximum(tokens, self.capacity).sum()) if len(self) else 0.0

    @property
    def waste(self) -> int:
        """Unused tokens of row capacity."""
        return int(np.maximum(self.capacity - self.tree_tokens, 0).sum())

    @cached_property
    def lower_bound(self) -> int:
        """Number of rows that these samples need at least, however they are placed and groups are split."""
        kept = np.ones(len(self.lengths), bool)
        kept[self.dropped] = False
        alone = self.needs.too_large & kept
        return int(alone.sum()) + self.needs.least_rows(np.flatnonzero(kept & ~alone))

    # ------------------------------------------------------------------ on disk

    @property
    def manifest(self) -> dict[str, Any]:
        """Summary of the plan without its rows, ready for JSON."""
        segments, tree_tokens = np.diff(self.bounds), self.tree_tokens
        trees = {"tree_tokens": int(tree_tokens.sum()), "longest_tree": int(tree_tokens.max(initial=0))}
        trees |= {"whole_groups": True} if self.whole_groups else {}
        return {
            "rows": len(self),
            "samples": len(self.lengths),
            "dropped": len(self.dropped),
            "tokens": int(self.tokens.sum()),
            "capacity": self.capacity,
            "budgets": {budget.name: budget.limit for budget in self.budgets},
            "fill": round(self.fill, 6),
            "lower_bound": self.lower_bound,
            "longest_row": int(self.tokens.max(initial=0)),
            "longest_segment": int(self.lengths[self.sample_ids].max(initial=0)),
            "most_segments": int(segments.max(initial=0)),
            "strategy": self.strategy,
            "overlength": self.overlength,
            "seed": self.seed,
            **({} if self.groups is None else trees),
        }

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the rows, lengths and settings: equal plans have equal digests, on every machine."""
        return digest_of_archive(self.manifest, self._arrays())

    def save(self, path: str | Path) -> None:
        """Write the plan to one file, atomically: a crash never leaves a partial file.

        The file is a zip of `manifest.json`, for people and other programs, and one `.npy` per array. The same plan
        always gives the same bytes.
        """
        write_archive(path, self.manifest, self._arrays(), kind=FORMAT)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            ConfigError: there is no such file, it is not a plan, or it has another version.
            LayoutError: the file was changed after it was written.
        """
        with read_archive(path, kind=FORMAT) as (manifest, arrays):
            return cls(
                **{name: arrays[name] for name in ("sample_ids", "bounds", "lengths", "dropped")},
                **{name: manifest[name] for name in ("capacity", "overlength", "strategy", "seed")},
                budgets=tuple(
                    Budget(name=name, costs=arrays[f"budget.{name}"], limit=most, shared=arrays.get(f"shared.{name}"))
                    for name, most in manifest["budgets"].items()
                ),
                groups=PrefixGroups.of_arrays(arrays),
                whole_groups=manifest.get("whole_groups", False),
            )

    def _arrays(self) -> dict[str, np.ndarray]:
        named = {f"budget.{budget.name}": budget.costs for budget in self.budgets}
        named |= {f"shared.{budget.name}": budget.shared for budget in self.budgets if budget.shared is not None}
        named |= {} if self.groups is None else self.groups.arrays()
        rows = {"sample_ids": self.sample_ids, "bounds": self.bounds}
        return {**rows, "lengths": self.lengths, "dropped": self.dropped, **named}

    # ------------------------------------------------------------------ in words

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return (
            f"Plan({len(self)} rows of {self.capacity} tokens, {self.fill:.2%} full, {len(self.sample_ids)} samples, "
            f"{len(self.dropped)} dropped, at least {self.lower_bound} rows needed, by {self.strategy})"
        )


def _rows(bin_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (samples row by row, bounds): bins ordered by their first samples, samples ascending within each."""
    if not len(bin_of):
        return NO_SAMPLES, np.zeros(1, np.int64)
    first = np.empty(int(bin_of.max()) + 1, np.int64)
    first[bin_of[::-1]] = np.arange(len(bin_of))[::-1]
    opens = np.zeros(len(bin_of), np.int64)
    opens[first] = 1
    row_of = (np.cumsum(opens) - 1)[first][bin_of]
    return stable_order(row_of), np.concatenate([[0], np.cumsum(np.bincount(row_of))])


# ---------------------------------------------------------------------- from lengths to a plan

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
