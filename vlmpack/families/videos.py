"""Rules for writing a video as runs of placeholders, as the families' processors do."""

from __future__ import annotations

from typing import Any

import numpy as np

from vlmpack.errors import LayoutError
from vlmpack.families.family import TRANSFORMERS, Placement
from vlmpack.layout.media import Grid


def run_per_frame(grid: Grid, seconds: float | None, vision: Any) -> Placement:
    """Place every frame of a video as its own run, like an image; timestamps are text between the runs."""
    return Placement(cells=((1, *grid[1:]),) * grid[0])


def run_of_pairs(grid: Grid, seconds: float | None, vision: Any) -> Placement:
    """Place a video as one run; every token merges `temporal_merge_size` frames, which take one position."""
    size = vision.temporal_merge_size
    if grid[0] % size:
        raise LayoutError(
            f"its grid has {grid[0]} frames, and the model makes a token of {size} each; repeat its last frame, as the "
            "model's processor does"
        )
    return Placement(cells=((grid[0] // size, *grid[1:]),))


def timed_run(
    grid: Grid, seconds: float | None, vision: Any, *, whole_seconds: bool = TRANSFORMERS < (5, 18)
) -> Placement:
    """Place a video as one run of tokens; the distance of frames is proportional to time.

    `whole_seconds`: True to round the seconds between frames down first, as transformers 5.17 does.
    """
    # float32 throughout, because the model computes with the float32 tensor second_per_grid_ts
    time = np.float32(1.0 if seconds is None else seconds)
    interval = np.float32(vision.tokens_per_second) * (np.trunc(time) if whole_seconds else time)
    return Placement(cells=(grid,), interval=interval)
