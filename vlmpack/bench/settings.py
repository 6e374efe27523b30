"""What every case is told: where to run, how long, and which clock counts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, final

from vlmpack.errors import ConfigError

Clock = Literal["wall", "cpu"]
CLOCKS: tuple[Clock, ...] = ("wall", "cpu")


@final
@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Settings of one benchmark run; the sizes of a case are its own."""

    device: str = "cpu"
    """Where models and batches live: "cpu" or "cuda"."""
    family: str = "qwen3_vl"
    """`config.model_type` of the model, for cases that measure one family at a time."""
    seconds: float = 60.0
    """Time that one case may take (for one family), in seconds; it always gets its least number of rounds. A run of
    several hands it out anew before each, by what is left."""
    clock: Clock = "wall"
    """Which clock decides: "wall", or "cpu" (time of all threads of this process) on a machine that others use too."""
    seed: int = 0
    """Of weights, ids and pixels."""


def check_budget(seconds: float) -> None:
    """Refuse a time that never ends, or is none.

    Raises:
        ConfigError: it is negative, infinite or not a number.
    """
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ConfigError(f"--budget {seconds:g}: give seconds, 0 for as few rounds as can be")


def check_seed(seed: int) -> None:
    """Refuse a seed that not every source of random numbers takes.

    Raises:
        ConfigError: it is negative, or has more than 32 bits.
    """
    if not 0 <= seed < 2**32:
        raise ConfigError(f"--seed {seed}: give a whole number from 0 to {2**32 - 1}")
