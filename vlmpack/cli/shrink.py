"""A small random model with the peculiarities of a given one: what `vlmpack doctor --model` probes."""

from __future__ import annotations

from typing import Any

import torch

from vlmpack.families import family_named
from vlmpack.families.tiny import TinySizes

LAYERS, HEADS, EXPERTS = 2, 2, 8


def small_copy(model_id: str, *, seed: int = 0) -> Any:
    """A random model of the class that `model_id` names, in float32 on the CPU.

    Head widths, rotary settings, patches, windows, biases and activations are the model's own; layers, heads,
    experts and vocabulary are few, and the weights random: only the configuration is read from the hub or the disk.

    Raises:
        FamilyError: the family cannot be packed exactly, and what would leak.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(model_id)
    family_named(config.model_type)
    small = type(config).from_dict(shrink(config.to_dict()))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return AutoModelForImageTextToText.from_config(small, dtype=torch.float32, attn_implementation="sdpa")


def shrink(config: dict[str, Any]) -> dict[str, Any]:
    """The dictionary of a Qwen-VL configuration with few layers, heads and token ids."""
    sizes = TinySizes()
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    text = _shrink_text(config["text_config"], sizes)
    return {
        **config,
        "text_config": text,
        "vision_config": _shrink_vision(config["vision_config"], text["hidden_size"]),
        **{name: vars(sizes)[name] for name in ids},
    }


def _shrink_text(text: dict[str, Any], sizes: TinySizes) -> dict[str, Any]:
    head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    grouped = text["num_key_value_heads"] < text["num_attention_heads"]
    small = {
        **text,
        "hidden_size": HEADS * head_dim,
        "intermediate_size": 2 * HEADS * head_dim,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1 if grouped else HEADS,
        "vocab_size": sizes.vocab_size,
        "pad_token_id": sizes.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": sizes.eos_token_id,
    }
    if text.get("layer_types"):
        small["layer_types"] = text["layer_types"][:LAYERS]
    if "moe_intermediate_size" in text:
        small.update(_shrink_experts(text))
    return small


def _shrink_experts(text: dict[str, Any]) -> dict[str, Any]:
    """transformers writes the number of experts as `num_local_experts`."""
    counts = {name: min(text[name], EXPERTS) for name in ("num_experts", "num_local_experts") if name in text}
    return {
        **counts,
        "num_experts_per_tok": min(text["num_experts_per_tok"], EXPERTS // 2),
        "moe_intermediate_size": HEADS * 16,
    }


def _shrink_vision(vision: dict[str, Any], text_width: int) -> dict[str, Any]:
    """`embed_dim` is the tower's width in Qwen2-VL, where `hidden_size` is the text model's; later ones have
    `out_hidden_size` for that."""
    width_key = "embed_dim" if "embed_dim" in vision else "hidden_size"
    width = HEADS * (vision[width_key] // vision["num_heads"])
    changes = {
        "depth": LAYERS,
        "num_heads": HEADS,
        "hidden_size": text_width,
        "out_hidden_size": text_width,
        "intermediate_size": 2 * width,
        "fullatt_block_indexes": [LAYERS - 1],
        "deepstack_visual_indexes": list(range(LAYERS)),
        width_key: width,
    }
    return {**vision, **{name: value for name, value in changes.items() if name in vision}}
