"""Families of text models beside Qwen's, one descriptor each: how the model makes logits of its head's output, and the
mechanisms of its layers. Windows, softcaps and sinks are read off what layers pass to their attention."""

from __future__ import annotations

from vlmpack.families.family import capped_logits, divided_logits, multiplied_logits, text_family

_EXPERTS = {"experts": {"layer": "mlp", "router": "gate"}}

TEXT = (
    text_family("llama", "LlamaForCausalLM"),
    text_family("mistral", "MistralForCausalLM"),
    text_family("qwen2", "Qwen2ForCausalLM"),
    text_family("qwen3_moe", "Qwen3MoeForCausalLM", mechanisms=_EXPERTS),
    text_family("gemma2", "Gemma2ForCausalLM", logits=capped_logits),
    text_family("gemma3_text", "Gemma3ForCausalLM", logits=capped_logits),
    text_family("phi3", "Phi3ForCausalLM"),
    text_family("olmo3", "Olmo3ForCausalLM"),
    text_family("granite", "GraniteForCausalLM", logits=divided_logits),
    text_family("cohere2", "Cohere2ForCausalLM", logits=multiplied_logits),
    text_family("smollm3", "SmolLM3ForCausalLM"),
    text_family("glm4_moe", "Glm4MoeForCausalLM", mechanisms=_EXPERTS),
    text_family("deepseek_v3", "DeepseekV3ForCausalLM", mechanisms=_EXPERTS),
    text_family("gpt_oss", "GptOssForCausalLM", mechanisms={"experts": {"layer": "mlp", "router": "router"}}),
)
"""The descriptors."""
