"""The Qwen families, one descriptor each, and how they place videos."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vlmpack.errors import FamilyError, LayoutError
from vlmpack.families.family import Family
from vlmpack.families.media import MediaItems
from vlmpack.families.text import text_family

_GATED_DELTA = {"layer": "linear_attn"}
_EXPERTS = {"layer": "mlp"}

# ---------------------------------------------------------------------- how videos are placed


def run_per_frame(videos: MediaItems, seconds: Sequence[float], vision: Any) -> MediaItems:
    """Place every frame of a video as a run of its own, like an image; time stamps are text between."""
    frames = np.repeat(videos.grids * (0, 1, 1) + (1, 0, 0), videos.grids[:, 0], axis=0)
    medium = np.repeat(videos.medium, videos.grids[:, 0])
    return MediaItems(grids=frames, interval=np.ones(len(frames), np.float32), medium=medium)


def timed_run(
    videos: MediaItems, seconds: Sequence[float], vision: Any, *, whole_seconds: bool | None = None
) -> MediaItems:
    """Place a video as one run of tokens, its frames as many positions apart as they are in time.

    `whole_seconds`: round the seconds between frames down before use, as older transformers do; None: as the installed
    transformers does.
    """
    if not len(seconds):
        seconds = (1.0,) * len(videos.grids)
    if len(seconds) != len(videos.grids):
        raise LayoutError(
            f"there are {len(videos.grids)} videos but seconds_per_grid has {len(seconds)} values; give one for each "
            "video (the processor's second_per_grid_ts), or none"
        )
    for i, value in enumerate(seconds):
        if not 0 <= value < float("inf"):
            raise LayoutError(f"video {i}: seconds_per_grid is {value}; it must be a finite time, not negative")
    if whole_seconds is None:
        whole_seconds = truncates_seconds()
    # float32 all the way: the model computes with the float32 tensor second_per_grid_ts
    times = np.asarray(seconds, np.float32)
    rate = np.float32(vision.tokens_per_second)
    return replace(videos, interval=rate * (np.trunc(times) if whole_seconds else times))


@cache
def truncates_seconds() -> bool:
    """Return whether the installed transformers rounds `second_per_grid_ts` down to whole seconds.

    5.17 does, 5.23 does not. The function itself is tried, not the version read: a video of three frames 0.7 s apart,
    at 4 positions a second, lies at 0, 2, 5 or, with whole seconds, at 0, 0, 0.

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
    times = positions[0, 0].tolist()
    if times not in ([0, 2, 5], [0, 0, 0]):
        raise FamilyError(
            f"qwen2_5_vl: the installed transformers puts three frames 0.7 s apart at {times}; vlmpack supports "
            "[0, 2, 5] and [0, 0, 0]. Its video positions would be wrong: use a version of the supported range"
        )
    return times == [0, 0, 0]


# ---------------------------------------------------------------------- the families

QWEN = (
    Family(
        model_type="qwen2_vl",
        model_class="Qwen2VLForConditionalGeneration",
        processor="Qwen2VLProcessor",
        patch_size=14,
    ),
    Family(
        model_type="qwen2_5_vl",
        model_class="Qwen2_5_VLForConditionalGeneration",
        videos=timed_run,
        processor="Qwen2_5_VLProcessor",
        patch_size=14,
        vision_windows=True,
    ),
    Family(model_type="qwen3_vl", model_class="Qwen3VLForConditionalGeneration", videos=run_per_frame),
    Family(
        model_type="qwen3_vl_moe",
        model_class="Qwen3VLMoeForConditionalGeneration",
        mechanisms={"experts": _EXPERTS},
        videos=run_per_frame,
    ),
    Family(
        model_type="qwen3_5",
        model_class="Qwen3_5ForConditionalGeneration",
        mechanisms={"gated_delta": _GATED_DELTA},
        videos=run_per_frame,
    ),
    Family(
        model_type="qwen3_5_moe",
        model_class="Qwen3_5MoeForConditionalGeneration",
        mechanisms={"gated_delta": _GATED_DELTA, "experts": _EXPERTS},
        videos=run_per_frame,
    ),
    Family(
        model_type="qwen4_exp",
        model_class="Qwen4ExpForConditionalGeneration",
        mechanisms={
            "gated_delta": _GATED_DELTA,
            "experts": _EXPERTS,
            "per_sample": {"attention": "self_attn", "ngram": "ple", "ngram_ids": "ple_input_ids"},
        },
        videos=run_per_frame,
    ),
    text_family("qwen3", "Qwen3ForCausalLM"),
    text_family("qwen3_next", "Qwen3NextForCausalLM", mechanisms={"gated_delta": _GATED_DELTA, "experts": _EXPERTS}),
)
"""The descriptors."""
