"""Tiny models: the model classes of the installed transformers, with small sizes and random weights.

Nothing is downloaded and nothing is mocked: windows, deepstack, rotary positions and experts are the real ones. A part
of a configuration (text, vision, audio, the whole) gets those of the settings below that transformers' own
configuration of the family has by default. So most families need nothing of their own.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, final

import torch
from torch import nn

from vlmpack.errors import ConfigError, FamilyError
from vlmpack.families.family import Family
from vlmpack.families.registry import FAMILIES

DEFAULT_FAMILY = "qwen3_vl"
"""The default family of tiny models and processors."""
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
    """Width of one head of the text model; None: `hidden // heads`. Families without `head_dim` in their configuration
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
    """Side of a patch in pixels; None: the family's default, or 6 for tiles."""
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


SETTINGS = {"text": text_settings, "vision": vision_settings, "audio": audio_settings, "whole": whole_settings}


# ---------------------------------------------------------------------- what single families need

OfPart = Callable[[Any], Settings]
"""Function of `TinySizes` that returns settings of one part of a configuration."""


@final
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a family's configuration needs besides the settings by size."""

    types: Mapping[ConfigPart, str] = field(default_factory=dict)
    """`model_type` of the parts of the configuration that differ from the family's default."""
    text: OfPart = lambda _: {}
    """Settings of the text model."""
    vision: OfPart = lambda _: {}
    """Settings of the vision tower."""
    audio: OfPart = lambda _: {}
    """Settings of the audio tower."""
    whole: OfPart = lambda _: {}
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


def _lfm3(s: TinySizes) -> Settings:
    """Short convolutions, windows and whole samples in turn."""
    kinds = ("conv", "sliding_attention", "full_attention")
    return _two_ropes(s) | {"layer_types": [kinds[i % 3] for i in range(s.layers)]}


def _lfm3_tower(s: TinySizes) -> Settings:
    return {"layer_types": ["full_attention" if i % 2 else "conv" for i in range(s.vision_depth)]}


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


LATENT: dict[str, Any] = {"text": lambda s: {"num_key_value_heads": s.heads}}
GLM: dict[str, Any] = {"vision": lambda s: {"image_size": 4 * s.merge * s.patch_size}}
PIXTRAL: dict[str, Any] = {"vision": lambda s: {"image_size": 4 * TILE_PATCHES * s.patch_size}}  # four tiles a side

