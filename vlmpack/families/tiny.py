"""Real Hugging Face Qwen-VL models, small and randomly initialised: for demos, tests, `doctor` and benchmarks.

Nothing is downloaded, and nothing is a stand-in: the classes, the vision tower with its windows or its deepstack,
and the rotary positions are those of the installed transformers. Only the sizes are small.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vlmpack.errors import ConfigError, FamilyError
from vlmpack.families.registry import family_named
from vlmpack.families.tiny_configs import CONFIGS, MEDIA_TOKENS, TinySizes, head_dim, is_hybrid, rotary_dim


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
    """A randomly initialised `...ForConditionalGeneration` (text models: `...ForCausalLM`), on the CPU, in train mode.

    The same arguments give the same weights; the global random state is left as it was.

    Args:
        family: `config.model_type` of a supported family, such as `"qwen3_vl"`, `"qwen3_5_moe"` or `"qwen3"`.
        seed: of the weights.
        dtype: of the weights (rotary frequencies stay float32, as in `from_pretrained`).
        lively: draw weights from N(0, 1 / fan_in) and embeddings from N(0, 1), and let gated delta layers forget
            slowly, so that logits are of order 1 and a leak between samples is as large as the signal. False: the
            family's own initialisation (std 0.02).
        attn_implementation: handed on to transformers.
        processor: take token ids, vocabulary and patch sizes from this Qwen processor.
        **sizes: the fields of `TinySizes`.

    Raises:
        ConfigError: sizes that do not fit together. FamilyError: an unknown family.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = tiny_config(family, processor=processor, **sizes)
    auto = AutoModelForImageTextToText if family_named(family).has_vision else AutoModelForCausalLM
    # fork_rng with no device listed touches the CPU's generator alone; manual_seed would reach all devices.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = auto.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    if lively:
        _enliven(model, torch.Generator().manual_seed(seed))
    return model.train()


def tiny_config(family: str = "qwen3_vl", *, processor: Any = None, **sizes: Any) -> Any:
    """The configuration of `tiny_model`: a real `Qwen2VLConfig`, `Qwen3VLConfig`, ...

    Raises:
        ConfigError: sizes that do not fit together, or one that is not a field of `TinySizes`.
        FamilyError: an unknown family.
    """
    if family not in CONFIGS:
        raise FamilyError(f"no tiny model of family {family!r}; there are {', '.join(CONFIGS)}")
    if unknown := sorted(set(sizes) - set(TinySizes.__dataclass_fields__)):
        raise ConfigError(f"{', '.join(unknown)}: not a size of a tiny model; see TinySizes for those there are")
    settings = {**_sizes_of(processor), **sizes} if processor is not None else sizes
    chosen = TinySizes(**settings)
    if chosen.patch_size is None:
        chosen = replace(chosen, patch_size=16 if family.startswith(("qwen3", "qwen4")) else 14)
    _check(chosen, family)
    return CONFIGS[family](chosen)


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
    width = head_dim(sizes)
    if sizes.heads % sizes.kv_heads:
        raise ConfigError(f"heads={sizes.heads} is not a multiple of kv_heads={sizes.kv_heads}")
    if not family.startswith(("qwen3", "qwen4")) and width * sizes.heads != sizes.hidden:
        raise ConfigError(f"{family} needs head_dim * heads == hidden, got {width} * {sizes.heads} != {sizes.hidden}")
    if family_named(family).has("experts") and sizes.hidden % 8:
        raise ConfigError(f"hidden={sizes.hidden} must be a multiple of 8: experts multiply rows of whole 16 bytes")
    if width % 2 or rotary_dim(sizes, family) < 6:
        raise ConfigError(
            f"head_dim={width} must be even and at least {12 if is_hybrid(family) else 6}: time, height and width "
            "share the part of it that rotates"
        )
    if sizes.vision_hidden % (4 * sizes.vision_heads):
        raise ConfigError(
            f"vision_hidden={sizes.vision_hidden} must be a multiple of 4 * vision_heads={4 * sizes.vision_heads}"
        )
    highest = max(vars(sizes)[name] for name in MEDIA_TOKENS)
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
        if isinstance(log_rate := getattr(module, "A_log", None), torch.Tensor):
            _forget_slowly(log_rate, generator)


@torch.no_grad()
def _draw(weight: torch.Tensor, std: float, generator: torch.Generator) -> None:
    weight.copy_(torch.randn(weight.shape, generator=generator) * std)


@torch.no_grad()
def _forget_slowly(log_rate: torch.Tensor, generator: torch.Generator) -> None:
    """A gated delta layer keeps exp(-rate * softplus(...)) of its state from one token to the next."""
    log_rate.copy_((0.02 + 0.3 * torch.rand(log_rate.shape, generator=generator)).log())
