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
        model_class="Qwen2VLForConditionalGeneration",
        processor="Qwen2VLProcessor",
        patch_size=14,
        from_grids=(ROTARY, BOUNDARIES),
    ),
    Family(
        model_type="qwen2_5_vl",
        model_class="Qwen2_5_VLForConditionalGeneration",
        videos=timed_run,
        processor="Qwen2_5_VLProcessor",
        patch_size=14,
        vision_windows=True,
        from_grids=(ROTARY, BOUNDARIES, WINDOWS),
    ),
    Family(
        model_type="qwen3_vl",
        model_class="Qwen3VLForConditionalGeneration",
        videos=run_per_frame,
        from_grids=_LEARNED,
    ),
    Family(
        model_type="qwen3_vl_moe",
        model_class="Qwen3VLMoeForConditionalGeneration",
        mechanisms={"experts": _EXPERTS},
        videos=run_per_frame,
        from_grids=_LEARNED,
    ),
    Family(
        model_type="qwen3_5",
        model_class="Qwen3_5ForConditionalGeneration",
        mechanisms={"gated_delta": _GATED_DELTA},
        videos=run_per_frame,
        from_grids=_LEARNED,
    ),
    Family(
        model_type="qwen3_5_moe",
        model_class="Qwen3_5MoeForConditionalGeneration",
        mechanisms={"gated_delta": _GATED_DELTA, "experts": _EXPERTS},
        videos=run_per_frame,
        from_grids=_LEARNED,
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
        from_grids=_LEARNED,
    ),
    text_family("qwen3", "Qwen3ForCausalLM"),
    text_family("qwen3_next", "Qwen3NextForCausalLM", mechanisms={"gated_delta": _GATED_DELTA, "experts": _EXPERTS}),
)
"""The descriptors."""
