"""Settings of tiny models: one value for each setting that a size decides, and what single families need besides.

A part of a configuration (text, vision, audio, the whole) gets those of the settings below that transformers' own
configuration of the family has by default. So most families need nothing of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal, final

Settings = dict[str, Any]
ConfigPart = Literal["text", "vision", "audio", "whole"]

MEL_BINS = 6
"""Number of log-mel bins of tiny models."""
MEDIA_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
AUDIO_TOKENS = ("audio_token_id", "audio_start_token_id", "audio_end_token_id")
"""Settings with the ids of placeholders and of the tokens around media."""
WINDOW = 5
"""Sliding window, shorter than samples of a few tokens."""
CHUNK = 7
"""Chunk length, so short that samples of a few tokens have several chunks."""
TILE_PATCHES = 4
"""Patches along each side of a tile."""


@final
@dataclass(frozen=True, kw_only=True)
class TinySizes:
    """Sizes of a tiny model. Lengths are in tokens or pixels, widths in channels; other fields are counts and ids."""

    hidden: int = 64
    """Width of the text model."""
    layers: int = 2
    """Layers of the text model. In hybrid models, every fourth layer and the last one have attention."""
    heads: int = 4
    """Query heads of the text model."""
    kv_heads: int = 2
    """Key and value heads of the text model."""
    head_dim: int | None = None
    """Width of one head of the text model; None: `hidden // heads`. Families with `any_width=False` in their recipe
    take no other value."""
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
    """Side of a patch in pixels; None: the family's default: 14, 16 (from Qwen3-VL on), or 6 for tiles."""
    merge: int = 2
    """Patches merged into one token along each side."""
    temporal_patch_size: int = 2
    """Video frames in one patch."""
    vocab_size: int = 131
    """Number of token ids, including special tokens."""
    pad_token_id: int = 0
    """Id of the padding token."""
    eos_token_id: int = 1
    """Id of the end-of-turn token."""
    vision_start_token_id: int = 2
    """Id of the token before an image or a video."""
    vision_end_token_id: int = 3
    """Id of the token after an image or a video."""
    image_token_id: int = 4
    """Id of the image placeholder."""
    video_token_id: int = 5
    """Id of the video placeholder."""
    audio_token_id: int = 6
    """Id of the audio placeholder, in families that take audio."""
    audio_start_token_id: int = 7
    """Id of the token before an audio."""
    audio_end_token_id: int = 8
    """Id of the token after an audio."""

    @property
    def head_width(self) -> int:
        """Width of one head of the text model."""
        return self.head_dim or self.hidden // self.heads

    def tokens(self, names: Iterable[str]) -> dict[str, int]:
        """Return the ids of some tokens by the names of their settings."""
        return {name: self.__dict__[name] for name in names}


def layer_types(s: TinySizes, kinds: Collection[str]) -> list[str]:
    """The kind of each layer, of the `kinds` that a configuration has by default. Gated delta layers and short
    convolutions: attention is in every fourth layer, and in the last one. Windows and chunks: in every other layer,
    starting with the first."""
    other = next((kind for kind in kinds if kind != "full_attention"), "full_attention")
    if other in ("linear_attention", "conv"):
        full = {*range(3, s.layers, 4), s.layers - 1}
        return ["full_attention" if i in full else other for i in range(s.layers)]
    return ["full_attention" if i % 2 else other for i in range(s.layers)]