RECIPES = {
    "qwen2_vl": Recipe(vision=lambda s: {"hidden_size": s.hidden, "mlp_ratio": 2}),
    "qwen4_exp": Recipe(text=_qwen4),
    "qwen2_5_omni_thinker": Recipe(audio=lambda _: {"n_window": 4}),  # chunks of 2 tokens
    "qwen3_omni_moe_thinker": Recipe(  # transformers counts 13 tokens for each chunk; windows of two chunks
        audio=lambda _: {"n_window": 50, "n_window_infer": 200, "downsample_hidden_size": 4}
    ),
    **dict.fromkeys(("glm4v", "glm46v"), Recipe(**GLM)),
    "glm4v_moe": Recipe(
        text=lambda s: {"rope_parameters": sections({"partial_rotary_factor": 0.5}, s.head_width // 4)}, **GLM
    ),
    "glm_ocr": Recipe(text=lambda s: {"head_dim": s.head_width}, **GLM),
    "ernie4_5_vl_moe": Recipe(text=_ernie),
    "kimi_k25": Recipe(whole=lambda _: {"tie_word_embeddings": False}, **LATENT),
    "lfm3_vl": Recipe(text=_lfm3, vision=_lfm3_tower),
    "lfm2_vl": Recipe(text=_conv),
    "deepseek_ocr2": Recipe(vision=_deepseek_ocr2_tower, text=_deepseek_ocr2),
    **dict.fromkeys(("cohere2_vision", "aya_vision"), Recipe(text=lambda _: {"logit_scale": 0.25})),
    "mistral3": Recipe(text=lambda _: {"sliding_window": 4096}, **PIXTRAL),
    "lighton_ocr": Recipe(**PIXTRAL),
    "gemma3": Recipe(vision=lambda s: {"image_size": 6 * s.patch_size}, text=_two_ropes),
    "gemma4": Recipe(types={"vision": "gemma4_vision"}, text=_gemma4),
    "gemma4_unified": Recipe(types={"vision": "gemma4_unified_vision"}, text=_gemma4_unified),
    "paligemma": Recipe(
        types={"text": "gemma2"}, vision=lambda s: {"projection_dim": s.hidden}, whole=_paligemma, sdpa=False
    ),
    "llama4": Recipe(  # pixel shuffle of 2 x 2 patches, then two projections
        vision=lambda s: {
            "intermediate_size": 4 * s.vision_hidden,
            **dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 2 * s.vision_hidden),
        },
        text=_llama4,
    ),
    "llama4_text": Recipe(text=_llama4),
    **dict.fromkeys(("gemma2", "gpt_oss"), Recipe(sdpa=False)),
    "gemma3_text": Recipe(text=_two_ropes),
    "gemma4_text": Recipe(text=_gemma4),
    "phi3": Recipe(text=lambda _: {"sliding_window": WINDOW}),
    "olmo3": Recipe(text=_two_ropes),
    "granite": Recipe(text=_granite),
    "cohere2": Recipe(text=lambda _: {"logit_scale": 0.25}),
    "smollm3": Recipe(text=lambda _: {"no_rope_layer_interval": 2}),
    "glm4_moe_lite": Recipe(text=lambda s: {"num_key_value_heads": s.heads, "mlp_layer_types": ["sparse"] * s.layers}),
    "deepseek_v3": Recipe(**LATENT),
    "lfm2": Recipe(text=_conv),
    "lfm2_moe": Recipe(text=lambda s: {**_conv(s), "num_dense_layers": 0}),
}
"""What families need, by `config.model_type`; a family that is not here needs nothing."""


# ---------------------------------------------------------------------- models


def tiny_model(
    family: str = DEFAULT_FAMILY,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    lively: bool = True,
    attn_implementation: str | dict[str, str] = "sdpa",
    processor: Any = None,
    like: Any = None,
    **sizes: Any,
) -> Any:
    """Build a `...ForConditionalGeneration` (text models: `...ForCausalLM`) with random weights, on the CPU, in train
    mode.

    The same arguments give the same weights. The global random state does not change.

    Args:
        family: `config.model_type` of a supported family, such as `"qwen3_vl"`, `"qwen3_5_moe"` or `"qwen3"`.
        seed: seed of the weights.
        dtype: dtype of the weights (rotary frequencies stay float32, as in `from_pretrained`).
        lively: draw weights from N(0, 1 / fan_in) and embeddings from N(0, 1), and let gated delta layers forget
            slowly, so that logits are of order 1 and a leak between samples is as large as the signal. False: use the
            family's own initialization (std 0.02).
        attn_implementation: passed on to transformers; "sdpa" becomes "eager" in families without sdpa.
        processor: take token ids, vocabulary and patch sizes from this processor: a Qwen processor or a tiny one.
        like: a configuration of this family. Take from it every setting that is not a size (activations, biases, norms,
            scales, rotary settings), the head width, and whether query heads share keys and values.
        **sizes: fields of `TinySizes`.

    Raises:
        ConfigError: a size is unknown, or sizes do not fit together.
        FamilyError: the family is unknown.
    """
    config = tiny_config(family, processor=processor, like=like, **sizes)
    if attn_implementation == "sdpa" and not recipe_of(family).sdpa:
        attn_implementation = "eager"
    # without devices, fork_rng touches only the CPU's generator; torch.manual_seed would seed all devices
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = FAMILIES[family].auto_class.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    if lively:
        _enliven(model, torch.Generator().manual_seed(seed))
    return model.train()


def tiny_config(family: str = DEFAULT_FAMILY, *, processor: Any = None, like: Any = None, **sizes: Any) -> Any:
    """Build the configuration of `tiny_model` from the same arguments: a real `Qwen2VLConfig`, `Qwen3VLConfig`, ...

    Raises:
        ConfigError: a size is not a field of `TinySizes`, or sizes do not fit together.
        FamilyError: the family is unknown.
    """
    if family not in FAMILIES:
        raise FamilyError(f"no tiny model of family {family!r}; there are {', '.join(FAMILIES)}")
    if unknown := sorted(set(sizes) - set(TinySizes.__dataclass_fields__)):
        raise ConfigError(f"{', '.join(unknown)}: not a size of a tiny model; see TinySizes for those there are")
    if like is not None:
        sizes = _heads_of(like.get_text_config()) | sizes
    chosen = TinySizes(**{**(_processor_sizes(processor) if processor is not None else {}), **sizes})
    if chosen.patch_size is None:
        chosen = replace(chosen, patch_size=patch_size_of(family))
    _check(chosen, FAMILIES[family])
    if like is None:
        return copy.deepcopy(_config(chosen, family))
    return _built(family, _settings(chosen, family), like.to_dict())


def recipe_of(family: str) -> Recipe:
    """Return what a family needs besides the settings by size."""
    return RECIPES.get(family) or Recipe()


def takes_any_width(text: dict[str, Any]) -> bool:
    """Return whether the heads of a text configuration have any width; those of latent attention have several."""
    return "head_dim" in text and "kv_lora_rank" not in text


def patch_size_of(family: str) -> int:
    """Return the side of a patch in pixels: transformers' own default, or 6 in tiles."""
    return _defaults(family)["vision"]["patch_size"] if FAMILIES[family].has_grids else 6


# ---------------------------------------------------------------------- sizes from a processor, and their checks


def _processor_sizes(processor: Any) -> dict[str, Any]:
    """Read token ids, vocabulary and patch sizes from a tiny processor or a Qwen processor."""
    tokenizer, images = processor.tokenizer, processor.image_processor
    tokens = {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
    tokens |= {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    if hasattr(processor, "audio_token"):  # Qwen-Omni
        tokens = {kind: getattr(processor, f"{kind}_token") for kind in ("image", "video", "audio")}
        for kind in ("vision", "audio"):
            tokens |= {f"{kind}_start": getattr(processor, f"{kind}_bos_token")}
            tokens |= {f"{kind}_end": getattr(processor, f"{kind}_eos_token")}
    sizes = {"vocab_size": len(tokenizer), "patch_size": images.patch_size, "merge": images.merge_size}
    for name, token in tokens.items():
        sizes[f"{name}_token_id"] = tokenizer.convert_tokens_to_ids(token)
        if sizes[f"{name}_token_id"] in (None, tokenizer.unk_token_id):
            raise ConfigError(f"the processor's tokenizer has no {token}; is it a Qwen-VL processor?")
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    return {**sizes, **ids, "temporal_patch_size": images.temporal_patch_size}


def _check(sizes: TinySizes, family: Family) -> None:
    width, name = sizes.head_width, family.model_type
    if sizes.heads % sizes.kv_heads:
        raise ConfigError(f"heads={sizes.heads} is not a multiple of kv_heads={sizes.kv_heads}")
    if family.has("experts") and sizes.hidden % 8:
        raise ConfigError(f"hidden={sizes.hidden} must be a multiple of 8: experts multiply rows of whole 16 bytes")
    if not takes_any_width(_defaults(name)["text"]) and width * sizes.heads != sizes.hidden:
        raise ConfigError(f"{name} needs head_dim * heads == hidden, got {width} * {sizes.heads} != {sizes.hidden}")
    least = 12 if family.has("gated_delta") else 6
    if width % 2 or width < least:
        raise ConfigError(
            f"head_dim={width} must be even and at least {least}: time, height and width share the part that rotates"
        )
    if sizes.vision_hidden % (4 * sizes.vision_heads):
        raise ConfigError(
            f"vision_hidden={sizes.vision_hidden} must be a multiple of 4 * vision_heads={4 * sizes.vision_heads}"
        )
    highest = max(sizes.tokens(MEDIA_TOKENS).values())
    if highest >= sizes.vocab_size:
        raise ConfigError(f"vocab_size={sizes.vocab_size} does not hold token id {highest}; raise it to {highest + 1}")


SCALES = {"sinks": 1.0, "e_score_correction_bias": 0.1}
"""Standard deviations of single parameters; the last one is added to probabilities."""


def _enliven(model: nn.Module, generator: torch.Generator) -> None:
    """Draw matrices from N(0, 1 / fan_in) and embeddings from N(0, 1); norms stay 1 and biases 0.

    Numbers are drawn in float32, so that models of different dtypes round the same numbers.
    """
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            fan_in = module.weight[0].numel()
            _draw(module.weight, fan_in**-0.5, generator)
        elif isinstance(module, nn.Embedding):
            _draw(module.weight, 1.0, generator)
        elif vars(module).get("scaling") == 1.0 and "k_norm" in module._modules:
            weight = module.get_parameter("k_norm.weight")  # in Gemma 4, this weight scales the attention scores
            nn.init.constant_(weight, len(weight) ** -0.5)
        else:  # routers and experts hold matrices [..., out, in] as parameters of their own
            for name, weight in module.named_parameters(recurse=False):
                if name == "A_log":
                    _forget_slowly(weight, generator)
                elif name in SCALES or weight.ndim > 1:
                    std = SCALES[name] if name in SCALES else weight.shape[-1] ** -0.5
                    _draw(weight, std, generator)
            for name, buffer in module.named_buffers(recurse=False):
                if name in ("e_score_correction_bias", "expert_bias"):  # large enough to change some tokens' experts
                    _draw(buffer, 0.2, generator)


@torch.no_grad()
def _draw(weight: torch.Tensor, std: float, generator: torch.Generator) -> None:
    weight.copy_(torch.randn(weight.shape, generator=generator) * std)


@torch.no_grad()
def _forget_slowly(log_rate: torch.Tensor, generator: torch.Generator) -> None:
    """Set the decay of a gated delta layer, which multiplies its state by exp(-rate * softplus(...)) at each token."""
    log_rate.copy_((0.02 + 0.3 * torch.rand(log_rate.shape, generator=generator)).log())


# ---------------------------------------------------------------------- configurations


@functools.lru_cache(maxsize=64)
def _config(sizes: TinySizes, family: str) -> Any:
    """Cached, because transformers checks every setting, which takes longer than a copy."""
    return _built(family, _settings(sizes, family), {})


@functools.cache
def _defaults(family: str) -> dict[ConfigPart, dict[str, Any]]:
    """Return transformers' own settings of each part of a family's configuration."""
    from transformers import AutoConfig

    whole = AutoConfig.for_model(family)
    if not FAMILIES[family].has_vision:
        return {"text": whole.to_dict()}
    parts: dict[Any, Any] = {name: getattr(whole, f"{name}_config", None) for name in ("text", "vision", "audio")}
    parts |= {name: AutoConfig.for_model(kind) for name, kind in recipe_of(family).types.items()} | {"whole": whole}
    return {name: part.to_dict() for name, part in parts.items() if part is not None}


def _settings(sizes: TinySizes, family: str) -> dict[str, Any]:
    """Return the settings that make the configuration tiny: those that it has by default, and the recipe's."""
    recipe, parts = recipe_of(family), dict[str, dict[str, Any]]()
    for name, defaults in _defaults(family).items():
        by_size = {key: x for key, x in SETTINGS[name](sizes).items() if defaults.get(key) is not None}
        if isinstance(defaults.get("patch_size"), list | tuple):
            by_size |= {key: [by_size[key]] * 2 for key in ("patch_size", "image_size")}
        always = _text(sizes, FAMILIES[family], defaults) if name == "text" else {}
        parts[name] = by_size | always | getattr(recipe, name)(sizes)
    if "whole" not in parts:
        return parts["text"]
    for name in ("text", "vision"):
        parts[name]["model_type"] = _defaults(family)[name]["model_type"]
    configs = {f"{name}_config": part for name, part in parts.items() if name != "whole"}
    tokens = (*MEDIA_TOKENS, *(AUDIO_TOKENS if "audio" in parts else ()))
    return configs | sizes.tokens(tokens) | parts["whole"]


def _text(sizes: TinySizes, family: Family, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that every text model gets.

    In hybrid models, half of the channels of a head rotate (in the released models, a quarter of 256 channels).
    """
    kinds = dict.fromkeys(defaults.get("layer_types") or ())
    text = {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "max_position_embeddings": 32768,
        "bos_token_id": None,
        "eos_token_id": sizes.eos_token_id,
        "pad_token_id": sizes.pad_token_id,
    }
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    is_hybrid = family.has("gated_delta")
    if is_hybrid:
        rope["partial_rotary_factor"] = 0.5
    if family.has_vision and (family.positions_rule.axes == 3 or is_hybrid):
        rope = sections(rope, sizes.head_width // (4 if is_hybrid else 2))
    if takes_any_width(defaults):
        text["head_dim"] = sizes.head_width
    if "intermediate_size" in defaults:
        text["intermediate_size"] = sizes.intermediate or 2 * sizes.hidden
    if kinds.keys() - {"full_attention"}:
        text["layer_types"] = layer_types(sizes, kinds)
    return {**text, "rope_parameters": rope}


def _built(family: str, settings: dict[str, Any], like: dict[str, Any]) -> Any:
    """Build a configuration from these settings, plus the settings of `like` that are not sizes."""
    from transformers import AutoConfig

    for name, part in settings.items():
        if name in ("text_config", "vision_config") and like.get(name):
            settings[name] = _kept(like[name], part)
    if "text_config" not in settings:
        settings = _kept(like, settings)
    return AutoConfig.for_model(family, **settings)


def _kept(like: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Add to the settings of a part those of `like` that are not sizes, if it has the same model type.

    Integers and lists count as sizes, except for `rope_parameters`.
    """
    if like.get("model_type") != settings.get("model_type", like.get("model_type")):
        return settings
    others = {name: value for name, value in like.items() if isinstance(value, bool | float | str) and name != "dtype"}
    rope = {name: like[name] for name in ("rope_parameters",) if like.get(name)}
    return {**{name: value for name, value in others.items() if name != "model_type"}, **settings, **rope}


def _heads_of(text: Any) -> dict[str, int]:
    """Return sizes for two heads with the width of those of a text configuration; they share keys and values if its
    heads do."""
    settings = text.to_dict()
    heads = settings["num_attention_heads"]
    width = settings.get("head_dim") or settings["hidden_size"] // heads
    shared = settings.get("num_key_value_heads") not in (None, heads)
    return {"head_dim": width, "heads": 2, "kv_heads": 1 if shared else 2, "hidden": 2 * width}
