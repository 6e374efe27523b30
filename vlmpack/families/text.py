"""Families of text models, one descriptor each: the function after the head, and the mechanisms of the layers.

Sliding windows, softcaps and sinks are not in the descriptors. They are read from the arguments that each layer passes
to its attention function, and windows are compared with the masks of the model's own code. Qwen3 and Qwen3-Next are in
`qwen.py`, and Llama 4 in `llama.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from vlmpack.families.family import Family, Rotary

# ---------------------------------------------------------------------- from the head's output to logits


def capped_logits(output: torch.Tensor, text_config: Any) -> torch.Tensor:
    """Softcap logits with `final_logit_softcapping`, unless it is None."""
    cap = text_config.final_logit_softcapping
    return output if cap is None else torch.tanh(output / cap) * cap


def multiplied_logits(output: torch.Tensor, text_config: Any) -> torch.Tensor:
    """Multiply logits by `logit_scale`."""
    return output * text_config.logit_scale


def divided_logits(output: torch.Tensor, text_config: Any) -> torch.Tensor:
    """Divide logits by `logits_scaling`."""
    return output / text_config.logits_scaling


# ---------------------------------------------------------------------- the families


def text_family(model_type: str, **settings: Any) -> Family:
    """Describe a family of text models: no processor, no vision, no media."""
    text: dict[str, Any] = {"text_path": "model", "vision_path": None, "media": {}}
    text |= {"positions_rule": Rotary(axes=1), "token_types": None}
    return Family(model_type=model_type, **text, **settings)


_EXPERTS = {"experts": {"layer": "mlp", "router": "gate"}}

TEXT = (
    text_family("llama"),
    text_family("mistral"),
    text_family("mixtral", mechanisms=_EXPERTS),
    text_family("qwen2"),
    text_family("qwen3_moe", mechanisms=_EXPERTS),
    text_family("gemma2", logits=capped_logits),
    text_family("gemma3_text", logits=capped_logits),
    text_family("gemma4_text", logits=capped_logits, text_type="gemma4"),
    text_family("phi3"),
    text_family("olmo2"),
    text_family("olmo3"),
    text_family("granite", logits=divided_logits),
    text_family("cohere2", logits=multiplied_logits),
    text_family("smollm3"),
    text_family("glm4"),
    text_family("glm4_moe", mechanisms=_EXPERTS),
    text_family("glm4_moe_lite", mechanisms=_EXPERTS),
    text_family("deepseek_v3", mechanisms=_EXPERTS),
    text_family("lfm2", mechanisms={"short_conv": {"layer": "conv"}}, oldest_transformers=(5, 23)),
    text_family(
        "lfm2_moe",
        mechanisms={"short_conv": {"layer": "conv"}, "experts": {"layer": "feed_forward", "router": "gate"}},
        oldest_transformers=(5, 23),
    ),
    text_family("gpt_oss", mechanisms={"experts": {"layer": "mlp", "router": "router"}}),
)
"""The descriptors."""
