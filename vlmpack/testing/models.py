"""Tiny models: the Qwen classes of the installed transformers, with small sizes and random weights.

Nothing is downloaded, and nothing is a stand-in: windows, deepstack, rotary positions and experts are the real ones.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import nn

from vlmpack.errors import ConfigError, FamilyError
from vlmpack.testing import audio, texts, towers
from vlmpack.testing.family_processors import tile_sizes

DEFAULT_FAMILY = "qwen3_vl"
"""Of tiny models and processors."""


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
    """Width of one head of the text model; None: `hidden // heads`. Qwen2-VL and Qwen2.5-VL take no other value."""
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
    audio_token_id: int = 6
    """Id of the placeholder of an audio token, in families that take audio."""
    audio_start_token_id: int = 7
    """Id of the token before an audio."""
    audio_end_token_id: int = 8
    """Id of the token after an audio."""

    @property
    def head_width(self) -> int:
        """Width of one head of the text model."""
        return self.head_dim or self.hidden // self.heads

    @property
    def media_tokens(self) -> dict[str, int]:
        """Ids of the tokens that stand for media or bound them, by the name of their setting."""
        return {
            "image_token_id": self.image_token_id,
            "video_token_id": self.video_token_id,
            "vision_start_token_id": self.vision_start_token_id,
            "vision_end_token_id": self.vision_end_token_id,
        }

    @property
    def audio_tokens(self) -> dict[str, int]:
        """The same of audio, in families that take it."""
        return {
            "audio_token_id": self.audio_token_id,
            "audio_start_token_id": self.audio_start_token_id,
            "audio_end_token_id": self.audio_end_token_id,
        }


def tiny_model(
    family: str = DEFAULT_FAMILY,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    lively: bool = True,
    attn_implementation: str | dict[str, str] = "sdpa",
    processor: Any = None,
    **sizes: Any,
) -> Any:
    """Build a random `...ForConditionalGeneration` (text models: `...ForCausalLM`) on the CPU, in train mode.

    The same arguments give the same weights; the global random state is left as it was.

    Args:
        family: `config.model_type` of a supported family, such as `"qwen3_vl"`, `"qwen3_5_moe"` or `"qwen3"`.
        seed: of the weights.
        dtype: of the weights (rotary frequencies stay float32, as in `from_pretrained`).
        lively: draw weights from N(0, 1 / fan_in) and embeddings from N(0, 1), and let gated delta layers forget
            slowly, so that logits are of order 1 and a leak between samples is as large as the signal. False: the
            family's own initialisation (std 0.02).
        attn_implementation: handed on to transformers; "sdpa" becomes "eager" in families that have no sdpa.
        processor: take token ids, vocabulary and patch sizes from this Qwen processor.
        **sizes: the fields of `TinySizes`.

    Raises:
        ConfigError: sizes that do not fit together. FamilyError: an unknown family.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = tiny_config(family, processor=processor, **sizes)
    auto = AutoModelForCausalLM if RECIPES[family].vision is None else AutoModelForImageTextToText
    if attn_implementation == "sdpa" and not RECIPES[family].sdpa:
        attn_implementation = "eager"
    # fork_rng with no device listed touches the CPU's generator alone; manual_seed would reach all devices.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = auto.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    if lively:
        _enliven(model, torch.Generator().manual_seed(seed))
    return model.train()


def tiny_config(family: str = DEFAULT_FAMILY, *, processor: Any = None, **sizes: Any) -> Any:
    """Build the configuration of `tiny_model`: a real `Qwen2VLConfig`, `Qwen3VLConfig`, ...

    Raises:
        ConfigError: sizes that do not fit together, or one that is not a field of `TinySizes`.
        FamilyError: an unknown family.
    """
    if family not in RECIPES:
        raise FamilyError(f"no tiny model of family {family!r}; there are {', '.join(RECIPES)}")
    if unknown := sorted(set(sizes) - set(TinySizes.__dataclass_fields__)):
        raise ConfigError(f"{', '.join(unknown)}: not a size of a tiny model; see TinySizes for those there are")
    recipe = RECIPES[family]
    chosen = TinySizes(**{**(_processor_sizes(processor) if processor is not None else {}), **sizes})
    if chosen.patch_size is None:
        chosen = replace(chosen, patch_size=recipe.patch_size or (16 if recipe.since_qwen3 else 14))
    _check(chosen, recipe, family)
    return copy.deepcopy(_config(chosen, family))