def text_settings(s: TinySizes) -> Settings:
    """Settings of text models."""
    width = s.head_width
    return {
        # multi-head latent attention, with values narrower than keys
        "kv_lora_rank": width,
        "q_lora_rank": s.hidden // 2,
        "qk_rope_head_dim": 2 * (width // 4),
        "qk_nope_head_dim": width // 2,
        "v_head_dim": width // 2 + 4,
        # gated delta layers: with fewer key heads than value heads, value heads share key heads
        "linear_num_key_heads": s.kv_heads,
        "linear_num_value_heads": s.heads,
        "linear_key_head_dim": width,
        "linear_value_head_dim": width,
        # experts: in two groups (one if their number is odd), of which each token chooses one
        **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), s.experts),
        **dict.fromkeys(("num_experts_per_tok", "moe_k"), s.experts_per_token),
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
        **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts"), 1),
        "n_group": 1 if s.experts % 2 else 2,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        # patterns, and softcaps so low that they affect scores and logits of order 1
        "sliding_window": WINDOW,
        "attention_chunk_size": CHUNK,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": width,
    }


def vision_settings(s: TinySizes) -> Settings:
    """Settings of vision towers. Where images are tiles, they have 4 x 4 patches."""
    assert s.patch_size is not None
    return {
        **dict.fromkeys(("hidden_size", "embed_dim", "mm_embed_dim", "output_proj_dims"), s.vision_hidden),
        **dict.fromkeys(("depth", "num_hidden_layers"), s.vision_depth),
        **dict.fromkeys(("num_heads", "num_attention_heads", "num_key_value_heads"), s.vision_heads),
        "head_dim": s.vision_hidden // s.vision_heads,
        "intermediate_size": 2 * s.vision_hidden,
        "out_hidden_size": s.hidden,
        "projection_dim": s.vision_hidden,
        "patch_size": s.patch_size,
        "image_size": TILE_PATCHES * s.patch_size,
        "spatial_merge_size": s.merge,
        "merge_kernel_size": [s.merge] * 2,
        "temporal_patch_size": s.temporal_patch_size,
        "pooling_kernel_size": 2,
        # learned position embeddings, interpolated to the shape of an image
        **dict.fromkeys(("num_position_embeddings", "position_embedding_size", "mm_posemb_size"), 64),
        **dict.fromkeys(("pos_emb_height", "pos_emb_width"), TILE_PATCHES),
        "num_patches": TILE_PATCHES**2,
        # windows of 4 x 4 tokens, as in the released models; the last block attends to whole images
        "window_size": 4 * s.merge * s.patch_size,
        "fullatt_block_indexes": [s.vision_depth - 1],
        "tokens_per_second": 2,
        # features of at most three blocks, each added to the output of one of the text model's first layers
        "deepstack_visual_indexes": list(range(min(s.vision_depth, s.layers)))[:3],
        "insert_layer_id": 0,
        "vision_use_head": False,
    }


def audio_settings(s: TinySizes) -> Settings:
    """Settings of audio towers."""
    return {
        "num_mel_bins": MEL_BINS,
        "encoder_layers": 2,
        "encoder_attention_heads": s.vision_heads,
        "encoder_ffn_dim": 2 * s.vision_hidden,
        "d_model": s.vision_hidden,
        "max_source_positions": 64,
        "output_dim": s.hidden,
    }


def whole_settings(s: TinySizes) -> Settings:
    """Settings of the whole model, beside the ids of `MEDIA_TOKENS` and `AUDIO_TOKENS`."""
    tile = TILE_PATCHES * (s.patch_size or 0)
    shapes = ((1, 2), (2, 1), (2, 2), (1, 3), (3, 1))
    return {
        "image_token_index": s.image_token_id,
        "video_token_index": s.video_token_id,
        **dict.fromkeys(("boi_token_id", "boi_token_index", "image_start_token_id"), s.vision_start_token_id),
        **dict.fromkeys(("eoi_token_id", "eoi_token_index", "image_end_token_id"), s.vision_end_token_id),
        "video_start_token_id": s.vocab_size - 2,
        "video_end_token_id": s.vocab_size - 1,
        "image_grid_pinpoints": [[rows * tile, columns * tile] for rows, columns in shapes],
        "image_seq_length": TILE_PATCHES**2 // 4,  # pixel shuffle merges 2 x 2 patches
        "mm_tokens_per_image": 9,
        "downsample_factor": s.merge,
        "alignment_intermediate_size": 2 * s.vision_hidden,
        "projector_hidden_size": 2 * s.vision_hidden,
        "projection_hidden_size": s.vision_hidden,
        "insert_layer_id": 0,
        "vision_feature_layer": -1,
    }


