"""What there is to say about a data set before it is trained on, as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

import numpy as np

from vlmpack.plan import LengthTable, PaddedRecipe, Padding, Simulation, Summary, simulate, summary

DRAWN = ("tokens", "text", "image", "video")
"""Columns that are drawn as histograms."""


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
    def of(
        cls,
        table: LengthTable,
        capacities: Sequence[int],
        *,
        source: str,
        recipe: PaddedRecipe,
        is_estimate: bool = False,
        **settings: Any,
    ) -> Analysis:
        """Pack the table into rows of every capacity; a table without samples is packed into none.

        Args:
            table: what is known of the samples.
            capacities: of rows, in tokens.
            source: what the data set is called.
            recipe: how they would be trained without packing.
            is_estimate: whether image tokens are estimated.
            settings: further ones of `simulate`.

        Raises:
            ConfigError: a number that is not whole or below 1.
        """
        simulations = (simulate(table, each, recipe=recipe, **settings) for each in capacities)
        return cls(
            source=source,
            table=table,
            recipe=recipe,
            simulations=tuple(simulations) if len(table) else (),
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