# ---------------------------------------------------------------------- sizes from a processor, and their checks


def _processor_sizes(processor: Any) -> dict[str, Any]:
    """Read token ids, vocabulary and patch sizes off a tiny processor, or a Qwen processor."""
    tokenizer, images = processor.tokenizer, processor.image_processor
    if (sizes := tile_sizes(processor) or audio.omni_sizes(processor)) is not None:
        return sizes
    tokens = {"vision_start": "vision_start", "vision_end": "vision_end", "image": "image_pad", "video": "video_pad"}
    sizes = {"vocab_size": len(tokenizer), "patch_size": images.patch_size, "merge": images.merge_size}
    for name, token in tokens.items():
        sizes[f"{name}_token_id"] = tokenizer.convert_tokens_to_ids(f"<|{token}|>")
        if sizes[f"{name}_token_id"] in (None, tokenizer.unk_token_id):
            raise ConfigError(f"the processor's tokenizer has no <|{token}|>; is it a Qwen-VL processor?")
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    return {**sizes, **ids, "temporal_patch_size": images.temporal_patch_size}


def _check(sizes: TinySizes, recipe: _Recipe, family: str) -> None:
    width = sizes.head_width
    if sizes.heads % sizes.kv_heads:
        raise ConfigError(f"heads={sizes.heads} is not a multiple of kv_heads={sizes.kv_heads}")
    if not recipe.since_qwen3 and width * sizes.heads != sizes.hidden:
        raise ConfigError(f"{family} needs head_dim * heads == hidden, got {width} * {sizes.heads} != {sizes.hidden}")
    if recipe.experts and sizes.hidden % 8:
        raise ConfigError(f"hidden={sizes.hidden} must be a multiple of 8: experts multiply rows of whole 16 bytes")
    least = 12 if recipe.hybrid else 6
    if width % 2 or width < least:
        raise ConfigError(
            f"head_dim={width} must be even and at least {least}: time, height and width share the part that rotates"
        )
    if sizes.vision_hidden % (4 * sizes.vision_heads):
        raise ConfigError(
            f"vision_hidden={sizes.vision_hidden} must be a multiple of 4 * vision_heads={4 * sizes.vision_heads}"
        )
    highest = max(sizes.media_tokens.values())
    if highest >= sizes.vocab_size:
        raise ConfigError(f"vocab_size={sizes.vocab_size} does not hold token id {highest}; raise it to {highest + 1}")


def _enliven(model: nn.Module, generator: torch.Generator) -> None:
    """Draw matrices from N(0, 1 / fan_in), embeddings from N(0, 1); norms stay 1 and biases 0.

    Draw in float32 whatever the weights' dtype, so that models of two dtypes round the same numbers.
    """
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            fan_in = module.weight[0].numel()
            _draw(module.weight, fan_in**-0.5, generator)
        elif isinstance(module, nn.Embedding):
            _draw(module.weight, 1.0, generator)
        elif vars(module).get("scaling") == 1.0 and "k_norm" in module._modules:
            weight = module.get_parameter("k_norm.weight")  # Gemma 4's has learnt the scale of scores
            nn.init.constant_(weight, len(weight) ** -0.5)
        else:  # routers and experts hold their matrices [..., out, in] themselves
            for name, weight in module.named_parameters(recurse=False):
                if name == "A_log":
                    _forget_slowly(weight, generator)
                elif name == "sinks":
                    _draw(weight, 1.0, generator)
                elif name == "e_score_correction_bias":  # added to probabilities
                    _draw(weight, 0.1, generator)
                elif weight.ndim > 1:
                    _draw(weight, weight.shape[-1] ** -0.5, generator)
            for name, buffer in module.named_buffers(recurse=False):
                if name in ("e_score_correction_bias", "expert_bias"):  # so large that some tokens choose by it
                    _draw(buffer, 0.2, generator)