SETTINGS: dict[ConfigPart, Callable[[TinySizes], Settings]] = {
    "text": text_settings,
    "vision": vision_settings,
    "audio": audio_settings,
    "whole": whole_settings,
}


# ---------------------------------------------------------------------- what single families need

OfPart = Callable[[Any], Settings]
"""Function of `TinySizes` that returns settings of one part of a configuration."""


def nothing(s: TinySizes) -> Settings:
    """No settings."""
    return {}


@final
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a family's configuration needs besides the settings by size."""

    text_type: str | None = None
    """`model_type` of the text model, if the family takes any text model; None: the family's own."""
    vision_type: str | None = None
    """`model_type` of the vision tower, if the family takes several; None: the default one."""
    any_width: bool = True
    """True for heads of any width, interleaved MRoPE sections, and patches of 16 pixels."""
    text: OfPart = nothing
    """Settings of the text model."""
    vision: OfPart = nothing
    """Settings of the vision tower."""
    audio: OfPart = nothing
    """Settings of the audio tower."""
    whole: OfPart = nothing
    """Settings of the whole model."""
    sdpa: bool = True
    """True if transformers has sdpa attention for the family; False: only eager."""


def sections(rope: Settings, width: int) -> Settings:
    """Rotary settings in which time gets the frequencies that height and width, a third each, leave."""
    third = width // 3
    return {"rope_type": "default", "rope_theta": 10000.0, **rope, "mrope_section": [width - 2 * third, third, third]}


def _qwen4(s: TinySizes) -> Settings:
    """Sparse blocks so small and few that even short samples have to choose some; n-grams with few, small tables."""
    kinds = layer_types(s, ["linear_attention"])
    return {
        "layer_types": kinds,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": s.head_width,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ple_layer_ids": [i for i, kind in enumerate(kinds, start=1) if kind == "linear_attention"],
        "ngram_size": 3,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 97,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1,
        "hc_count": 2,
        "hc_lowrank": 8,
    }


def _ernie(s: TinySizes) -> Settings:
    """Text experts wider than image experts; the first of three or more layers is dense."""
    dense, third = int(s.layers > 2), s.head_width // 6
    sections = [third, third, s.head_width // 2 - 2 * third]
    return {
        "moe_intermediate_size": [32, 16],
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (s.layers - dense),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections},
    }


def _granite(s: TinySizes) -> Settings:
    multipliers = {"embedding": 1.5, "residual": 0.7, "attention": s.head_width**-0.5}
    return {"logits_scaling": 3.0} | {f"{name}_multiplier": value for name, value in multipliers.items()}


def _conv(s: TinySizes) -> Settings:
    return {"layer_types": layer_types(s, ["conv"]), "block_auto_adjust_ff_dim": False}


def _two_ropes(s: TinySizes) -> Settings:
    """Different rotary frequencies in layers with a window."""
    thetas = {"sliding_attention": 100.0, "full_attention": 10000.0}
    return {"rope_parameters": {k: {"rope_type": "default", "rope_theta": theta} for k, theta in thetas.items()}}


