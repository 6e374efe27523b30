"""Simulate packing: rows, fill and waste for a capacity, and the accumulation that keeps the samples per update.

    padded    8 ranks x 4 samples x 4 accumulated                   = 128 samples per update
    packed    8 ranks x 1 row of 9.72 samples x 2 accumulated       = 155.5
              accumulation = ceil(128 / (9.72 x 8 x 1)) = ceil(1.65) = 2

G rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, final

import numpy as np

from vlmpack.errors import ConfigError
from vlmpack.plan.length_table import LengthTable
from vlmpack.plan.lengths import SHOWN, Overlength, checked_capacity, divided_up
from vlmpack.plan.plan import plan_bins

PadTo = Literal["longest", "max"]


@final
@dataclass(frozen=True, kw_only=True)
class Padding:
    """Tokens of one epoch of padded batches."""

    tokens: int
    """Real tokens."""
    computed: int
    """Real tokens plus padding."""

    @property
    def fill(self) -> float:
        """Real tokens over computed tokens, 0 to 1."""
        return self.tokens / self.computed if self.computed else 0.0

    @property
    def waste(self) -> float:
        """Padding over computed tokens, 0 to 1."""
        return 1 - self.fill if self.computed else 0.0


@final
@dataclass(frozen=True, kw_only=True)
class PaddedRecipe:
    """Batch settings of padded training."""

    world_size: int = 1
    """Number of ranks."""
    per_device_batch: int = 8
    """Samples per batch, on each rank."""
    accumulation: int = 1
    """Batches accumulated per update."""

    def __post_init__(self) -> None:
        for name, number in asdict(self).items():
            checked_capacity(number, name)

    @classmethod
    def reaching(cls, samples_per_update: int, *, world_size: int = 1, per_device_batch: int = 8) -> PaddedRecipe:
        """Make the recipe whose accumulation gives this many samples per update.

        Raises:
            ConfigError: no whole number of accumulated batches gives it.
        """
        per_step = cls(world_size=world_size, per_device_batch=per_device_batch).samples_per_update
        accumulation, rest = divmod(checked_capacity(samples_per_update, "samples_per_update"), per_step)
        if rest:
            raise ConfigError(
                f"{samples_per_update} samples per update are not a multiple of {world_size} ranks x "
                f"{per_device_batch} samples: no accumulation gives them. Change one of the three"
            )
        return cls(world_size=world_size, per_device_batch=per_device_batch, accumulation=accumulation)

    @property
    def samples_per_update(self) -> int:
        """Samples that all ranks see per update of the weights."""
        return self.world_size * self.per_device_batch * self.accumulation

    def updates(self, samples: int) -> int:
        """Number of weight updates in an epoch; the last update may see fewer samples."""
        return divided_up(divided_up(samples, self.world_size * self.per_device_batch), self.accumulation)

    def padding(self, lengths: np.ndarray, *, to: PadTo = "longest") -> Padding:
        """Count the tokens that an epoch computes, in batches of neighboring samples.

        Args:
            lengths: int64 [N]: tokens of each sample, in training order.
            to: "longest" pads every batch to its own longest sample, "max" pads all batches to the longest of all.
        """
        starts = np.arange(0, len(lengths), self.per_device_batch)
        sizes = np.diff(np.append(starts, len(lengths)))
        widths = np.maximum.reduceat(lengths, starts) if len(lengths) else lengths
        if to == "max":
            widths = np.full_like(widths, widths.max(initial=0))
        return Padding(tokens=int(lengths.sum()), computed=int((sizes * widths).sum()))


CAPACITIES = (12_000, 16_000, 20_000)
"""Capacities tried by default, in tokens."""

MIXING = "rolling_fill"
"""Strategy that mixes long and short samples in a row; strategies that sort by length end with rows of short ones."""

CLOSE = 1.1
"""Recipes count as equal if packed training sees at most this many times the samples per update."""


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Simulation:
    """Result of a packing simulation for one capacity, with the accumulation that keeps the samples per update."""

    capacity: int
    """Maximum tokens of a row."""
    recipe: PaddedRecipe
    """Padded recipe whose samples per update are to be kept. Packed training has the same ranks."""
    samples: int
    """Samples in rows."""
    tokens: int
    """Tokens of these samples, counted in full."""
    rows: int
    """Number of rows, G."""
    least_rows: int
    """Lower bound of the number of rows."""
    most_samples: int
    """Number of samples in the row that has most."""
    longest: int
    """Length of the longest sample in a row."""
    fill: float
    """Computed tokens over row capacity, 0 to 1; a row above the capacity counts as full."""
    computed: Mapping[str, int]
    """Tokens, vision patches and attended pairs of all rows, shared prefixes counted once per row."""
    dropped: Mapping[int, int]
    """Samples dropped because they are too large for a row: index in the data set -> tokens."""
    samples_deviation: float = 0.0
    """Standard deviation of the number of samples per row."""
    strategy: str = "exact_fill"
    """Bin packing strategy, see `plan_bins`."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """Further limits of a row, by name: "patches", "images"."""

    # ------------------------------------------------------------------ rows

    @property
    def samples_per_row(self) -> float:
        """Mean number of samples per row."""
        return self.samples / self.rows if self.rows else 0.0

    # ------------------------------------------------------------------ the packed recipe

    @property
    def accumulation(self) -> int:
        """Rows to accumulate on each rank so that an update has at least as many samples as with the padded recipe.

        `ceil(target / (samples per row x ranks))`, in whole numbers, so no rounding error enters.
        """
        target = self.recipe.samples_per_update
        return max(1, divided_up(target * self.rows, self.samples * self.recipe.world_size)) if self.samples else 1

    @property
    def samples_per_update(self) -> float:
        """Mean number of samples per update with this accumulation."""
        return self.samples_per_row * self.recipe.world_size * self.accumulation

    @property
    def steps(self) -> int:
        """Forward and backward passes per rank and epoch."""
        return divided_up(self.rows, self.recipe.world_size)

    @property
    def updates(self) -> int:
        """Weight updates per epoch."""
        return divided_up(self.steps, self.accumulation)

    # ------------------------------------------------------------------ in words

    def explain(self) -> tuple[str, ...]:
        """List what one may want to change: many more samples per update, uneven rows, dropped samples."""
        said, ratio = [], self.samples_per_update / self.recipe.samples_per_update
        if ratio > CLOSE:
            said.append(
                f"An update has {ratio:.2f} times the samples of the padded recipe; if that matters, take smaller "
                "rows, accumulate less, or adapt the learning rate."
            )
        if self.samples_deviation > self.samples_per_row and self.strategy != MIXING:
            said.append(
                f"A row holds {self.samples_per_row:.2f} samples on average and {self.most_samples:,} at most, so "
                f"updates see uneven numbers of samples: the strategy {MIXING} mixes long and short ones."
            )
        if self.dropped:
            listed = ", ".join(f"{place} ({tokens:,} tokens)" for place, tokens in list(self.dropped.items())[:SHOWN])
            more = f" and {len(self.dropped) - SHOWN:,} more" if len(self.dropped) > SHOWN else ""
            said.append(f"Samples that exceed a row are left out: {listed}{more}.")
        return tuple(said)

    def to_dict(self) -> dict[str, Any]:
        """Return every number, ready for JSON."""
        return {
            **{name: value for name, value in asdict(self).items() if name not in ("recipe", "dropped")},
            "samples_per_row": self.samples_per_row,
            "accumulation": self.accumulation,
            "samples_per_update": self.samples_per_update,
            "steps": self.steps,
            "updates": self.updates,
            "dropped": [{"sample": place, "tokens": tokens} for place, tokens in self.dropped.items()],
        }

    def __repr__(self) -> str:
        return (
            f"Simulation({self.rows:,} rows of {self.capacity:,} tokens, {self.fill:.2%} full, "
            f"{self.samples_per_row:.2f} samples a row; {self.accumulation:,} accumulated for "
            f"{self.samples_per_update:,.1f} samples an update (padded: {self.recipe.samples_per_update:,}); "
            f"{self.updates:,} updates an epoch; {len(self.dropped):,} samples too long)"
        )


def simulate(
    table: LengthTable,
    capacity: int,
    *,
    recipe: PaddedRecipe | None = None,
    strategy: str = "exact_fill",
    max_patches: int | None = None,
    overlength: Overlength = "drop",
    share_prefixes: bool = False,
) -> Simulation:
    """Simulate packing the samples of a length table with `plan_bins`.

    Args:
        table: lengths of the samples.
        capacity: maximum tokens of a row.
        recipe: padded recipe whose samples per update are to be kept.
        strategy: bin packing strategy, see `plan_bins`.
        max_patches: maximum vision patches of a row; None: no limit.
        overlength: what to do with samples that are too large for a row, see `plan_bins`.
        share_prefixes: compute each shared prefix once per row, by the groups of the table.

    Raises:
        ConfigError: a number is not whole or is below 1, the table has no samples, or `share_prefixes` is set and the
            table has no groups.
    """
    if share_prefixes and table.groups is None:
        raise ConfigError("the table has no groups: measure_lengths(..., min_shared=64) finds them")
    recipe = recipe or PaddedRecipe()
    budgets = table.budgets(patches=max_patches)
    groups = table.groups if share_prefixes else None
    plan = plan_bins(table.tokens, capacity, strategy=strategy, budgets=budgets, overlength=overlength, groups=groups)
    segments = np.diff(plan.bounds)
    dropped = plan.dropped
    patches = plan.sums(table.patches, None if groups is None else groups.patches)
    work = {"tokens": plan.tree_tokens, "patches": patches, "attended_pairs": plan.attended_pairs}
    return Simulation(
        capacity=plan.capacity,
        recipe=recipe,
        samples=len(plan.sample_ids),
        tokens=int(plan.tokens.sum()),
        rows=len(plan),
        fill=plan.fill,
        least_rows=plan.lower_bound,
        most_samples=int(segments.max(initial=0)),
        longest=int(plan.lengths[plan.sample_ids].max(initial=0)),
        dropped=dict(zip(table.sample_ids[dropped].tolist(), plan.lengths[dropped].tolist(), strict=True)),
        samples_deviation=float(segments.std()) if len(plan) else 0.0,
        strategy=plan.strategy,
        limits={budget.name: budget.limit for budget in budgets},
        computed={name: int(of_rows.sum()) for name, of_rows in work.items()},
    )
