"""What every case is told: where to run, how long, and which clock counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

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
