"""What there is to say about a data set before it is trained on, as numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, final

import numpy as np

from vlmpack.plan import CAPACITIES, LengthTable, PaddedRecipe, Padding, Simulation, Summary, simulate, summary

DRAWN = ("tokens", "text", "image", "video")
"""Columns that are drawn as histograms."""


@final
@dataclass(frozen=True, kw_only=True)
class PackingTrial:
    """How samples would be packed. Settings that cannot be are refused here, before a sample is measured."""

    recipe: PaddedRecipe
    """How they would be trained without packing: its samples per update are kept."""
    capacities: tuple[int, ...] = CAPACITIES
    """Of rows, in tokens; each is tried."""
    rows_per_device: int = 1
    """Rows of a batch, on each rank."""
    strategy: str = "exact_fill"
    """How samples are placed, see `plan_bins`."""
    max_patches: int | None = None
    """Most patches of the vision tower in a row; None: no limit."""
    max_images: int | None = None
    """Most images and videos in a row; None: no limit."""

    def __post_init__(self) -> None:
        one, zero = np.ones(1, np.int64), np.zeros(1, np.int64)
        columns = dict.fromkeys(("image_tokens", "video_tokens", "images", "videos", "patches", "targets"), zero)
        self.of(LengthTable(sample_ids=zero, text_tokens=one, **columns))

    def of(self, table: LengthTable) -> tuple[Simulation, ...]:
        """The table packed into rows of every capacity; a table without samples is packed into none.

        Raises:
            ConfigError: a setting that is not known, below 1, or contradicts another.
        """
        settings = {name: value for name, value in vars(self).items() if name != "capacities"}
        return tuple(simulate(table, each, **settings) for each in self.capacities) if len(table) else ()


@final
@dataclass(frozen=True, kw_only=True)
class Analysis:
    """Everything that `vlmpack analyze` tells."""

    source: str
    """The data set."""
    table: LengthTable
    """Its samples."""
    recipe: PaddedRecipe
    """How they would be trained without packing."""
    simulations: tuple[Simulation, ...]
    """Packed, one for each capacity."""
    is_estimate: bool = False
    """Whether image tokens are estimated by their size alone."""

    @classmethod
    def of(cls, table: LengthTable, packing: PackingTrial, *, source: str, is_estimate: bool = False) -> Analysis:
        """Pack the table.

        Args:
            table: what is known of the samples.
            packing: how they are packed.
            source: what the data set is called.
            is_estimate: whether image tokens are estimated.
        """
        return cls(
            source=source,
            table=table,
            recipe=packing.recipe,
            simulations=packing.of(table),
            is_estimate=is_estimate,
        )

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """int64 [N] each: tokens, and what else there is any of."""
        table = self.table
        found = {
            "tokens": table.tokens,
            "text": table.text_tokens,
            "image": table.image_tokens,
            "video": table.video_tokens,
            "learnt": table.targets,
            "patches": table.patches,
        }
        return {name: values for name, values in found.items() if name == "tokens" or values.any()}

    @property
    def drawn(self) -> dict[str, np.ndarray]:
        """The columns for histograms."""
        return {name: values for name, values in self.columns.items() if name in DRAWN}

    @property
    def summaries(self) -> dict[str, Summary]:
        """Of each column."""
        return {name: summary(values) for name, values in self.columns.items()}

    @property
    def padded_to_longest(self) -> Padding:
        """Batches of neighbouring samples, each padded to its longest."""
        return self.recipe.padding(self.table.tokens)

    @property
    def padded_to_max(self) -> Padding:
        """The same, all padded to the longest sample of all."""
        return self.recipe.padding(self.table.tokens, to="max")

    def to_dict(self) -> dict[str, Any]:
        """Every number, as JSON has it."""
        paddings = {"to_longest": self.padded_to_longest, "to_max": self.padded_to_max}
        return {
            "source": self.source,
            "samples": len(self.table),
            "refused": {
                "samples": len(self.table.refused),
                "reasons": self.table.reasons,
                "listed": [asdict(one) for one in self.table.refused],
            },
            "images": int(self.table.images.sum()),
            "videos": int(self.table.videos.sum()),
            "estimate": self.is_estimate,
            "columns": {name: asdict(one) for name, one in self.summaries.items()},
            "padded": {
                **asdict(self.recipe),
                "samples_per_update": self.recipe.samples_per_update,
                "updates": self.recipe.updates(len(self.table)),
                **{name: {**asdict(one), "waste": one.waste} for name, one in paddings.items()},
            },
            "packed": [{**one.to_dict(), "explained": one.explain()} for one in self.simulations],
        }