@torch.no_grad()
def _draw(weight: torch.Tensor, std: float, generator: torch.Generator) -> None:
    weight.copy_(torch.randn(weight.shape, generator=generator) * std)


@torch.no_grad()
def _forget_slowly(log_rate: torch.Tensor, generator: torch.Generator) -> None:
    """Set the decay of a gated delta layer: it keeps exp(-rate * softplus(...)) of its state at each token."""
    log_rate.copy_((0.02 + 0.3 * torch.rand(log_rate.shape, generator=generator)).log())


# ---------------------------------------------------------------------- configurations


@final
@dataclass(frozen=True, kw_only=True)
class _Recipe:
    """The parts of a family's configuration."""

    vision: Callable[[TinySizes], dict[str, Any]] | None = None
    """Settings of its vision tower; None: a text model."""
    text_type: str | None = None
    """`model_type` of its text part, where the family takes any; None: it has one of its own."""
    mrope: bool = True
    """The text part of a family with vision has multimodal rotary positions."""
    whole: Callable[[TinySizes], dict[str, Any]] | None = None
    """Settings of the whole model that no other family has; None: its images are patches with a grid each, and its
    tower has the settings of Qwen's."""
    since_qwen3: bool = True
    """Heads of any width, interleaved MRoPE sections, patches of 16 pixels."""
    hybrid: bool = False
    """Three of four layers are gated delta layers."""
    experts: bool = False
    """Every layer has experts; in hybrid models one of them is shared by all tokens."""
    dense: bool = True
    """The configuration has the width of a dense MLP."""
    more: Callable[[TinySizes], dict[str, Any]] | None = None
    """Settings of the text model that no other family has."""
    patch_size: int | None = None
    """Side of a patch, where it is neither Qwen2's nor Qwen3's."""
    sdpa: bool = True
    """transformers has sdpa attention for it, not only eager."""


@functools.lru_cache(maxsize=64)
def _config(sizes: TinySizes, family: str) -> Any:
    """transformers checks every setting, which takes longer than a copy."""
    from transformers import AutoConfig

    recipe = RECIPES[family]
    text = _text(sizes, recipe)
    if recipe.vision is None:
        return AutoConfig.for_model(family, **text)
    if recipe.text_type is not None:
        text["model_type"] = recipe.text_type
    if recipe.whole is not None:
        vision, whole = recipe.vision(sizes), sizes.media_tokens | recipe.whole(sizes)
        return AutoConfig.for_model(family, text_config=text, vision_config=vision, **whole)
    vision = towers.patch_blocks(sizes) | recipe.vision(sizes)
    return AutoConfig.for_model(family, text_config=text, vision_config=vision, **sizes.media_tokens)


def _text(sizes: TinySizes, recipe: _Recipe) -> dict[str, Any]:
    settings = {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "max_position_embeddings": sizes.max_positions,
        "rope_parameters": _rope(sizes, recipe),
        "bos_token_id": None,
        "eos_token_id": sizes.eos_token_id,
        "pad_token_id": sizes.pad_token_id,
    }
    if recipe.since_qwen3:
        settings["head_dim"] = sizes.head_width
    if recipe.dense:
        settings["intermediate_size"] = sizes.intermediate or 2 * sizes.hidden
    if recipe.experts:
        settings["num_experts"] = sizes.experts
        settings["num_experts_per_tok"] = sizes.experts_per_token
        settings["moe_intermediate_size"] = 32
        if recipe.hybrid:
            settings["shared_expert_intermediate_size"] = 32
    if recipe.hybrid:  # value heads share key heads
        settings["layer_types"] = texts.layer_types(sizes)
        settings["linear_num_key_heads"] = sizes.kv_heads
        settings["linear_num_value_heads"] = sizes.heads
        settings["linear_key_head_dim"] = settings["linear_value_head_dim"] = sizes.head_width
    return {**settings, **(recipe.more(sizes) if recipe.more else {})}


