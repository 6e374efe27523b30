"""Qwen2.5-VL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, ClassVar, final

import numpy as np
import torch

from vlmpack.errors import FamilyError, LayoutError
from vlmpack.families.base import Family
from vlmpack.families.mrope import MediaItems, media_items
from vlmpack.families.vision_segments import WindowRule, frame_segments, window_segments
from vlmpack.layout import Grid, Segments


@cache
def truncates_seconds() -> bool:
    """Whether the installed transformers rounds `second_per_grid_ts` down to whole seconds.

    5.17 does, 5.23 does not. The function itself is asked, not the version: a video of three frames 0.7 s apart, at
    4 positions a second, lies at 0, 2, 5 or, with whole seconds, at 0, 0, 0.

    Raises:
        FamilyError: it does neither.
    """
    from transformers import Qwen2_5_VLModel

    model: Any = Qwen2_5_VLModel  # its methods are called on a stand-in that has only what they read
    vision = SimpleNamespace(spatial_merge_size=1, tokens_per_second=4)
    stand_in = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    stand_in.get_vision_position_ids = partial(model.get_vision_position_ids, stand_in)
    tokens = torch.full((1, 3), 2, device="cpu")
    positions, _ = model.get_rope_index(
        stand_in,
        tokens,
        mm_token_type_ids=tokens,
        video_grid_thw=torch.tensor([[3, 1, 1]], device="cpu"),
        second_per_grid_ts=torch.tensor([0.7], device="cpu"),
    )
    answer = positions[0, 0].tolist()
    if answer not in ([0, 2, 5], [0, 0, 0]):
        raise FamilyError(
            f"qwen2_5_vl: the installed transformers puts three frames 0.7 s apart at {answer}; vlmpack knows "
            "[0, 2, 5] and [0, 0, 0]. Its video positions would be wrong: use a version of the supported range"
        )
    return answer == [0, 0, 0]


@final
@dataclass(frozen=True, kw_only=True)
class Qwen25VL(Family):
    """Qwen2.5-VL: a video is one run of tokens, its frames as many positions apart as they are in time."""

    model_type: ClassVar[str] = "qwen2_5_vl"
    model_class: ClassVar[str] = "Qwen2_5_VLForConditionalGeneration"

    whole_seconds: bool = field(default_factory=truncates_seconds)
    """Round the seconds between frames down before use, as older transformers do. Found out by asking it."""

    def vision_segments(self, grids: Sequence[Grid], config: Any) -> tuple[Segments, ...]:
        """Whole frames for the blocks in `fullatt_block_indexes`, windows for all others."""
        vision = self.vision_config(config)
        rule = WindowRule(window=vision.window_size // vision.patch_size, merge=vision.spatial_merge_size)
        return frame_segments(grids), window_segments(grids, rule)

    def _videos(self, grids: Sequence[Grid], seconds: Sequence[float], config: Any) -> MediaItems:
        videos = media_items(grids, self.merge(config), "video")
        if not len(seconds):
            seconds = (1.0,) * len(grids)
        if len(seconds) != len(grids):
            raise LayoutError(
                f"there are {len(grids)} videos but seconds_per_grid has {len(seconds)} values; give one for each "
                "video (the processor's second_per_grid_ts), or none"
            )
        for i, value in enumerate(seconds):
            if not 0 <= value < float("inf"):
                raise LayoutError(f"video {i}: seconds_per_grid is {value}; it must be a finite time, not negative")
        # float32 all the way: the model computes with the float32 tensor second_per_grid_ts
        times = np.asarray(seconds, np.float32)
        rate = np.float32(self.vision_config(config).tokens_per_second)
        return replace(videos, interval=rate * (np.trunc(times) if self.whole_seconds else times))
