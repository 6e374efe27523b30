"""Estimate the compute cost of samples, and balance rows over data parallel ranks so that ranks wait little.

steps S = 2, ranks R = 2, accumulation A = 2:      gradients of rows[step, rank] are summed before ranks synchronize

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
"""Marks an unused entry of a schedule: the rank computes an empty row without loss there, or nothing."""

ROWS_EXCHANGED = 32
"""Default size of the exchange window, in rows per rank."""

LastStep = Literal["empty", "drop"]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """Which rank computes which row in which step. Every rank has the same number of steps."""

    rows: np.ndarray
    """int64 [S, R, A]: row indices or `EMPTY`; the rows of one rank and step are sorted by falling cost."""
    costs: np.ndarray
    """float [G]: the cost of each row."""

    @property
    def load(self) -> np.ndarray:
        """float [S, R]: cost of each rank in each step."""
        return np.append(self.costs, 0.0)[self.rows].sum(2)

    @property
    def imbalance(self) -> float:
        """Cost of the slowest rank over the mean of all ranks, summed over steps; 1 is perfect balance."""
        load = self.load
        return float(load.max(1).sum() / load.mean(1).sum()) if load.sum() else 1.0


def balance_rows(
    costs: np.ndarray,
    *,
    ranks: int,
    accumulation: int = 1,
    window: int | None = None,
    remainder: LastStep = "empty",
    seed: int | None = None,
) -> Schedule:
    """Distribute G rows over steps of `ranks` times `accumulation` rows; Karmarkar-Karp deals out each step.

    Args:
        costs: [G]: cost of each row, in any unit, not negative: `plan.sums(model.of_samples(...))`.
        ranks: number of ranks, R.
        accumulation: rows that a rank computes per step, A.
        window: number of consecutive steps that may exchange rows. The rows of a window are sorted by cost and cut into
            steps of similar rows. 1: each step keeps its rows; None: as many steps as give `ROWS_EXCHANGED` rows per
            rank. With A = 1 this is the only way to balance.
        remainder: what to do with rows that do not fill a last step: fill it up with `EMPTY`, or drop the rows.
        seed: shuffles rows first, and the steps of each window afterwards. None: the order given.

    Raises:
        ConfigError: a number is not whole or is below 1, the seed is below 0, a setting is unknown, or a cost is
            negative or not finite.
    """
    costs = _checked_costs(costs)
    ranks, accumulation = checked_capacity(ranks, "ranks"), checked_capacity(accumulation, "accumulation")
    window = max(1, ROWS_EXCHANGED // accumulation) if window is None else checked_capacity(window, "window")
    check_choice("remainder", remainder, get_args(LastStep))
    check_seed(seed)
    random = None if seed is None else np.random.default_rng(seed)
    rows = np.arange(len(costs)) if random is None else random.permutation(len(costs))
    steps = _steps(rows, ranks * accumulation, remainder)
    priced = np.append(costs, 0.0)
    if window > 1:
        steps = _similar_steps(steps, priced, window, random)
    dealt = [karmarkar_karp(step.tolist(), priced, ranks) for step in steps]
    steps = np.asarray(dealt, np.int64).reshape(-1, ranks, accumulation)
    dear_first = np.argsort(-priced[steps], axis=2, kind="stable")
    return Schedule(rows=np.take_along_axis(steps, dear_first, 2), costs=costs)


def karmarkar_karp(rows: list[int], costs: np.ndarray, ranks: int) -> list[int]:
    """Distribute the rows of one step over ranks; return the rows of rank 0, then of rank 1, ...

    Start with groups of one row per rank. A group's key is the difference between its most and its least expensive
    share. Repeatedly merge the two groups with the largest differences, expensive shares of one with cheap shares of
    the other, until one group is left. All shares keep the same number of rows.
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


def _steps(rows: np.ndarray, per_step: int, remainder: LastStep) -> np.ndarray:
    """Cut rows into steps, int64 [S, per_step]."""
    over = len(rows) % per_step
    if over and remainder == "drop":
        rows = rows[: len(rows) - over]
    elif over:
        rows = np.append(rows, np.full(per_step - over, EMPTY))
    return rows.reshape(-1, per_step)


def _similar_steps(steps: np.ndarray, costs: np.ndarray, window: int, random: np.random.Generator | None) -> np.ndarray:
    """Exchange rows between the steps of each window, so that each step has rows of similar cost.

    A last step with unused entries keeps its rows.
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
    fault = "costs must be one finite number of at least 0 per row"
    try:
        costs = np.asarray(costs, np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{fault}: {error}") from error
    if costs.ndim != 1 or not np.isfinite(costs).all() or (costs < 0).any():
        raise ConfigError(fault)
    return costs


# ---------------------------------------------------------------------- cost of samples


@final
@dataclass(frozen=True, kw_only=True)
class CostModel:
    """FLOPs of a forward pass: weighted sum of tokens, tokens², patches and each image's patches².

    The backward pass costs twice the forward pass, so relative costs stay the same. Only ratios of the factors matter
    for the balance.
    """

    token: float
    """Cost of a token in the linear layers of the language model."""
    token_pair: float = 0.0
    """Attention cost per pair of tokens; a sample of n tokens counts n² pairs."""
    patch: float = 0.0
    """Cost of a vision patch in the linear layers of the vision tower."""
    patch_pair: float = 0.0
    """Attention cost per pair of patches of one image."""

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
        """Compute the factors of a dense vision-language model from its configuration.

        Language model, per layer: 2 (2h² + 2hk + 3hf) per token (query and output, key and value, gated MLP), and 2h
        per pair: 4h for scores and values, half of it under the causal mask. Vision tower, per block: 2 (4v² + 2vg) per
        patch, and 4v per pair.

        Args:
            hidden: h, hidden size of the language model.
            layers: layers of the language model.
            intermediate: f, intermediate size of its MLP; for a mixture of experts, summed over the experts active per
                token.
            kv_hidden: k, key-value heads times head dimension; None: same as `hidden`.
            vision_hidden: v, hidden size of the vision tower.
            vision_layers: blocks of the vision tower.
            vision_intermediate: g, intermediate size of its MLP.
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
        """Compute the cost of each sample, float [N].

        For samples that share prefixes, also call this with the tokens and patches of the prefixes, [K]:
        `plan.sums(costs, of_groups)` is then the cost of each row. A branch costs its own tokens, its pairs with the
        prefix, and the pairs within the branch.

        Args:
            lengths: [N]: tokens of each sample.
            patches: [N]: vision patches of all images of each sample; None: text only.
            patch_pairs: [N]: patches² summed over the images of each sample; None: as if each sample had one image.

        Raises:
            ConfigError: `patches` or `patch_pairs` has another length than `lengths`.
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