def _gemma4_unified(s: TinySizes) -> Settings:
    """Wider heads in layers without a window; keys used as values; with 4 or more layers, the last two share keys and
    values of earlier layers."""
    rope = _two_ropes(s)
    rope["rope_parameters"]["full_attention"] |= {"partial_rotary_factor": 0.5, "rope_type": "proportional"}
    return {
        **rope,
        "layer_types": [*layer_types(s, ["sliding_attention"])[:-1], "full_attention"],
        "final_logit_softcapping": 3.0,
        "use_bidirectional_attention": "vision",
        "global_head_dim": 2 * s.head_width,
        "num_global_key_value_heads": max(1, s.kv_heads // 2),
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 2 if s.layers > 3 else 0,
    }


def _gemma4(s: TinySizes) -> Settings:
    """All features of Gemma 4 models in one: those of the unified model, plus experts and per-layer embeddings."""
    return {
        **_gemma4_unified(s),
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": s.vocab_size,
        "enable_moe_block": True,
        "num_experts": s.experts,
        "top_k_experts": s.experts_per_token,
        "moe_intermediate_size": 32,
    }


def _llama4(s: TinySizes) -> Settings:
    """Chunks and rotary positions in every other layer, starting with the first; in the others, queries are scaled from
    the third token on. All layers have experts."""
    rotary = [1 - i % 2 for i in range(s.layers)]
    scale = {"floor_scale": 3, "attn_scale": 0.7}
    return {"no_rope_layers": rotary if s.layers > 1 else [1], "intermediate_size_mlp": 2 * s.hidden, **scale}


def _deepseek_ocr2_tower(s: TinySizes) -> Settings:
    """Whole images of two tiles a side, windows in all blocks but the last, and an encoder of the same depth, with 144
    queries per view.

    Two convolutions halve a tile. If tiles were smaller, the second one would get a single feature, and on a CPU in
    bfloat16 PyTorch leaves the gradient of such a convolution unwritten.
    """
    by_size = vision_settings(s)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "patch_size")
    blocks = {"window_size": TILE_PATCHES - 1, "global_attn_indexes": [s.vision_depth - 1]}
    widths = {"output_channels": s.vision_hidden, "downsample_channels": [s.vision_hidden] * 2}
    tower = {name: by_size[name] for name in names} | {"image_size": 2 * by_size["image_size"], **blocks, **widths}
    encoder = {name: by_size[name] for name in names[:-1]} | {"num_key_value_heads": s.vision_heads, "vocab_size": 1}
    return {"sam_config": {**tower, "mlp_dim": tower["intermediate_size"]}, "encoder_config": encoder}


def _paligemma(s: TinySizes) -> Settings:
    return {"projection_dim": s.hidden, "hidden_size": s.hidden, "vocab_size": s.vocab_size}


def _deepseek_ocr2(s: TinySizes) -> Settings:
    return {"mlp_layer_types": ["sparse"] * s.layers, "num_experts_per_tok": s.experts_per_token}


LATENT = {"any_width": False, "text": lambda s: {"num_key_value_heads": s.heads}}
GLM: dict[str, Any] = {"vision": lambda s: {"image_size": 4 * s.merge * s.patch_size}, "any_width": False}
TILED: dict[str, Any] = {"any_width": False}
CLIP: dict[str, Any] = {"vision_type": "clip_vision_model", "text_type": "llama", **TILED}
SIGLIP = "siglip_vision_model"
PIXTRAL: dict[str, Any] = {  # images of at most four tiles along each side
    "vision_type": "pixtral",
    "vision": lambda s: {"image_size": 4 * TILE_PATCHES * s.patch_size},
    **TILED,
}

