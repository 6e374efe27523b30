"""Recipes of tiny models, by family: settings of text models, vision and audio towers, and projectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from vlmpack.testing.models import TinySizes

MEL_BINS = 6
"""Number of log-mel bins of tiny models."""
MEDIA_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
AUDIO_TOKENS = ("audio_token_id", "audio_start_token_id", "audio_end_token_id")
"""Settings with the ids of placeholders and of the tokens around media."""


# ---------------------------------------------------------------------- text


def layer_types(sizes: TinySizes) -> list[str]:
    """Attention in every fourth layer, and in the last one, so that every model has some."""
    full = {*range(3, sizes.layers, 4), sizes.layers - 1}
    return ["full_attention" if i in full else "linear_attention" for i in range(sizes.layers)]


def qwen4_text(sizes: TinySizes) -> dict[str, Any]:
    """Sparse blocks so small and few that even short samples have to choose some; n-grams with few, small tables."""
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
"""Sliding window, shorter than samples of a few tokens."""


def windows(sizes: TinySizes) -> dict[str, Any]:
    """A sliding window in every other layer, starting with the first."""
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(sizes.layers)]
    return {"sliding_window": WINDOW, "layer_types": kinds}


def gemma2_text(sizes: TinySizes) -> dict[str, Any]:
    """Softcaps so low that they affect scores and logits of order 1."""
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    return {**windows(sizes), **caps, "query_pre_attn_scalar": sizes.head_width}


def two_ropes(sizes: TinySizes) -> dict[str, Any]:
    """Different rotary frequencies in layers with a window."""
    thetas = {"sliding_attention": 100.0, "full_attention": 10000.0}
    rope = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()}
    return {**windows(sizes), "rope_parameters": rope}


def gemma3_text(sizes: TinySizes) -> dict[str, Any]:
    return {**two_ropes(sizes), "query_pre_attn_scalar": sizes.head_width}


def granite_text(sizes: TinySizes) -> dict[str, Any]:
    multipliers = {"embedding": 1.5, "residual": 0.7, "attention": sizes.head_width**-0.5}
    return {"logits_scaling": 3.0} | {f"{name}_multiplier": value for name, value in multipliers.items()}


def cohere2_text(sizes: TinySizes) -> dict[str, Any]:
    return {**windows(sizes), "logit_scale": 0.25}


def routed(sizes: TinySizes) -> dict[str, Any]:
    """Experts in two groups (one if their number is odd); each token chooses one group."""
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
    return {"n_routed_experts": sizes.experts, "n_shared_experts": 1, "mlp_layer_types": ["sparse"] * sizes.layers}


def ernie_text(sizes: TinySizes) -> dict[str, Any]:
    """Text experts wider than image experts, plus a shared expert; the first of three or more layers is dense."""
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
    """Attention in every fourth layer and in the last one, short convolutions in the others."""
    kinds = ["conv" if kind == "linear_attention" else kind for kind in layer_types(sizes)]
    return {"layer_types": kinds, "block_auto_adjust_ff_dim": False}


def lfm2_moe_text(sizes: TinySizes) -> dict[str, Any]:
    return {**lfm2_text(sizes), "num_dense_layers": 0}


def gpt_oss_text(sizes: TinySizes) -> dict[str, Any]:
    return {**windows(sizes), "num_local_experts": sizes.experts}


def gemma4_unified_text(sizes: TinySizes) -> dict[str, Any]:
    """Wider heads in layers without a window; keys used as values; with 4 or more layers, the last two share keys and
    values of earlier layers."""
    windows, half = gemma3_text(sizes), {"partial_rotary_factor": 0.5, "rope_type": "proportional"}
    windows["rope_parameters"]["full_attention"] |= half
    windows["layer_types"][-1] = "full_attention"
    return {
        **windows,
        "final_logit_softcapping": 3.0,
        "use_bidirectional_attention": "vision",
        "global_head_dim": 2 * sizes.head_width,
        "num_global_key_value_heads": max(1, sizes.kv_heads // 2),
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 2 if sizes.layers > 3 else 0,
    }


def gemma4_text(sizes: TinySizes) -> dict[str, Any]:
    """All features of Gemma 4 models in one: those of the unified model, plus experts and per-layer embeddings."""
    return {
        **gemma4_unified_text(sizes),
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": sizes.vocab_size,
        "enable_moe_block": True,
        "top_k_experts": sizes.experts_per_token,
    }


CHUNK = 7
"""Chunk length, so short that samples of a few tokens have several chunks."""


def llama4_text(sizes: TinySizes) -> dict[str, Any]:
    """Chunks and rotary positions in every other layer, starting with the first; in the others, queries are scaled from
    the third token on. All layers have experts."""
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
    """Half of the channels of a head rotate."""
    quarter = sizes.head_width // 4
    sections = [quarter - 2 * (quarter // 3), quarter // 3, quarter // 3]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": sections}
    return {**routed(sizes), "rope_parameters": rope}


# ---------------------------------------------------------------------- images as patches with a grid


def patch_blocks(sizes: TinySizes) -> dict[str, Any]:
    """Sizes of a tower whose images are patches with one grid per image."""
    assert sizes.patch_size is not None
    return {
        "depth": sizes.vision_depth,
        "num_heads": sizes.vision_heads,
        "in_channels": 3,
        "patch_size": sizes.patch_size,
        "spatial_merge_size": sizes.merge,
        "temporal_patch_size": sizes.temporal_patch_size,
    }


def qwen2_vision(sizes: TinySizes) -> dict[str, Any]:
    return {"embed_dim": sizes.vision_hidden, "hidden_size": sizes.hidden, "mlp_ratio": 2}


def vision_settings(sizes: TinySizes) -> dict[str, Any]:
    return {
        "hidden_size": sizes.vision_hidden,
        "intermediate_size": 2 * sizes.vision_hidden,
        "out_hidden_size": sizes.hidden,
    }


def windowed_vision(sizes: TinySizes) -> dict[str, Any]:
    """Windows of 4 x 4 tokens, as in the released models; the last block attends to whole images."""
    assert sizes.patch_size is not None
    return {
        **vision_settings(sizes),
        "window_size": 4 * sizes.merge * sizes.patch_size,
        "fullatt_block_indexes": [sizes.vision_depth - 1],
        "tokens_per_second": 2,
    }


def qwen3_vision(sizes: TinySizes) -> dict[str, Any]:
    return {**vision_settings(sizes), "num_position_embeddings": 64}


def deepstack_vision(sizes: TinySizes) -> dict[str, Any]:
    """Deepstack features, at most one for each text layer; they are added to the first layers' outputs."""
    deepstack = list(range(min(sizes.vision_depth, sizes.layers)))[:3]
    return {**qwen3_vision(sizes), "deepstack_visual_indexes": deepstack}


