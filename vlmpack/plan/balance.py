"""The compute cost of samples, and rows balanced over data parallel ranks so that no rank blocks long on another.

steps S = 2, ranks R = 2, accumulation A = 2:      rows[step, rank] are added up before ranks synchronise

     step 0                    step 1
     rank 0: rows 4, 1         rank 0: rows 7, 3
     rank 1: rows 0, 5         rank 1: rows 2, 6
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal, final, get_args

import numpy as np

from vlmpack.errors import ConfigError, check_choice
from vlmpack.plan.lengths import check_seed, checked_capacity

EMPTY = -1
"""A place in a schedule without a row: its rank computes a row without loss there, or nothing."""

ROWS_EXCHANGED = 32
"""Rows a rank among which steps of similar rows are found, by default."""

Method = Literal["karmarkar_karp", "as_given"]

Remainder = Literal["empty", "drop"]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """Which rank computes which row when; every rank has the same number of steps."""

    rows: np.ndarray
    """int64 [S, R, A]: rows, or `EMPTY`; those of one rank and step from dear to cheap."""
    costs: np.ndarray
    """float [G]: the cost of each row."""

    @property
    def load(self) -> np.ndarray:
        """float [S, R]: what each rank computes in each step."""
        return np.append(self.costs, 0.0)[self.rows].sum(2)

    @property
    def imbalance(self) -> float:
        """Time of all steps over the time that a perfect balance needs: worst rank / mean, 1 or more."""
        load = self.load
        return float(load.max(1).sum() / load.mean(1).sum()) if load.sum() else 1.0


def balance_rows(
    costs: np.ndarray,
    *,
    ranks: int,
    accumulation: int = 1,
    window: int | None = None,
    method: Method = "karmarkar_karp",
    remainder: Remainder = "empty",
    seed: int | None = None,
) -> Schedule:
    """Hand G rows out, `ranks` times `accumulation` a step.

    Args:
        costs: [G] cost of each row, in any unit, not negative: `plan.sums(model.of_samples(...))`.
        ranks: R.
        accumulation: A, rows that a rank computes in one step.
        window: steps that may exchange rows: the rows of so many steps are sorted by cost and cut into steps of similar
            ones. 1: a step keeps its rows; None: steps with `ROWS_EXCHANGED` rows a rank. With A = 1 it is the only way
            to balance.
        method: how the rows of one step are shared out: by Karmarkar-Karp differencing, or as given.
        remainder: rows that do not fill a last step share it with empty places, or are dropped.
        seed: shuffles rows before, and the steps of a window after; None: both in the order of the rows given.

    Raises:
        ConfigError: a number that is not whole or below 1, a seed below 0, a method that does not exist, or costs that
            are negative or not finite.
    """
    costs = _checked_costs(costs)
    ranks, accumulation = checked_capacity(ranks, "ranks"), checked_capacity(accumulation, "accumulation")
    window = max(1, ROWS_EXCHANGED // accumulation) if window is None else checked_capacity(window, "window")
    check_choice("method", method, get_args(Method))
    check_choice("remainder", remainder, get_args(Remainder))
    check_seed(seed)
    random = None if seed is None else np.random.default_rng(seed)
    rows = np.arange(len(costs)) if random is None else random.permutation(len(costs))
    steps = _steps(rows, ranks * accumulation, remainder)
    priced = np.append(costs, 0.0)
    if window > 1:
        steps = _similar_steps(steps, priced, window, random)
    if method == "karmarkar_karp":
        steps = np.asarray([karmarkar_karp(step.tolist(), priced, ranks) for step in steps], np.int64)
    steps = steps.reshape(-1, ranks, accumulation)
    dear_first = np.argsort(-priced[steps], axis=2, kind="stable")
    return Schedule(rows=np.take_along_axis(steps, dear_first, 2), costs=costs)


def karmarkar_karp(rows: list[int], costs: np.ndarray, ranks: int) -> list[int]:
    """Join groups of one row a rank until one group is left; the rows of rank 0, then of rank 1, ...

    A group counts by the difference between its dearest and its cheapest share. The two groups with the largest
    differences are joined, dear shares of one with cheap shares of the other. All shares keep the same number of rows.
    """
    dear_first = sorted(rows, key=lambda row: (-costs[row], row))
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for at in range(0, len(dear_first), ranks):
        group = [(float(costs[row]), [row]) for row in dear_first[at : at + ranks]]
        heappush(heap, (group[-1][0] - group[0][0], at, group))
    for at in range(len(rows), len(rows) + len(heap) - 1):
        (_, _, left), (_, _, right) = heappop(heap), heappop(heap)
        joined = [(a + b, [*rows_a, *rows_b]) for (a, rows_a), (b, rows_b) in zip(left, reversed(right), strict=True)]
        joined.sort(key=lambda share: -share[0])
        heappush(heap, (joined[-1][0] - joined[0][0], at, joined))
    return [row for _, share in heap[0][2] for row in share]


def _steps(rows: np.ndarray, per_step: int, remainder: Remainder) -> np.ndarray:
    """int64 [S, per_step]."""
    over = len(rows) % per_step
    if over and remainder == "drop":
        rows = rows[: len(rows) - over]
    elif over:
        rows = np.append(rows, np.full(per_step - over, EMPTY))
    return rows.reshape(-1, per_step)


def _similar_steps(steps: np.ndarray, costs: np.ndarray, window: int, random: np.random.Generator | None) -> np.ndarray:
    """Exchange rows between the steps of each window, so that a step has rows of similar cost.

    The last step keeps its rows where some of its places are empty.
    """
    whole = steps if not (steps == EMPTY).any() else steps[:-1]
    out = [steps[:0]]
    for start in range(0, len(whole), window):
        rows = whole[start : start + window].reshape(-1)
        sorted_steps = rows[np.argsort(-costs[rows], kind="stable")].reshape(-1, steps.shape[1])
        sequence = np.argsort(sorted_steps.min(1)) if random is None else random.permutation(len(sorted_steps))
        out.append(sorted_steps[sequence])
    return np.concatenate([*out, steps[len(whole) :]])


def _checked_costs(costs: np.ndarray) -> np.ndarray:
    try:
        costs = np.asarray(costs, np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"costs must be one finite number of at least 0 a row: {error}") from error
    if costs.ndim != 1 or not np.isfinite(costs).all() or (costs < 0).any():
        raise ConfigError("costs must be one finite number of at least 0 a row")
    return costs


# ---------------------------------------------------------------------- what a sample costs


@final
@dataclass(frozen=True, kw_only=True)
class CostModel:
    """FLOPs of one forward pass: tokens + tokens² + patches + Σ patches² of each image, each with its factor.

    The backward pass costs twice as much again, so that shares stay the same. Only ratios of factors matter for a
    balance.
    """

    token: float
    """A token, through the linear layers of the language model."""
    token_pair: float = 0.0
    """A pair of tokens that attend to each other, over n² pairs of a sample of n tokens."""
    patch: float = 0.0
    """A vision patch, through the linear layers of the vision tower."""
    patch_pair: float = 0.0
    """A pair of patches of one image."""

    @classmethod
    def from_sizes(
        cls,
        *,
        hidden: int,
        layers: int,
        intermediate: int,
        kv_hidden: int | None = None,
        vision_hidden: int = 0,
        vision_layers: int = 0,
        vision_intermediate: int = 0,
    ) -> CostModel:
        """The factors of a dense vision-language model, from its configuration.

        Language model: 2 (2h² + 2hk + 3hf) a token and layer (query and output, key and value, gated MLP), and 2h a
        pair and layer: 4h for scores and values, half of it under the causal mask. Vision tower: 2 (4v² + 2vg) a patch
        and block, and 4v a pair.

        Args:
            hidden: h, width of the language model.
            layers: of the language model.
            intermediate: f, width of its MLP; of a mixture of experts, that of the experts which one token meets.
            kv_hidden: k, key-value heads times head dimension; None: as `hidden`.
            vision_hidden: v, width of the vision tower.
            vision_layers: its blocks.
            vision_intermediate: g, width of its MLP.
        """
        key_value = hidden if kv_hidden is None else kv_hidden
        linear = 2 * hidden**2 + 2 * hidden * key_value + 3 * hidden * intermediate
        return cls(
            token=2.0 * layers * linear,
            token_pair=2.0 * layers * hidden,
            patch=2.0 * vision_layers * (4 * vision_hidden**2 + 2 * vision_hidden * vision_intermediate),
            patch_pair=4.0 * vision_layers * vision_hidden,
        )

    def of_samples(
        self, lengths: np.ndarray, patches: np.ndarray | None = None, patch_pairs: np.ndarray | None = None
    ) -> np.ndarray:
        """float [N]: the cost of each sample.

        Args:
            lengths: [N] tokens.
            patches: [N] vision patches of all images of a sample; None: text only.
            patch_pairs: [N] patches² summed over the images of a sample; None: as if it were one image.

        Of groups of samples that share prefixes it is called with the tokens and patches of their prefixes, [K]: what a
        row of such samples costs is `plan.sums(costs, of_groups)`. A branch then costs its own tokens, and its pairs
        with the prefix besides those among themselves.

        Raises:
            ConfigError: as many patches, or pairs, are needed as there are lengths.
        """
        tokens = np.asarray(lengths, np.float64)
        cost = self.token * tokens + self.token_pair * tokens**2
        if patches is None:
            return cost
        count = np.asarray(patches, np.float64)
        pairs = count**2 if patch_pairs is None else np.asarray(patch_pairs, np.float64)
        if not len(tokens) == len(count) == len(pairs):
            raise ConfigError(f"{len(tokens)} lengths, but {len(count)} patches and {len(pairs)} patch_pairs")
        return cost + self.patch * count + self.patch_pair * pairs
