"""Rules for writing a video as runs of placeholders, as the families' processors do."""

from __future__ import annotations

from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vlmpack.errors import FamilyError, LayoutError
from vlmpack.families.family import Placement
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


def timed_run(grid: Grid, seconds: float | None, vision: Any, *, whole_seconds: bool | None = None) -> Placement:
    """Place a video as one run of tokens; the distance of frames is proportional to time.

    `whole_seconds`: True to round the seconds between frames down first, as older versions of transformers do; None: do
    as the installed transformers does.
    """
    if whole_seconds is None:
        whole_seconds = truncates_seconds()
    # float32 throughout, because the model computes with the float32 tensor second_per_grid_ts
    time = np.float32(1.0 if seconds is None else seconds)
    return Placement(
        cells=(grid,), interval=np.float32(vision.tokens_per_second) * (np.trunc(time) if whole_seconds else time)
    )


@cache
def truncates_seconds() -> bool:
    """Return whether the installed transformers rounds `second_per_grid_ts` down to whole seconds.

    5.17 does, 5.23 does not. Instead of comparing versions, this calls transformers' own function: a video of three
    frames 0.7 s apart, at 4 positions per second, has positions 0, 2, 5, or with whole seconds 0, 0, 0.

    Raises:
        FamilyError: the positions are neither.
    """
    from transformers import Qwen2_5_VLModel

    model: Any = Qwen2_5_VLModel  # its methods are called on a dummy with only the attributes that they read
    vision = SimpleNamespace(spatial_merge_size=1, tokens_per_second=4)
    fake_self = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    fake_self.get_vision_position_ids = partial(model.get_vision_position_ids, fake_self)
    tokens = torch.full((1, 3), 2, device="cpu")
    positions, _ = model.get_rope_index(
        fake_self,
        tokens,
        mm_token_type_ids=tokens,
        video_grid_thw=torch.tensor([[3, 1, 1]], device="cpu"),
        second_per_grid_ts=torch.tensor([0.7], device="cpu"),
    )
    times = positions[0, 0].tolist()
    if times not in ([0, 2, 5], [0, 0, 0]):
        raise FamilyError(
            f"qwen2_5_vl: the installed transformers puts three frames 0.7 s apart at {times}; vlmpack supports "
            "[0, 2, 5] and [0, 0, 0]. Its video positions would be wrong: use a version of the supported range"
        )
    return times == [0, 0, 0]
