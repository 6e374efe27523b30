"""A small random model with the peculiarities of a given one: what is probed where its weights do not fit."""

from __future__ import annotations

from typing import Any

import torch

from vlmpack.families import Family, family_named
from vlmpack.testing import TinySizes

LAYERS, HEADS, EXPERTS = 2, 2, 8
WIDTH = 16
"""Channels a head of an expert."""


def small_copy(model_id: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A random model of the class that `model_id` names, on the CPU.

    Head widths, rotary settings, patches, windows, convolutions, biases and activations are the model's own. Layers (of
    each kind one), heads, experts and vocabulary are few, and the weights random: only the configuration is read.

    Raises:
        FamilyError: the family cannot be packed exactly, and what would leak.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_id)
    family = family_named(config.model_type)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        small = type(config).from_dict(shrink(config.to_dict()))
        return auto_class(family).from_config(small, dtype=dtype, attn_implementation="sdpa")


def auto_class(family: Family) -> Any:
    """What loads a model of this family, with its head."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if family.has_vision else AutoModelForCausalLM


def shrink(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration, as a dictionary, with few layers, heads, experts and token ids."""
    sizes = TinySizes()
    kept = {name: value for name, value in config.items() if name != "quantization_config"}
    if "vision_config" not in kept:
        return _shrink_text(kept, sizes)
    text = _shrink_text(kept["text_config"], sizes)
    return {
        **kept,
        "text_config": text,
        "vision_config": _shrink_vision(kept["vision_config"], text["hidden_size"]),
        **sizes.media_tokens,
    }


def _shrink_text(text: dict[str, Any], sizes: TinySizes) -> dict[str, Any]:
    head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    grouped = text["num_key_value_heads"] < text["num_attention_heads"]
    return {
        **text,
        "hidden_size": HEADS * head_dim,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1 if grouped else HEADS,
        "vocab_size": sizes.vocab_size,
        "pad_token_id": sizes.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": sizes.eos_token_id,
        **_where_there("intermediate_size", text, 2 * HEADS * head_dim),
        **_shrink_layer_types(text),
        **_shrink_delta(text),
        **_shrink_experts(text),
        **_shrink_sparse(text),
        **_shrink_ngrams(text),
    }


def _where_there(name: str, given: dict[str, Any], value: Any) -> dict[str, Any]:
    return {name: value} if name in given else {}


def _shrink_layer_types(text: dict[str, Any]) -> dict[str, Any]:
    """One layer of each kind, in order of first appearance; `LAYERS` of them if there is a single kind."""
    if not text.get("layer_types"):
        return {}
    kinds = list(dict.fromkeys(text["layer_types"]))
    chosen = kinds if len(kinds) > 1 else kinds * LAYERS
    return {"layer_types": chosen, "num_hidden_layers": len(chosen)}


def _shrink_delta(text: dict[str, Any]) -> dict[str, Any]:
    if "linear_num_key_heads" not in text:
        return {}
    shared = text["linear_num_value_heads"] // text["linear_num_key_heads"]
    return {"linear_num_key_heads": HEADS, "linear_num_value_heads": HEADS * shared}


def _shrink_experts(text: dict[str, Any]) -> dict[str, Any]:
    """transformers writes the number of experts as `num_local_experts`."""
    if "moe_intermediate_size" not in text:
        return {}
    counts = {name: min(text[name], EXPERTS) for name in ("num_experts", "num_local_experts") if name in text}
    return {
        **counts,
        "num_experts_per_tok": min(text["num_experts_per_tok"], EXPERTS // 2),
        "moe_intermediate_size": HEADS * WIDTH,
        **_where_there("shared_expert_intermediate_size", text, HEADS * WIDTH),
        **_where_there("mlp_only_layers", text, []),
        **_where_there("decoder_sparse_step", text, 1),
    }


def _shrink_sparse(text: dict[str, Any]) -> dict[str, Any]:
    """A budget so small that even the samples of a probe have to choose among their blocks."""
    if not text.get("indexer_compress_ratio"):
        return {}
    return {"indexer_compress_ratio": 2, "indexer_budget": 8}


def _shrink_ngrams(text: dict[str, Any]) -> dict[str, Any]:
    """The tables of n-grams hold more weights than all the rest; streams between layers are mixed at low rank."""
    if "hc_lowrank" not in text:
        return {}
    kinds = _shrink_layer_types(text)["layer_types"]
    return {
        "hc_lowrank": WIDTH,
        "ple_layer_ids": [kinds.index("linear_attention") + 1] if text["ple_layer_ids"] else [],
        "ple_embed_dim": (text["ngram_size"] - 1) * text["heads_per_ngram"] * WIDTH,
        "ngram_vocab_size_base": 97,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1,
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
