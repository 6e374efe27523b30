"""Packer and pack_sequences: SeqPacker's way to ask for a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import final

import numpy as np

from vlmpack.columns.result import PackResult
from vlmpack.plan import ALIASES, Plan, check_seed, checked_capacity, plan_bins, small_letters, strategy_name

FULL_NAMES = {
    "nextfit": "nf",
    "firstfit": "ff",
    "bestfit": "bf",
    "worstfit": "wf",
    "firstfitdecreasing": "ffd",
    "bestfitdecreasing": "bfd",
    "firstfitshuffle": "ffs",
    "harmonic": "hk",
}
"""SeqPacker's long names, in small letters -> its short ones."""

SHUFFLED = "ffs"
"""The one strategy of SeqPacker that a seed reaches ..."""

SHUFFLE_SEED = 42
"""... and the seed that it takes where none is given."""


@final
@dataclass(frozen=True)
class Packer:
    """Plans rows of one capacity, by one strategy.

    Raises:
        ConfigError: a capacity below 1, a strategy that does not exist, a seed that is no whole number.
    """

    capacity: int
    """Tokens that a row may hold."""
    strategy: str = "obfd"
    """SeqPacker's name, short or long, or one of `vlmpack.plan.STRATEGIES`."""
    seed: int | None = None
    """Of the shuffle. SeqPacker's names use it in `ffs` alone (None: 42), ours always (None: no shuffle)."""

    def __post_init__(self) -> None:
        checked_capacity(self.capacity)
        strategy_name(self._short_name)
        check_seed(self.seed)

    def pack(self, lengths: Sequence[int] | np.ndarray) -> PackResult:
        """Choose which samples share a row.

        Args:
            lengths: N whole numbers from 1 to the capacity, tokens of each sample.

        Raises:
            SampleError: a length that is not whole, below 1, or above the capacity; names the sample.
            ConfigError: no samples.
        """
        start = perf_counter()
        plan = self.plan(lengths)
        return PackResult(plan=plan, time_ms=1000 * (perf_counter() - start))

    def pack_flat(self, lengths: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rows one after the other, and where they are cut: `numpy.split(*packer.pack_flat(lengths))`.

        Returns:
            (samples int64 [N], cuts int64 [G - 1]).
        """
        plan = self.plan(lengths)
        return plan.sample_ids, plan.bounds[1:-1]

    def plan(self, lengths: Sequence[int] | np.ndarray, *, drop_oversize: bool = False) -> Plan:
        """The same as our own `Plan`; with `drop_oversize`, samples above the capacity are left out and listed."""
        oversize = "drop" if drop_oversize else "error"
        return plan_bins(lengths, self.capacity, strategy=self._short_name, oversize=oversize, seed=self._shuffle_seed)

    @staticmethod
    def strategies() -> list[tuple[str, str]]:
        """(SeqPacker's short name, the strategy of `vlmpack.plan.STRATEGIES` that serves it)."""
        return list(ALIASES.items())

    @property
    def _short_name(self) -> str:
        small = small_letters(self.strategy)
        return FULL_NAMES.get(small, small)

    @property
    def _shuffle_seed(self) -> int | None:
        if self._short_name == SHUFFLED:
            return SHUFFLE_SEED if self.seed is None else self.seed
        return None if self._short_name in ALIASES else self.seed


def pack_sequences(
    lengths: Sequence[int] | np.ndarray, capacity: int, strategy: str = "obfd", seed: int | None = None
) -> PackResult:
    """Choose which samples share a row: `Packer(capacity, strategy, seed).pack(lengths)`.

    Args:
        lengths: N whole numbers from 1 to the capacity, tokens of each sample.
        capacity: tokens that a row may hold.
        strategy: see `Packer`.
        seed: see `Packer`.

    Raises:
        SampleError: a length that is not whole, below 1, or above the capacity; names the sample.
        ConfigError: no samples, or a setting that does not exist.
    """
    return Packer(capacity, strategy, seed).pack(lengths)