def _rope(sizes: TinySizes, recipe: _Recipe) -> dict[str, Any]:
    """Rotary settings: height and width get a third of the frequencies each, time the rest.

    In hybrid models half of a head rotates (the released ones rotate a quarter of 256 channels).
    """
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if recipe.hybrid:
        rope["partial_rotary_factor"] = 0.5
    if recipe.vision is not None and recipe.mrope:
        frequencies = sizes.head_width // (4 if recipe.hybrid else 2)
        rope["mrope_section"] = [frequencies - 2 * (frequencies // 3), frequencies // 3, frequencies // 3]
        if recipe.since_qwen3:
            rope["mrope_interleaved"] = True
    return rope


TILED: dict[str, Any] = {"mrope": False, "since_qwen3": False, "patch_size": 6}
"""Parts of recipes of families whose images are tiles."""
GEMMA: dict[str, Any] = TILED | {"since_qwen3": True}
GLM: dict[str, Any] = {"vision": towers.glm_vision, "whole": towers.video_ends, "since_qwen3": False}

RECIPES = {
    "qwen2_vl": _Recipe(vision=towers.qwen2_vision, since_qwen3=False),
    "qwen2_5_vl": _Recipe(vision=towers.windowed_vision, since_qwen3=False),
    "qwen3_vl": _Recipe(vision=towers.deepstack_vision),
    "qwen3_vl_moe": _Recipe(vision=towers.deepstack_vision, experts=True),
    "qwen3_5": _Recipe(vision=towers.qwen3_vision, hybrid=True),
    "qwen3_5_moe": _Recipe(vision=towers.qwen3_vision, hybrid=True, experts=True, dense=False),
    "qwen4_exp": _Recipe(vision=towers.qwen3_vision, hybrid=True, experts=True, dense=False, more=texts.qwen4_text),
    "qwen2_5_omni_thinker": _Recipe(vision=audio.omni_windowed_vision, whole=audio.pooled_audio, since_qwen3=False),
    "qwen3_omni_moe_thinker": _Recipe(vision=audio.omni_deepstack_vision, whole=audio.convolved_audio, experts=True),
    "qwen3": _Recipe(),
    "qwen3_next": _Recipe(hybrid=True, experts=True),
    "glm4v": _Recipe(**GLM),
    "glm46v": _Recipe(text_type="glm4v_text", **GLM),
    "glm4v_moe": _Recipe(experts=True, more=texts.glm_moe_text, **GLM),
    "glm_ocr": _Recipe(more=lambda sizes: {"head_dim": sizes.head_width}, **GLM),
    "paddleocr_vl": _Recipe(
        vision=towers.paddle_vision,
        since_qwen3=False,
        whole=lambda _: {},
        more=lambda sizes: {"head_dim": sizes.head_width},
    ),
    "ernie4_5_vl_moe": _Recipe(
        vision=towers.ernie_vision,
        since_qwen3=False,
        experts=True,
        more=texts.ernie_text,
        whole=towers.ernie_settings,
    ),
    "kimi_k25": _Recipe(
        vision=towers.kimi_vision,
        text_type="deepseek_v3",
        mrope=False,
        since_qwen3=False,
        experts=True,
        more=texts.deepseek_text,
        whole=towers.kimi_settings,
    ),
    "minicpmv4_6": _Recipe(
        vision=towers.minicpm_tower,
        text_type="qwen3_5_text",
        hybrid=True,
        whole=lambda _: {"insert_layer_id": 0},
        patch_size=6,
    ),
    "lfm2_vl": _Recipe(
        vision=towers.siglip2_tower, text_type="lfm2", more=texts.lfm2_text, whole=towers.lfm2_settings, **TILED
    ),
    "deepseek_ocr2": _Recipe(
        vision=towers.deepseek_ocr2_tower, experts=True, more=texts.deepseek_ocr2_text, whole=lambda _: {}, **TILED
    ),
    "cohere2_vision": _Recipe(
        vision=towers.siglip_tower,
        text_type="cohere2",
        more=texts.cohere2_text,
        whole=lambda sizes: {"alignment_intermediate_size": 2 * sizes.vision_hidden},
        **TILED,
    ),
    "aya_vision": _Recipe(
        vision=towers.siglip_tower, text_type="cohere2", more=texts.cohere2_text, whole=towers.llava_settings, **TILED
    ),
    "internvl": _Recipe(vision=towers.internvl_tower, text_type="qwen2", whole=towers.internvl_settings, **TILED),
    "llava": _Recipe(vision=towers.clip_tower, text_type="llama", whole=towers.llava_settings, **TILED),
    "llava_next": _Recipe(vision=towers.clip_tower, text_type="llama", whole=towers.anyres_settings, **TILED),
    "llava_onevision": _Recipe(vision=towers.siglip_tower, text_type="qwen2", whole=towers.anyres_settings, **TILED),
    "smolvlm": _Recipe(vision=towers.tile_tower, text_type="llama", whole=lambda _: {}, **TILED),
    "idefics3": _Recipe(vision=towers.tile_tower, text_type="llama", whole=lambda _: {}, **TILED),
    "mistral3": _Recipe(vision=towers.pixtral_tower, text_type="mistral", whole=towers.llava_settings, **TILED),
    "gemma3": _Recipe(vision=towers.gemma3_tower, more=texts.gemma3_text, whole=towers.gemma3_settings, **GEMMA),
    "gemma4": _Recipe(
        vision=towers.gemma4_tower, more=texts.gemma4_text, whole=towers.gemma4_settings, experts=True, **GEMMA
    ),
    "gemma4_unified": _Recipe(
        vision=towers.merged_patches, more=texts.gemma4_unified_text, whole=towers.gemma4_settings, **GEMMA
    ),
    "paligemma": _Recipe(
        vision=towers.paligemma_tower,
        text_type="gemma2",
        more=texts.gemma2_text,
        whole=towers.paligemma_settings,
        sdpa=False,
        **GEMMA,
    ),
    "llama4": _Recipe(
        vision=towers.llama4_tower, more=texts.llama4_text, whole=towers.llama4_settings, experts=True, **GEMMA
    ),
    "llama4_text": _Recipe(experts=True, more=texts.llama4_text),
    "llama": _Recipe(),
    "mistral": _Recipe(more=lambda _: {"sliding_window": texts.WINDOW}),
    "qwen2": _Recipe(since_qwen3=False),
    "qwen3_moe": _Recipe(experts=True),
    "gemma2": _Recipe(sdpa=False, more=texts.gemma2_text),
    "gemma3_text": _Recipe(more=texts.gemma3_text),
    "phi3": _Recipe(since_qwen3=False, more=lambda _: {"sliding_window": texts.WINDOW}),
    "olmo3": _Recipe(more=texts.two_ropes),
    "granite": _Recipe(since_qwen3=False, more=texts.granite_text),
    "cohere2": _Recipe(more=texts.cohere2_text),
    "smollm3": _Recipe(since_qwen3=False, more=lambda _: {"no_rope_layer_interval": 2}),
    "glm4_moe": _Recipe(experts=True, more=texts.routed),
    "deepseek_v3": _Recipe(since_qwen3=False, experts=True, more=texts.deepseek_text),
    "lfm2": _Recipe(since_qwen3=False, more=texts.lfm2_text),
    "lfm2_moe": _Recipe(since_qwen3=False, experts=True, more=texts.lfm2_moe_text),
    "gpt_oss": _Recipe(sdpa=False, experts=True, more=texts.gpt_oss_text),
}
"""By `config.model_type`."""