# ---------------------------------------------------------------------- images as rows of a batch, and tiles

TILE_PATCHES = 4
"""Patches along each side of a tile."""


def tile_tower(sizes: TinySizes) -> dict[str, Any]:
    assert sizes.patch_size is not None
    return {
        "hidden_size": sizes.vision_hidden,
        "intermediate_size": 2 * sizes.vision_hidden,
        "num_hidden_layers": sizes.vision_depth,
        "num_attention_heads": sizes.vision_heads,
        "patch_size": sizes.patch_size,
        "image_size": TILE_PATCHES * sizes.patch_size,
    }


def internvl_tower(sizes: TinySizes) -> dict[str, Any]:
    tower = tile_tower(sizes)
    return {**tower, "patch_size": [tower["patch_size"]] * 2, "image_size": [tower["image_size"]] * 2}


def internvl_settings(sizes: TinySizes) -> dict[str, Any]:
    return {"image_seq_length": TILE_PATCHES**2 // 4}  # pixel shuffle merges 2 x 2 patches


def clip_tower(sizes: TinySizes) -> dict[str, Any]:
    return {**tile_tower(sizes), "model_type": "clip_vision_model", "projection_dim": sizes.vision_hidden}


def siglip_tower(sizes: TinySizes) -> dict[str, Any]:
    return {**tile_tower(sizes), "model_type": "siglip_vision_model", "vision_use_head": False}


def pixtral_tower(sizes: TinySizes) -> dict[str, Any]:
    """Images of any shape, at most four tiles along each side."""
    tower = {**tile_tower(sizes), "model_type": "pixtral", "head_dim": sizes.vision_hidden // sizes.vision_heads}
    return {**tower, "image_size": 4 * tower["image_size"]}


def llava_settings(sizes: TinySizes) -> dict[str, Any]:
    return {"image_token_index": sizes.image_token_id, "vision_feature_layer": -1}


def anyres_settings(sizes: TinySizes) -> dict[str, Any]:
    side = tile_tower(sizes)["image_size"]
    grids = [[rows * side, columns * side] for rows, columns in ((1, 2), (2, 1), (2, 2), (1, 3), (3, 1))]
    return {**llava_settings(sizes), "video_token_index": sizes.video_token_id, "image_grid_pinpoints": grids}


def glm_vision(sizes: TinySizes) -> dict[str, Any]:
    side = 4 * sizes.merge * (sizes.patch_size or 1)
    return {**patch_blocks(sizes), **vision_settings(sizes), "image_size": side}


def paddle_vision(sizes: TinySizes) -> dict[str, Any]:
    return {**tile_tower(sizes), "spatial_merge_size": sizes.merge}


def ernie_vision(sizes: TinySizes) -> dict[str, Any]:
    others = ("in_channels", "temporal_patch_size", "out_hidden_size")
    settings = {**patch_blocks(sizes), **vision_settings(sizes)}
    return {name: value for name, value in settings.items() if name not in others}


def video_ends(sizes: TinySizes) -> dict[str, Any]:
    """Tokens that start and end a video: the last two ids of the vocabulary."""
    return {"video_start_token_id": sizes.vocab_size - 2, "video_end_token_id": sizes.vocab_size - 1}


def ernie_settings(sizes: TinySizes) -> dict[str, Any]:
    image = {"image_start_token_id": sizes.vision_start_token_id, "image_end_token_id": sizes.vision_end_token_id}
    return image | video_ends(sizes)


def kimi_vision(sizes: TinySizes) -> dict[str, Any]:
    """Position embeddings for 4 x 4 patches, which are interpolated to the shape of each image."""
    places = {"pos_emb_height": TILE_PATCHES, "pos_emb_width": TILE_PATCHES}
    return {**tile_tower(sizes), **places, "merge_kernel_size": [sizes.merge] * 2}


def kimi_settings(sizes: TinySizes) -> dict[str, Any]:
    return {"projection_hidden_size": sizes.vision_hidden, "tie_word_embeddings": False}


def minicpm_tower(sizes: TinySizes) -> dict[str, Any]:
    return {**tile_tower(sizes), "insert_layer_id": 0}


def siglip2_tower(sizes: TinySizes) -> dict[str, Any]:
    """Position embeddings for 4 x 4 patches, which are interpolated to the shape of each image."""
    tower = {**tile_tower(sizes), "model_type": "siglip2_vision_model", "vision_use_head": False}
    return {**tower, "num_patches": TILE_PATCHES**2}


def deepseek_ocr2_tower(sizes: TinySizes) -> dict[str, Any]:
    """Whole images of two tiles a side, windows in all blocks but the last, and an encoder of the same depth, with 144
    queries per view.

    Two convolutions halve a tile. If tiles were smaller, the second one would get a single feature, and on a CPU in
    bfloat16 PyTorch leaves the gradient of such a convolution unwritten.
    """
    tower = tile_tower(sizes)
    tower["image_size"] *= 2
    shared = {"num_hidden_layers": sizes.vision_depth, "num_attention_heads": sizes.vision_heads}
    blocks = {"window_size": TILE_PATCHES - 1, "global_attn_indexes": [sizes.vision_depth - 1]}
    widths = {"output_channels": sizes.vision_hidden, "downsample_channels": [sizes.vision_hidden] * 2}
    encoder = {"num_key_value_heads": sizes.vision_heads, "intermediate_size": tower["intermediate_size"]}
    return {
        "sam_config": {**tower, **blocks, **widths, "mlp_dim": tower["intermediate_size"]},
        "encoder_config": {**shared, **encoder, "hidden_size": sizes.vision_hidden, "vocab_size": 1},
    }


def lfm2_settings(sizes: TinySizes) -> dict[str, Any]:
    return {"downsample_factor": sizes.merge, "projector_hidden_size": 2 * sizes.vision_hidden}


def llama4_tower(sizes: TinySizes) -> dict[str, Any]:
    """Pixel shuffle of 2 x 2 patches, then two projections."""
    width = 2 * sizes.vision_hidden
    tower = {**tile_tower(sizes), "intermediate_size": 4 * sizes.vision_hidden}
    return {**tower, "vision_output_dim": width, "projector_input_dim": width, "projector_output_dim": width}


def image_indices(sizes: TinySizes) -> dict[str, Any]:
    ends = {"boi_token_index": sizes.vision_start_token_id, "eoi_token_index": sizes.vision_end_token_id}
    return {"image_token_index": sizes.image_token_id, **ends}


def gemma3_tower(sizes: TinySizes) -> dict[str, Any]:
    tower = tile_tower(sizes)
    return {**tower, "image_size": 6 * tower["patch_size"]}


def gemma3_settings(sizes: TinySizes) -> dict[str, Any]:
    """Images with more tokens than the window: 6 x 6 patches, pooled 2 x 2."""
    return {"mm_tokens_per_image": 9, **image_indices(sizes)}


def paligemma_tower(sizes: TinySizes) -> dict[str, Any]:
    return {**siglip_tower(sizes), "projection_dim": sizes.hidden}


def paligemma_settings(sizes: TinySizes) -> dict[str, Any]:
    widths = {"projection_dim": sizes.hidden, "hidden_size": sizes.hidden, "vocab_size": sizes.vocab_size}
    return {"image_token_index": sizes.image_token_id, **widths}


def gemma4_tower(sizes: TinySizes) -> dict[str, Any]:
    heads = {"num_attention_heads": sizes.vision_heads, "num_key_value_heads": sizes.vision_heads}
    return {
        **tile_tower(sizes),
        **heads,
        "head_dim": sizes.vision_hidden // sizes.vision_heads,
        "pooling_kernel_size": 2,
        "position_embedding_size": 64,
    }


def merged_patches(sizes: TinySizes) -> dict[str, Any]:
    """No tower: merged patches (2 x 2) are embedded directly."""
    widths = {"mm_embed_dim": sizes.vision_hidden, "output_proj_dims": sizes.vision_hidden}
    return {**widths, "patch_size": sizes.patch_size, "pooling_kernel_size": 2, "mm_posemb_size": 64}


def gemma4_settings(sizes: TinySizes) -> dict[str, Any]:
    return {"boi_token_id": sizes.vision_start_token_id, "eoi_token_id": sizes.vision_end_token_id}


# ---------------------------------------------------------------------- audio


def omni_windowed_vision(sizes: TinySizes) -> dict[str, Any]:
    """Windows as in Qwen2.5-VL."""
    windows = {name: size for name, size in windowed_vision(sizes).items() if name != "tokens_per_second"}
    return {**patch_blocks(sizes), **windows}


def omni_deepstack_vision(sizes: TinySizes) -> dict[str, Any]:
    """Deepstack features of images, as in Qwen3-VL."""
    return {**patch_blocks(sizes), **deepstack_vision(sizes)}


def _audio(sizes: TinySizes) -> dict[str, Any]:
    return {
        "num_mel_bins": MEL_BINS,
        "encoder_layers": 2,
        "encoder_attention_heads": sizes.vision_heads,
        "encoder_ffn_dim": 2 * sizes.vision_hidden,
        "d_model": sizes.vision_hidden,
        "max_source_positions": 64,
        "output_dim": sizes.hidden,
    }


def pooled_audio(sizes: TinySizes) -> dict[str, Any]:
    """The audio tower of Qwen2.5-Omni: chunks of 8 frames, 2 tokens each."""
    return sizes.tokens(AUDIO_TOKENS) | {"audio_config": _audio(sizes) | {"n_window": 4}}


def convolved_audio(sizes: TinySizes) -> dict[str, Any]:
    """The audio tower of Qwen3-Omni: chunks of 100 frames, because transformers counts 13 tokens for each, and windows
    of two chunks."""
    tower = _audio(sizes) | {"n_window": 50, "n_window_infer": 200, "downsample_hidden_size": 4}
    return sizes.tokens(AUDIO_TOKENS) | {"audio_config": tower}


# ---------------------------------------------------------------------- the families


@final
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings from which a family's configuration is built."""

    vision: Callable[[TinySizes], dict[str, Any]] | None = None
    """Settings of the vision tower; None: a text model."""
    text_type: str | None = None
    """`model_type` of the text model, if the family takes any text model; None: the family's own."""
    mrope: bool = True
    """True if the text model of a family with vision has multimodal rotary positions."""
    whole: Callable[[TinySizes], dict[str, Any]] | None = None
    """Additional settings of the whole model; None: none, and the tower gets the sizes of `patch_blocks`, as in
    Qwen-VL."""
    since_qwen3: bool = True
    """True for heads of any width, interleaved MRoPE sections, and patches of 16 pixels."""
    hybrid: bool = False
    """True if three of four layers are gated delta layers."""
    experts: bool = False
    """True if layers have experts; in hybrid models, all tokens also share one expert."""
    dense: bool = True
    """True if the configuration has a dense MLP's width."""
    more: Callable[[TinySizes], dict[str, Any]] | None = None
    """Additional settings of the text model."""
    patch_size: int | None = None
    """Side of a patch in pixels; None: 16 if `since_qwen3`, else 14."""
    sdpa: bool = True
    """True if transformers has sdpa attention for the family; False: only eager."""


def nothing(sizes: TinySizes) -> dict[str, Any]:
    """No settings of the whole model; the tower's are complete, without the sizes of `patch_blocks`."""
    return {}


TILED: dict[str, Any] = {"mrope": False, "since_qwen3": False, "patch_size": 6}
"""Recipe settings shared by families whose images are tiles."""
GEMMA: dict[str, Any] = TILED | {"since_qwen3": True}
COHERE: dict[str, Any] = TILED | {"vision": siglip_tower, "text_type": "cohere2", "more": cohere2_text}
KIMI: dict[str, Any] = {"mrope": False, "since_qwen3": False}
GLM: dict[str, Any] = {"vision": glm_vision, "whole": video_ends, "since_qwen3": False}

RECIPES = {
    "qwen2_vl": Recipe(vision=qwen2_vision, since_qwen3=False),
    "qwen2_5_vl": Recipe(vision=windowed_vision, since_qwen3=False),
    "qwen3_vl": Recipe(vision=deepstack_vision),
    "qwen3_vl_moe": Recipe(vision=deepstack_vision, experts=True),
    "qwen3_5": Recipe(vision=qwen3_vision, hybrid=True),
    "qwen3_5_moe": Recipe(vision=qwen3_vision, hybrid=True, experts=True, dense=False),
    "qwen4_exp": Recipe(vision=qwen3_vision, hybrid=True, experts=True, dense=False, more=qwen4_text),
    "qwen2_5_omni_thinker": Recipe(vision=omni_windowed_vision, whole=pooled_audio, since_qwen3=False),
    "qwen3_omni_moe_thinker": Recipe(vision=omni_deepstack_vision, whole=convolved_audio, experts=True),
    "qwen3": Recipe(),
    "qwen3_next": Recipe(hybrid=True, experts=True),
    "glm4v": Recipe(**GLM),
    "glm46v": Recipe(text_type="glm4v_text", **GLM),
    "glm4v_moe": Recipe(experts=True, more=glm_moe_text, **GLM),
    "glm_ocr": Recipe(more=lambda sizes: {"head_dim": sizes.head_width}, **GLM),
    "paddleocr_vl": Recipe(
        vision=paddle_vision, since_qwen3=False, whole=nothing, more=lambda sizes: {"head_dim": sizes.head_width}
    ),
    "ernie4_5_vl_moe": Recipe(
        vision=ernie_vision, since_qwen3=False, experts=True, more=ernie_text, whole=ernie_settings
    ),
    "kimi_k25": Recipe(
        vision=kimi_vision, text_type="deepseek_v3", experts=True, more=deepseek_text, whole=kimi_settings, **KIMI
    ),
    "minicpmv4_6": Recipe(
        vision=minicpm_tower,
        text_type="qwen3_5_text",
        hybrid=True,
        whole=lambda _: {"insert_layer_id": 0},
        patch_size=6,
    ),
    "lfm2_vl": Recipe(vision=siglip2_tower, text_type="lfm2", more=lfm2_text, whole=lfm2_settings, **TILED),
    "deepseek_ocr2": Recipe(vision=deepseek_ocr2_tower, experts=True, more=deepseek_ocr2_text, whole=nothing, **TILED),
    "cohere2_vision": Recipe(whole=lambda sizes: {"alignment_intermediate_size": 2 * sizes.vision_hidden}, **COHERE),
    "aya_vision": Recipe(whole=llava_settings, **COHERE),
    "internvl": Recipe(vision=internvl_tower, text_type="qwen2", whole=internvl_settings, **TILED),
    "llava": Recipe(vision=clip_tower, text_type="llama", whole=llava_settings, **TILED),
    "llava_next": Recipe(vision=clip_tower, text_type="llama", whole=anyres_settings, **TILED),
    "llava_onevision": Recipe(vision=siglip_tower, text_type="qwen2", whole=anyres_settings, **TILED),
    "smolvlm": Recipe(vision=tile_tower, text_type="llama", whole=nothing, **TILED),
    "idefics3": Recipe(vision=tile_tower, text_type="llama", whole=nothing, **TILED),
    "mistral3": Recipe(vision=pixtral_tower, text_type="mistral", whole=llava_settings, **TILED),
    "gemma3": Recipe(vision=gemma3_tower, more=gemma3_text, whole=gemma3_settings, **GEMMA),
    "gemma4": Recipe(vision=gemma4_tower, more=gemma4_text, whole=gemma4_settings, experts=True, **GEMMA),
    "gemma4_unified": Recipe(vision=merged_patches, more=gemma4_unified_text, whole=gemma4_settings, **GEMMA),
    "paligemma": Recipe(
        vision=paligemma_tower, text_type="gemma2", more=gemma2_text, whole=paligemma_settings, sdpa=False, **GEMMA
    ),
    "llama4": Recipe(vision=llama4_tower, more=llama4_text, whole=image_indices, experts=True, **GEMMA),
    "llama4_text": Recipe(experts=True, more=llama4_text),
    "llama": Recipe(),
    "mistral": Recipe(more=lambda _: {"sliding_window": WINDOW}),
    "qwen2": Recipe(since_qwen3=False),
    "qwen3_moe": Recipe(experts=True),
    "gemma2": Recipe(sdpa=False, more=gemma2_text),
    "gemma3_text": Recipe(more=gemma3_text),
    "phi3": Recipe(since_qwen3=False, more=lambda _: {"sliding_window": WINDOW}),
    "olmo3": Recipe(more=two_ropes),
    "granite": Recipe(since_qwen3=False, more=granite_text),
    "cohere2": Recipe(more=cohere2_text),
    "smollm3": Recipe(since_qwen3=False, more=lambda _: {"no_rope_layer_interval": 2}),
    "glm4_moe": Recipe(experts=True, more=routed),
    "deepseek_v3": Recipe(since_qwen3=False, experts=True, more=deepseek_text),
    "lfm2": Recipe(since_qwen3=False, more=lfm2_text),
    "lfm2_moe": Recipe(since_qwen3=False, experts=True, more=lfm2_moe_text),
    "gpt_oss": Recipe(sdpa=False, experts=True, more=gpt_oss_text),
}
"""Recipes by `config.model_type`."""
