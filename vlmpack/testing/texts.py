"""Settings of the text parts of tiny models that not every family has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlmpack.testing.models import TinySizes


def layer_types(sizes: TinySizes) -> list[str]:
    """Attention in every fourth layer, and in the last one, so that no model is without."""
    full = {*range(3, sizes.layers, 4), sizes.layers - 1}
    return ["full_attention" if i in full else "linear_attention" for i in range(sizes.layers)]


def qwen4_text(sizes: TinySizes) -> dict[str, Any]:
    """Sparse blocks so small and few that samples of a few tokens have to choose; n-grams with few, small tables."""
    return {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": sizes.head_width,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ple_layer_ids": [i for i, kind in enumerate(layer_types(sizes), start=1) if kind == "linear_attention"],
        "ngram_size": 3,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 97,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1,
        "hc_count": 2,
        "hc_lowrank": 8,
    }


WINDOW = 5
"""Sliding windows so short that samples of a few tokens are longer."""


def windows(sizes: TinySizes) -> dict[str, Any]:
    """A window in every other layer, from the first on."""
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(sizes.layers)]
    return {"sliding_window": WINDOW, "layer_types": kinds}


def gemma2_text(sizes: TinySizes) -> dict[str, Any]:
    """Softcaps so low that scores and logits of order 1 reach them."""
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    return {**windows(sizes), **caps, "query_pre_attn_scalar": sizes.head_width}


def two_ropes(sizes: TinySizes) -> dict[str, Any]:
    """Other frequencies in layers with a window."""
    thetas = {"sliding_attention": 100.0, "full_attention": 10000.0}
    rope = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()}
    return {**windows(sizes), "rope_parameters": rope}


def gemma3_text(sizes: TinySizes) -> dict[str, Any]:
    return {**two_ropes(sizes), "query_pre_attn_scalar": sizes.head_width}


def granite_text(sizes: TinySizes) -> dict[str, Any]:
    return {
        "logits_scaling": 3.0,
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.7,
        "attention_multiplier": sizes.head_width**-0.5,
    }


def cohere2_text(sizes: TinySizes) -> dict[str, Any]:
    return {**windows(sizes), "logit_scale": 0.25}


def routed(sizes: TinySizes) -> dict[str, Any]:
    """Experts in two groups, if they can be halved, of which a token chooses one."""
    groups = {"n_group": 1 if sizes.experts % 2 else 2, "topk_group": 1, "n_shared_experts": 1}
    return {"n_routed_experts": sizes.experts, "first_k_dense_replace": 0, **groups}


def deepseek_text(sizes: TinySizes) -> dict[str, Any]:
    """Multi-head latent attention, with values narrower than keys."""
    half = sizes.head_width // 2
    return {
        **routed(sizes),
        "num_key_value_heads": sizes.heads,
        "kv_lora_rank": sizes.head_width,
        "q_lora_rank": sizes.hidden // 2,
        "qk_rope_head_dim": 2 * (half // 2),
        "qk_nope_head_dim": half,
        "v_head_dim": half + 4,
    }


def deepseek_ocr2_text(sizes: TinySizes) -> dict[str, Any]:
    shared = {"n_routed_experts": sizes.experts, "n_shared_experts": 1}
    return {**shared, "mlp_layer_types": ["sparse"] * sizes.layers}


def ernie_text(sizes: TinySizes) -> dict[str, Any]:
    """Experts of text wider than those of images, with shared ones; a dense first layer before two or more others."""
    dense, third = int(sizes.layers > 2), sizes.head_width // 6
    sections = [third, third, sizes.head_width // 2 - 2 * third]
    return {
        "moe_num_experts": sizes.experts,
        "moe_k": sizes.experts_per_token,
        "moe_intermediate_size": [32, 16],
        "moe_num_shared_experts": 1,
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (sizes.layers - dense),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections},
    }


def lfm2_text(sizes: TinySizes) -> dict[str, Any]:
    """Attention in every fourth layer and the last one, short convolutions in the others."""
    kinds = ["conv" if kind == "linear_attention" else kind for kind in layer_types(sizes)]
    return {"layer_types": kinds, "block_auto_adjust_ff_dim": False}


def lfm2_moe_text(sizes: TinySizes) -> dict[str, Any]:
    return {**lfm2_text(sizes), "num_dense_layers": 0}


def gpt_oss_text(sizes: TinySizes) -> dict[str, Any]:
    return {**windows(sizes), "num_local_experts": sizes.experts}


def gemma4_unified_text(sizes: TinySizes) -> dict[str, Any]:
    """Wider heads without a window; keys that are values; from 4 layers on the last two share keys and values of those
    before."""
    windows, half = gemma3_text(sizes), {"partial_rotary_factor": 0.5, "rope_type": "proportional"}
    windows["rope_parameters"]["full_attention"] |= half
    windows["layer_types"][-1] = "full_attention"
    return {
        **windows,
        "final_logit_softcapping": 3.0,
        "use_bidirectional_attention": "vision",
        "global_head_dim": 2 * sizes.head_width,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 2 if sizes.layers > 3 else 0,
    }


def gemma4_text(sizes: TinySizes) -> dict[str, Any]:
    """All that its models have, in one: experts and embeddings for each layer beside what the unified one has."""
    return {
        **gemma4_unified_text(sizes),
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": sizes.vocab_size,
        "enable_moe_block": True,
        "top_k_experts": sizes.experts_per_token,
    }


CHUNK = 7
"""Chunks so short that samples of a few tokens have several."""


def llama4_text(sizes: TinySizes) -> dict[str, Any]:
    """Chunks and rotary positions in every other layer, from the first on; in the others queries are scaled from the
    third token on. Experts in all."""
    rotary = [1 - i % 2 for i in range(sizes.layers)]
    return {
        "attention_chunk_size": CHUNK,
        "no_rope_layers": rotary if sizes.layers > 1 else [1],
        "layer_types": ["chunked_attention" if here else "full_attention" for here in rotary],
        "num_local_experts": sizes.experts,
        "num_experts_per_tok": sizes.experts_per_token,
        "intermediate_size_mlp": 2 * sizes.hidden,
        "floor_scale": 3,
        "attn_scale": 0.7,
    }


def glm_moe_text(sizes: TinySizes) -> dict[str, Any]:
    """Half of a head rotates."""
    quarter = sizes.head_width // 4
    sections = [quarter - 2 * (quarter // 3), quarter // 3, quarter // 3]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": sections}
    return {**routed(sizes), "rope_parameters": rope}
