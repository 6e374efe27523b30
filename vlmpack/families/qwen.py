"""The Qwen families, one descriptor each.

qwen2_vl      a video is one run of tokens; frames are 1 position apart
qwen2_5_vl    a video is one run of tokens; the distance of frames is proportional to time
others        every frame is a run of tokens, like an image
"""

from __future__ import annotations

from vlmpack.families.family import Family
from vlmpack.families.media import run_per_frame, timed_run
from vlmpack.families.text import text_family
from vlmpack.families.tower_inputs import BOUNDARIES, INTERPOLATION, ROTARY, WINDOWS

_LEARNED = (ROTARY, BOUNDARIES, INTERPOLATION)
_GATED_DELTA = {"layer": "linear_attn"}
_EXPERTS = {"layer": "mlp"}

QWEN = (
    Family(
        model_type="qwen2_vl",
        from_grids=(ROTARY, BOUNDARIES),
    ),
    Family(
        model_type="qwen2_5_vl",
        videos=timed_run,
        from_grids=(ROTARY, BOUNDARIES, WINDOWS),
    ),
    Family(
        model_type="qwen3_vl",
        videos=run_per_frame,
        from_grids=_LEARNED,
    ),
    Family(
        model_type="qwen3_vl_moe",
        mechanisms={"experts": _EXPERTS},
        videos=run_per_frame,
        from_grids=_LEARNED,
    ),
    Family(
        model_type="qwen3_5",
        mechanisms={"gated_delta": _GATED_DELTA},
        videos=run_per_frame,
        from_grids=_LEARNED,
    ),
    Family(
        model_type="qwen3_5_moe",
        mechanisms={"gated_delta": _GATED_DELTA, "experts": _EXPERTS},
        videos=run_per_frame,
        from_grids=_LEARNED,
    ),
    Family(
        model_type="qwen4_exp",
        mechanisms={
            "gated_delta": _GATED_DELTA,
            "experts": _EXPERTS,
            "per_sample": {"attention": "self_attn", "ngram": "ple", "ngram_ids": "ple_input_ids"},
        },
        videos=run_per_frame,
        from_grids=_LEARNED,
    ),
    text_family("qwen3"),
    text_family("qwen3_next", mechanisms={"gated_delta": _GATED_DELTA, "experts": _EXPERTS}),
)
"""The descriptors."""