RECIPES = {
    "qwen2_vl": Recipe(vision=lambda s: {"hidden_size": s.hidden, "mlp_ratio": 2}, any_width=False),
    "qwen2_5_vl": Recipe(any_width=False),
    "qwen4_exp": Recipe(text=_qwen4),
    "qwen2_5_omni_thinker": Recipe(audio=lambda _: {"n_window": 4}, any_width=False),  # chunks of 2 tokens
    "qwen3_omni_moe_thinker": Recipe(  # transformers counts 13 tokens for each chunk; windows of two chunks
        audio=lambda _: {"n_window": 50, "n_window_infer": 200, "downsample_hidden_size": 4}
    ),
    "glm4v": Recipe(**GLM),
    "glm46v": Recipe(text_type="glm4v_text", **GLM),
    "glm4v_moe": Recipe(
        text=lambda s: {"rope_parameters": sections({"partial_rotary_factor": 0.5}, s.head_width // 4)}, **GLM
    ),
    "glm_ocr": Recipe(text=lambda s: {"head_dim": s.head_width}, **GLM),
    "paddleocr_vl": Recipe(any_width=False, text=lambda s: {"head_dim": s.head_width}),
    "ernie4_5_vl_moe": Recipe(any_width=False, text=_ernie),
    "kimi_k25": Recipe(text_type="deepseek_v3", whole=lambda _: {"tie_word_embeddings": False}, **LATENT),
    "minicpmv4_6": Recipe(text_type="qwen3_5_text"),
    "lfm2_vl": Recipe(vision_type="siglip2_vision_model", text_type="lfm2", text=_conv, **TILED),
    "deepseek_ocr2": Recipe(vision=_deepseek_ocr2_tower, text=_deepseek_ocr2, **TILED),
    "cohere2_vision": Recipe(vision_type=SIGLIP, text_type="cohere2", text=lambda _: {"logit_scale": 0.25}, **TILED),
    "aya_vision": Recipe(vision_type=SIGLIP, text_type="cohere2", text=lambda _: {"logit_scale": 0.25}, **TILED),
    "internvl": Recipe(
        text_type="qwen2",
        vision=lambda s: {name: [vision_settings(s)[name]] * 2 for name in ("patch_size", "image_size")},
        **TILED,
    ),
    "llava": Recipe(**CLIP),
    "llava_next": Recipe(**CLIP),
    "llava_onevision": Recipe(vision_type=SIGLIP, text_type="qwen2", **TILED),
    "smolvlm": Recipe(text_type="llama", **TILED),
    "idefics3": Recipe(text_type="llama", **TILED),
    "mistral3": Recipe(text_type="mistral", text=lambda _: {"sliding_window": 4096}, **PIXTRAL),
    "lighton_ocr": Recipe(text_type="qwen3", text=lambda s: {"head_dim": s.head_width}, **PIXTRAL),
    "gemma3": Recipe(vision_type=SIGLIP, vision=lambda s: {"image_size": 6 * s.patch_size}, text=_two_ropes),
    "gemma4": Recipe(vision_type="gemma4_vision", text=_gemma4),
    "gemma4_unified": Recipe(vision_type="gemma4_unified_vision", text=_gemma4_unified),
    "paligemma": Recipe(
        vision_type=SIGLIP,
        vision=lambda s: {"projection_dim": s.hidden},
        text_type="gemma2",
        whole=_paligemma,
        sdpa=False,
    ),
    "llama4": Recipe(  # pixel shuffle of 2 x 2 patches, then two projections
        vision=lambda s: {
            "intermediate_size": 4 * s.vision_hidden,
            **dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 2 * s.vision_hidden),
        },
        text=_llama4,
    ),
    "llama4_text": Recipe(text=_llama4),
    "qwen2": Recipe(any_width=False),
    "gemma2": Recipe(sdpa=False),
    "gemma3_text": Recipe(text=_two_ropes),
    "phi3": Recipe(any_width=False, text=lambda _: {"sliding_window": WINDOW}),
    "olmo3": Recipe(text=_two_ropes),
    "granite": Recipe(any_width=False, text=_granite),
    "cohere2": Recipe(text=lambda _: {"logit_scale": 0.25}),
    "smollm3": Recipe(any_width=False, text=lambda _: {"no_rope_layer_interval": 2}),
    "deepseek_v3": Recipe(**LATENT),
    "lfm2": Recipe(any_width=False, text=_conv),
    "lfm2_moe": Recipe(any_width=False, text=lambda s: {**_conv(s), "num_dense_layers": 0}),
    "gpt_oss": Recipe(sdpa=False),
}
"""What families need, by `config.model_type`; a family that is not here needs nothing."""
