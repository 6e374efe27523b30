"""Tiny models: the model classes of the installed transformers, with small sizes and random weights.

Nothing is downloaded and nothing is mocked: windows, deepstack, rotary positions and experts are the real ones.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vlmpack.errors import ConfigError, FamilyError
from vlmpack.families.family import Family
from vlmpack.families.registry import FAMILIES
from vlmpack.testing.recipes import (
    AUDIO_TOKENS,
    MEDIA_TOKENS,
    RECIPES,
    SETTINGS,
    ConfigPart,
    Recipe,
    TinySizes,
    layer_types,
    sections,
)

DEFAULT_FAMILY = "qwen3_vl"
"""The default family of tiny models and processors."""


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
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = tiny_config(family, processor=processor, like=like, **sizes)
    auto = AutoModelForImageTextToText if FAMILIES[family].has_vision else AutoModelForCausalLM
    if attn_implementation == "sdpa" and not recipe_of(family).sdpa:
        attn_implementation = "eager"
    # without devices, fork_rng touches only the CPU's generator; torch.manual_seed would seed all devices
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = auto.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
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


def patch_size_of(family: str) -> int:
    """Return the side of a patch in pixels: 16 from Qwen3-VL on, 14 in other families with grids, 6 in tiles."""
    return 6 if not FAMILIES[family].has_grids else 16 if recipe_of(family).any_width else 14


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
    if not recipe_of(name).any_width and width * sizes.heads != sizes.hidden:
        raise ConfigError(f"{name} needs head_dim * heads == hidden, got {width} * {sizes.heads} != {sizes.hidden}")
    if family.has("experts") and sizes.hidden % 8:
        raise ConfigError(f"hidden={sizes.hidden} must be a multiple of 8: experts multiply rows of whole 16 bytes")
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
                elif name == "sinks":
                    _draw(weight, 1.0, generator)
                elif name == "e_score_correction_bias":  # is added to probabilities
                    _draw(weight, 0.1, generator)
                elif weight.ndim > 1:
                    _draw(weight, weight.shape[-1] ** -0.5, generator)
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

    whole, recipe = AutoConfig.for_model(family), recipe_of(family)
    if not FAMILIES[family].has_vision:
        return {"text": whole.to_dict()}
    types = {"text": recipe.text_type, "vision": recipe.vision_type, "audio": None}
    parts: dict[Any, Any] = {
        name: AutoConfig.for_model(kind) if kind else getattr(whole, f"{name}_config", None)
        for name, kind in types.items()
    }
    return {name: part.to_dict() for name, part in {**parts, "whole": whole}.items() if part is not None}


def _settings(sizes: TinySizes, family: str) -> dict[str, Any]:
    """Return the settings that make the configuration tiny: those that it has by default, and the recipe's."""
    recipe, parts = recipe_of(family), dict[str, dict[str, Any]]()
    for name, defaults in _defaults(family).items():
        by_size = {key: x for key, x in SETTINGS[name](sizes).items() if defaults.get(key) is not None}
        always = _text(sizes, FAMILIES[family], defaults) if name == "text" else {}
        parts[name] = by_size | always | getattr(recipe, name)(sizes)
    if "whole" not in parts:
        return parts["text"]
    for name, kind in (("text", recipe.text_type), ("vision", recipe.vision_type)):
        parts[name] |= {"model_type": kind} if kind else {}
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
    any_width, is_hybrid = recipe_of(family.model_type).any_width, family.has("gated_delta")
    if is_hybrid:
        rope["partial_rotary_factor"] = 0.5
    if family.has_vision and (family.positions_rule.axes == 3 or is_hybrid):
        rope |= {"mrope_interleaved": True} if any_width else {}
        rope = sections(rope, sizes.head_width // (4 if is_hybrid else 2))
    if any_width:
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
