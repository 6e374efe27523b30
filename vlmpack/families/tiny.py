"""Real Hugging Face Qwen-VL models, small and randomly initialised: for demos, tests, `doctor` and benchmarks.

Nothing is downloaded, and nothing is a stand-in: the classes, the vision tower with its windows or its deepstack,
and the rotary positions are those of the installed transformers. Only the sizes are small.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import nn

from vlmpack.errors import ConfigError, FamilyError


@final
@dataclass(frozen=True, kw_only=True)
class TinySizes:
    """The sizes of a tiny model. Lengths are in tokens or pixels, everything else in channels or counts."""

    hidden: int = 64
    """Width of the text model."""
    layers: int = 2
    """Layers of the text model."""
    heads: int = 4
    """Query heads of the text model."""
    kv_heads: int = 2
    """Key and value heads of the text model."""
    head_dim: int | None = None
    """Width of one head of the text model; None: `hidden // heads`. Qwen2-VL and Qwen2.5-VL know no other value."""
    intermediate: int | None = None
    """Width of the text model's MLP; None: twice `hidden`."""
    experts: int = 8
    """Experts of each layer (Qwen3-VL-MoE only)."""
    experts_per_token: int = 2
    """Experts that each token is sent to (Qwen3-VL-MoE only)."""
    vision_hidden: int = 32
    """Width of the vision tower."""
    vision_depth: int = 2
    """Blocks of the vision tower."""
    vision_heads: int = 2
    """Heads of the vision tower."""
    patch_size: int | None = None
    """Side of a patch in pixels; None: the family's own, 14 (16 for Qwen3-VL and its MoE)."""
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


def tiny_model(
    family: str = "qwen3_vl",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    lively: bool = True,
    attn_implementation: str | dict[str, str] = "sdpa",
    processor: Any = None,
    **sizes: Any,
) -> Any:
    """A randomly initialised `...ForConditionalGeneration` of the family, on the CPU, in train mode.

    The same arguments give the same weights; the global random state is left as it was.

    Args:
        family: `"qwen2_vl"`, `"qwen2_5_vl"`, `"qwen3_vl"` or `"qwen3_vl_moe"`.
        seed: of the weights.
        dtype: of the weights (rotary frequencies stay float32, as in `from_pretrained`).
        lively: draw weights from N(0, 1 / fan_in) and embeddings from N(0, 1), so that logits are of order 1 and a
            leak between samples is as large as the signal. False: the family's own initialisation (std 0.02).
        attn_implementation: handed on to transformers.
        processor: take token ids, vocabulary and patch sizes from this Qwen processor.
        **sizes: the fields of `TinySizes`.

    Raises:
        ConfigError: sizes that do not fit together. FamilyError: an unknown family.
    """
    from transformers import AutoModelForImageTextToText

    config = tiny_config(family, processor=processor, **sizes)
    # fork_rng with no device listed touches the CPU's generator alone; manual_seed would reach all devices.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    if lively:
        _enliven(model, torch.Generator().manual_seed(seed))
    return model.train()


def tiny_config(family: str = "qwen3_vl", *, processor: Any = None, **sizes: Any) -> Any:
    """The configuration of `tiny_model`: a real `Qwen2VLConfig`, `Qwen2_5_VLConfig`, `Qwen3VLConfig` or
    `Qwen3VLMoeConfig`.

    Raises:
        ConfigError: sizes that do not fit together, or one that is not a field of `TinySizes`.
        FamilyError: an unknown family.
    """
    if family not in _CONFIGS:
        raise FamilyError(f"no tiny model of family {family!r}; there are {', '.join(_CONFIGS)}")
    if unknown := sorted(set(sizes) - set(TinySizes.__dataclass_fields__)):
        raise ConfigError(f"{', '.join(unknown)}: not a size of a tiny model; see TinySizes for those there are")
    settings = {**_sizes_of(processor), **sizes} if processor is not None else sizes
    chosen = TinySizes(**settings)
    if chosen.patch_size is None:
        chosen = replace(chosen, patch_size=16 if family.startswith("qwen3") else 14)
    _check(chosen, family)
    return _CONFIGS[family](chosen)


# ---------------------------------------------------------------------- configurations


def _head_dim(sizes: TinySizes) -> int:
    return sizes.head_dim or sizes.hidden // sizes.heads


def _text(sizes: TinySizes, **rope: Any) -> dict[str, Any]:
    """The text model's settings that all families share."""
    axis = _head_dim(sizes) // 2 // 3  # height and width get a third of the frequencies each, time the rest
    section = [_head_dim(sizes) // 2 - 2 * axis, axis, axis]
    return {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate or 2 * sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "max_position_embeddings": sizes.max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section, **rope},
        "bos_token_id": None,
        "eos_token_id": sizes.eos_token_id,
        "pad_token_id": sizes.pad_token_id,
    }


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
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return {name: sizes.__dict__[name] for name in names}


