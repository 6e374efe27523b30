"""The configurations of tiny models: real ones of transformers, with small sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

MEDIA_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


@final
@dataclass(frozen=True, kw_only=True)
class TinySizes:
    """The sizes of a tiny model. Lengths are in tokens or pixels, everything else in channels or counts."""

    hidden: int = 64
    """Width of the text model."""
    layers: int = 2
    """Layers of the text model; in hybrid ones every fourth and the last have attention."""
    heads: int = 4
    """Query heads of the text model."""
    kv_heads: int = 2
    """Key and value heads of the text model."""
    head_dim: int | None = None
    """Width of one head of the text model; None: `hidden // heads`. Qwen2-VL and Qwen2.5-VL know no other value."""
    intermediate: int | None = None
    """Width of the text model's MLP; None: twice `hidden`."""
    experts: int = 8
    """Experts of each layer, in families that have experts."""
    experts_per_token: int = 2
    """Experts that each token is sent to."""
    vision_hidden: int = 32
    """Width of the vision tower."""
    vision_depth: int = 2
    """Blocks of the vision tower."""
    vision_heads: int = 2
    """Heads of the vision tower."""
    patch_size: int | None = None
    """Side of a patch in pixels; None: the family's own, 14 (16 from Qwen3-VL on)."""
    merge: int = 2
    """Patches merged into one token along each side."""
    temporal_patch_size: int = 2
    """Video frames in one patch."""
    max_positions: int = 32768
    """Longest position the text model is declared for."""
    vocab_size: int = 131
    """Token ids, specials included."""
    pad_token_id: int = 0
    """Id of the padding token."""
    eos_token_id: int = 1
    """Id of the end-of-turn token."""
    vision_start_token_id: int = 2
    """Id of the token before an image or a video."""
    vision_end_token_id: int = 3
    """Id of the token after an image or a video."""
    image_token_id: int = 4
    """Id of the placeholder of an image token."""
    video_token_id: int = 5
    """Id of the placeholder of a video token."""


def head_dim(sizes: TinySizes) -> int:
    """Width of one head of the text model."""
    return sizes.head_dim or sizes.hidden // sizes.heads


def is_hybrid(family: str) -> bool:
    """Whether three of four layers are gated delta layers."""
    return family.startswith(("qwen3_5", "qwen3_next", "qwen4"))


def rotary_dim(sizes: TinySizes, family: str) -> int:
    """Channels of a head that rotate: half of them in hybrid models (the released ones rotate a quarter of 256)."""
    return head_dim(sizes) // 2 if is_hybrid(family) else head_dim(sizes)


def _text(sizes: TinySizes, **rope: Any) -> dict[str, Any]:
    """The text model's settings that all families share."""
    return {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate or 2 * sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "max_position_embeddings": sizes.max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **rope},
        "bos_token_id": None,
        "eos_token_id": sizes.eos_token_id,
        "pad_token_id": sizes.pad_token_id,
    }


