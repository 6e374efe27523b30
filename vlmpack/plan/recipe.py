"""Recipes of padded batches: how many samples an update sees, and how much padding it computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import numpy as np

from vlmpack.errors import ConfigError
from vlmpack.plan.lengths import checked_capacity
from vlmpack.plan.rounding import divided_up

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
        """Tokens of samples per token computed, 0 to 1."""
        return self.tokens / self.computed if self.computed else 0.0

    @property
    def waste(self) -> float:
        """Padding per token computed, 0 to 1."""
        return 1 - self.fill if self.computed else 0.0


@final
@dataclass(frozen=True, kw_only=True)
class PaddedRecipe:
    """How a model was trained, or would be, without packing."""

    world_size: int = 1
    """Ranks."""
    per_device_batch: int = 8
    """Samples of a batch, on each rank."""
    accumulation: int = 1
    """Batches that are added up before an update."""

    def __post_init__(self) -> None:
        for name in ("world_size", "per_device_batch", "accumulation"):
            checked_capacity(self.__dict__[name], name)

    @classmethod
    def reaching(cls, samples_per_update: int, *, world_size: int = 1, per_device_batch: int = 8) -> PaddedRecipe:
        """The recipe whose accumulation gives this many samples an update.

        Raises:
            ConfigError: no whole accumulation does.
        """
        one = cls(world_size=world_size, per_device_batch=per_device_batch).samples_per_update
        if checked_capacity(samples_per_update, "samples_per_update") % one:
            raise ConfigError(
                f"{samples_per_update} samples an update are no multiple of {world_size} ranks x {per_device_batch} "
                "samples: no accumulation gives them. Change one of the three"
            )
        return cls(world_size=world_size, per_device_batch=per_device_batch, accumulation=samples_per_update // one)

    @property
    def samples_per_update(self) -> int:
        """Samples that all ranks see between two updates of the weights."""
        return self.world_size * self.per_device_batch * self.accumulation

    def updates(self, samples: int) -> int:
        """Updates of the weights in an epoch; the last one may see fewer samples."""
        return divided_up(divided_up(samples, self.world_size * self.per_device_batch), self.accumulation)

    def padding(self, lengths: np.ndarray, *, to: PadTo = "longest") -> Padding:
        """What an epoch computes, in batches of neighbouring samples.

        Args:
            lengths: int64 [N] tokens of each sample, in the order of training.
            to: every batch is padded to its own longest sample, or all of them to the longest of all.
        """
        starts = np.arange(0, len(lengths), self.per_device_batch)
        sizes = np.diff(np.append(starts, len(lengths)))
        widths = np.maximum.reduceat(lengths, starts) if len(lengths) else lengths
        if to == "max":
            widths = np.full_like(widths, widths.max(initial=0))
        return Padding(tokens=int(lengths.sum()), computed=int((sizes * widths).sum()))