def _qwen2_vl(sizes: TinySizes) -> Any:
    from transformers import Qwen2VLConfig

    vision = {**_vision(sizes), "embed_dim": sizes.vision_hidden, "hidden_size": sizes.hidden, "mlp_ratio": 2}
    return Qwen2VLConfig(text_config=_text(sizes), vision_config=vision, **_tokens(sizes))


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
    return Qwen2_5_VLConfig(text_config=_text(sizes), vision_config=vision, **_tokens(sizes))


def _qwen3_vl(sizes: TinySizes) -> Any:
    from transformers import Qwen3VLConfig

    return Qwen3VLConfig(text_config=_qwen3_text(sizes), vision_config=_qwen3_vision(sizes), **_tokens(sizes))


def _qwen3_vl_moe(sizes: TinySizes) -> Any:
    from transformers import Qwen3VLMoeConfig

    experts = {"num_experts": sizes.experts, "num_experts_per_tok": sizes.experts_per_token}
    text = {**_qwen3_text(sizes), **experts, "moe_intermediate_size": 32}
    return Qwen3VLMoeConfig(text_config=text, vision_config=_qwen3_vision(sizes), **_tokens(sizes))


def _qwen3_text(sizes: TinySizes) -> dict[str, Any]:
    return {**_text(sizes, mrope_interleaved=True), "head_dim": _head_dim(sizes)}


def _qwen3_vision(sizes: TinySizes) -> dict[str, Any]:
    return {
        **_vision(sizes),
        "hidden_size": sizes.vision_hidden,
        "intermediate_size": 2 * sizes.vision_hidden,
        "out_hidden_size": sizes.hidden,
        "num_position_embeddings": 64,
        # one text layer for each: deepstack features are added to the first layers' outputs
        "deepstack_visual_indexes": list(range(min(sizes.vision_depth, sizes.layers)))[:3],
    }


_CONFIGS: dict[str, Callable[[TinySizes], Any]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
}


# ---------------------------------------------------------------------- what is taken from a processor, and checks


def _sizes_of(processor: Any) -> dict[str, Any]:
    """Token ids, vocabulary and patch sizes of a Qwen processor."""
    tokenizer, images = processor.tokenizer, processor.image_processor
    names = {
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
    }
    ids = {field: tokenizer.convert_tokens_to_ids(token) for field, token in names.items()}
    for field, token in names.items():
        if ids[field] is None or ids[field] == tokenizer.unk_token_id:
            raise ConfigError(f"the processor's tokenizer has no {token}; is it a Qwen-VL processor?")
    return {
        **ids,
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "patch_size": images.patch_size,
        "merge": images.merge_size,
        "temporal_patch_size": images.temporal_patch_size,
    }


def _check(sizes: TinySizes, family: str) -> None:
    width = _head_dim(sizes)
    if sizes.heads % sizes.kv_heads:
        raise ConfigError(f"heads={sizes.heads} is not a multiple of kv_heads={sizes.kv_heads}")
    if not family.startswith("qwen3") and width * sizes.heads != sizes.hidden:
        raise ConfigError(f"{family} needs head_dim * heads == hidden, got {width} * {sizes.heads} != {sizes.hidden}")
    if family == "qwen3_vl_moe" and sizes.hidden % 8:
        raise ConfigError(f"hidden={sizes.hidden} must be a multiple of 8: experts multiply rows of whole 16 bytes")
    if width % 2 or width < 6:
        raise ConfigError(f"head_dim={width} must be even and at least 6: time, height and width share it")
    if sizes.vision_hidden % (4 * sizes.vision_heads):
        raise ConfigError(
            f"vision_hidden={sizes.vision_hidden} must be a multiple of 4 * vision_heads={4 * sizes.vision_heads}"
        )
    highest = max(_tokens(sizes).values())
    if highest >= sizes.vocab_size:
        raise ConfigError(f"vocab_size={sizes.vocab_size} does not hold token id {highest}; raise it to {highest + 1}")


def _enliven(model: nn.Module, generator: torch.Generator) -> None:
    """Draw matrices from N(0, 1 / fan_in), embeddings from N(0, 1); norms stay 1 and biases 0.

    Drawn in float32 whatever the weights' dtype, so that models of two dtypes round the same numbers.
    """
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv3d)):
            fan_in = module.weight[0].numel()
            _draw(module.weight, fan_in**-0.5, generator)
        elif isinstance(module, nn.Embedding):
            _draw(module.weight, 1.0, generator)
        else:  # routers and experts hold their matrices [..., out, in] themselves
            for weight in module.parameters(recurse=False):
                if weight.ndim > 1:
                    _draw(weight, weight.shape[-1] ** -0.5, generator)


@torch.no_grad()
def _draw(weight: torch.Tensor, std: float, generator: torch.Generator) -> None:
    weight.copy_(torch.randn(weight.shape, generator=generator) * std)