def _mrope(rotary: int) -> dict[str, Any]:
    """Height and width get a third of the frequencies each, time the rest."""
    axis = rotary // 2 // 3
    return {"mrope_section": [rotary // 2 - 2 * axis, axis, axis]}


def _vision(sizes: TinySizes) -> dict[str, Any]:
    """The vision tower's settings that all families share."""
    return {
        "depth": sizes.vision_depth,
        "num_heads": sizes.vision_heads,
        "in_channels": 3,
        "patch_size": sizes.patch_size,
        "spatial_merge_size": sizes.merge,
        "temporal_patch_size": sizes.temporal_patch_size,
    }


def _tokens(sizes: TinySizes) -> dict[str, Any]:
    return {name: vars(sizes)[name] for name in MEDIA_TOKENS}


def _qwen2_vl(sizes: TinySizes) -> Any:
    from transformers import Qwen2VLConfig

    vision = {**_vision(sizes), "embed_dim": sizes.vision_hidden, "hidden_size": sizes.hidden, "mlp_ratio": 2}
    return Qwen2VLConfig(text_config=_qwen2_text(sizes), vision_config=vision, **_tokens(sizes))


def _qwen2_5_vl(sizes: TinySizes) -> Any:
    from transformers import Qwen2_5_VLConfig

    assert sizes.patch_size is not None
    vision = {
        **_vision(sizes),
        "hidden_size": sizes.vision_hidden,
        "intermediate_size": 2 * sizes.vision_hidden,
        "out_hidden_size": sizes.hidden,
        # windows of 4 x 4 tokens as in the released models; the last block sees whole images
        "window_size": 4 * sizes.merge * sizes.patch_size,
        "fullatt_block_indexes": [sizes.vision_depth - 1],
        "tokens_per_second": 2,
    }
    return Qwen2_5_VLConfig(text_config=_qwen2_text(sizes), vision_config=vision, **_tokens(sizes))


def _qwen2_text(sizes: TinySizes) -> dict[str, Any]:
    return _text(sizes, **_mrope(head_dim(sizes)))


def _qwen3_vl(sizes: TinySizes) -> Any:
    from transformers import Qwen3VLConfig

    return Qwen3VLConfig(text_config=_qwen3_text(sizes), vision_config=_deepstack_vision(sizes), **_tokens(sizes))


def _qwen3_vl_moe(sizes: TinySizes) -> Any:
    from transformers import Qwen3VLMoeConfig

    text = {**_qwen3_text(sizes), **_experts(sizes)}
    return Qwen3VLMoeConfig(text_config=text, vision_config=_deepstack_vision(sizes), **_tokens(sizes))


def _qwen3_5(sizes: TinySizes) -> Any:
    from transformers import Qwen3_5Config

    return Qwen3_5Config(text_config=_qwen3_5_text(sizes), vision_config=_qwen3_vision(sizes), **_tokens(sizes))


def _qwen3_5_moe(sizes: TinySizes) -> Any:
    from transformers import Qwen3_5MoeConfig

    text = {**_qwen3_5_text(sizes), **_experts(sizes), **_shared_expert(sizes)}
    del text["intermediate_size"]  # every layer has experts
    return Qwen3_5MoeConfig(text_config=text, vision_config=_qwen3_vision(sizes), **_tokens(sizes))


def _qwen4_exp(sizes: TinySizes) -> Any:
    from transformers import Qwen4ExpConfig

    text = {**_qwen3_5_text(sizes), **_experts(sizes), **_shared_expert(sizes), **_sparse(sizes), **_ngrams(sizes)}
    del text["intermediate_size"]  # every layer has experts
    return Qwen4ExpConfig(
        text_config={**text, "hc_count": 2, "hc_lowrank": 8}, vision_config=_qwen3_vision(sizes), **_tokens(sizes)
    )


def _qwen3(sizes: TinySizes) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**_text(sizes), head_dim=head_dim(sizes))


def _qwen3_next(sizes: TinySizes) -> Any:
    from transformers import Qwen3NextConfig

    hybrid = {**_text(sizes, partial_rotary_factor=0.5), **_hybrid(sizes)}
    return Qwen3NextConfig(**hybrid, **_experts(sizes), **_shared_expert(sizes))


def _qwen3_text(sizes: TinySizes) -> dict[str, Any]:
    rope = _mrope(head_dim(sizes))
    return {**_text(sizes, mrope_interleaved=True, **rope), "head_dim": head_dim(sizes)}


def _qwen3_5_text(sizes: TinySizes) -> dict[str, Any]:
    rope = _mrope(rotary_dim(sizes, "qwen3_5"))
    return {**_text(sizes, mrope_interleaved=True, partial_rotary_factor=0.5, **rope), **_hybrid(sizes)}


def _hybrid(sizes: TinySizes) -> dict[str, Any]:
    """Every fourth layer has attention, and the last one, so that no model is without; value heads share key heads."""
    full = {*range(3, sizes.layers, 4), sizes.layers - 1}
    return {
        "head_dim": head_dim(sizes),
        "layer_types": ["full_attention" if i in full else "linear_attention" for i in range(sizes.layers)],
        "linear_num_key_heads": sizes.kv_heads,
        "linear_num_value_heads": sizes.heads,
        "linear_key_head_dim": head_dim(sizes),
        "linear_value_head_dim": head_dim(sizes),
    }


def _sparse(sizes: TinySizes) -> dict[str, Any]:
    """Blocks so small and so few that samples of a few tokens already have to choose."""
    return {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": head_dim(sizes),
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    }


def _ngrams(sizes: TinySizes) -> dict[str, Any]:
    """An n-gram layer in every gated delta layer; each n-gram has few hashes, in a small table."""
    linear = [i + 1 for i, kind in enumerate(_hybrid(sizes)["layer_types"]) if kind == "linear_attention"]
    return {
        "ple_layer_ids": linear,
        "ngram_size": 3,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 97,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1,
    }


def _experts(sizes: TinySizes) -> dict[str, Any]:
    return {"num_experts": sizes.experts, "num_experts_per_tok": sizes.experts_per_token, "moe_intermediate_size": 32}


def _shared_expert(sizes: TinySizes) -> dict[str, Any]:
    return {"shared_expert_intermediate_size": 32}


def _qwen3_vision(sizes: TinySizes) -> dict[str, Any]:
    return {
        **_vision(sizes),
        "hidden_size": sizes.vision_hidden,
        "intermediate_size": 2 * sizes.vision_hidden,
        "out_hidden_size": sizes.hidden,
        "num_position_embeddings": 64,
    }


def _deepstack_vision(sizes: TinySizes) -> dict[str, Any]:
    """One text layer for each: deepstack features are added to the first layers' outputs."""
    return {**_qwen3_vision(sizes), "deepstack_visual_indexes": list(range(min(sizes.vision_depth, sizes.layers)))[:3]}


CONFIGS: dict[str, Callable[[TinySizes], Any]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "qwen4_exp": _qwen4_exp,
    "qwen3": _qwen3,
    "qwen3_next": _qwen3_next,
}
"""By `config.model_type`."""
