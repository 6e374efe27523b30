"""The Qwen families, one descriptor each.

qwen2_vl      a video is one run of tokens; frames are 1 position apart
qwen2_5_vl    a video is one run of tokens; the distance of frames is proportional to time
others        every frame is a run of tokens, like an image
"""

from __future__ import annotations

from typing import Any

from vlmpack.families.family import Family
from vlmpack.families.text import text_family
from vlmpack.families.videos import run_per_frame, timed_run

_GATED_DELTA = {"layer": "linear_attn"}
_EXPERTS = {"layer": "mlp"}

_QWEN3: dict[str, Any] = {"videos": run_per_frame}

QWEN = (
    Family(model_type="qwen2_vl"),
    Family(model_type="qwen2_5_vl", videos=timed_run),
    Family(model_type="qwen3_vl", **_QWEN3),
    Family(model_type="qwen3_vl_moe", mechanisms={"experts": _EXPERTS}, **_QWEN3),
    Family(model_type="qwen3_5", mechanisms={"gated_delta": _GATED_DELTA}, **_QWEN3),
    Family(model_type="qwen3_5_moe", mechanisms={"gated_delta": _GATED_DELTA, "experts": _EXPERTS}, **_QWEN3),
    Family(
        model_type="qwen4_exp",
        mechanisms={
            "gated_delta": _GATED_DELTA,
            "experts": _EXPERTS,
            "per_sample": {"attention": "self_attn", "ngram": "ple"},
        },
        **_QWEN3,
    ),
    text_family("qwen3"),
    text_family("qwen3_5_text", mechanisms={"gated_delta": _GATED_DELTA}, text_type="qwen3_5"),
    text_family(
        "qwen3_5_moe_text", mechanisms={"gated_delta": _GATED_DELTA, "experts": _EXPERTS}, text_type="qwen3_5_moe"
    ),
    text_family("qwen3_next", mechanisms={"gated_delta": _GATED_DELTA, "experts": _EXPERTS}),
)
"""The descriptors."""
