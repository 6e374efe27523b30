"""A model by name: its own weights where they fit, or a tiny copy of its configuration."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, final

import torch
from safetensors import SafetensorError
from torch import nn

from vlmpack.data.processor import load_processor
from vlmpack.errors import ConfigError
from vlmpack.families.family import Family
from vlmpack.families.registry import family_named
from vlmpack.probing.report import one_line
from vlmpack.testing.models import TinySizes, tiny_model

BYTES_A_WEIGHT = 12
"""Of a probe: weight, gradient and true gradient in float32; in bfloat16 the float32 copy needs the room."""
SPARE = 1 << 30
"""Room for activations, in bytes."""
WEIGHT_FILES = ("*.safetensors", "*.bin")
UNREADABLE = (OSError, RuntimeError, ValueError, EOFError, UnpicklingError, SafetensorError)
"""Errors of transformers, safetensors and torch on files that are cut off, of another kind or of another shape."""


@final
@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model to be probed."""

    model: Any
    """With its head."""
    processor: Any
    """Its own; None: there is none, or it does not fit a tiny copy."""
    weights: str
    """The source of the weights, for people."""


def load(model_id: str, *, device: torch.device, dtype: torch.dtype, tiny: bool = False) -> Loaded:
    """Load a model for a probe on `device`.

    Args:
        model_id: hub id or folder.
        device: where it is to be probed.
        dtype: of the weights.
        tiny: make a tiny copy even if the weights fit.

    Raises:
        ConfigError: nothing can be read there. FamilyError: the family cannot be packed exactly.
    """
    config = read_config(model_id)
    family = family_named(config.model_type)
    reason = "as asked" if tiny else _why_not(model_id, config, family, device)
    if reason:
        model = small_copy(model_id, dtype=dtype)
        what = (
            "a tiny copy" if _can_shrink(config.to_dict()) else f"a tiny {family.model_type} of another configuration"
        )
        return Loaded(model=model.to(device), processor=None, weights=f"{what} with random weights: {reason}")
    try:
        model = auto_class(family).from_pretrained(model_id, dtype=dtype)
    except UNREADABLE as error:
        message = f"{model_id}: its weights cannot be read; --tiny probes a small copy. {one_line(error)}"
        raise ConfigError(message) from error
    processor = _processor(model_id) if family.has_vision else None
    return Loaded(model=model.to(device), processor=processor, weights="its own weights")


def read_config(model_id: str) -> Any:
    """The configuration.

    Raises:
        ConfigError: there is none.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model_id)
    except (OSError, ValueError) as error:
        message = f"{model_id}: no configuration can be read there; give a hub id or a folder. {one_line(error)}"
        raise ConfigError(message) from error


def _processor(model_id: str) -> Any:
    try:
        return load_processor(model_id)
    except (OSError, ValueError):  # a folder with a model alone: random ids and pixels will do
        return None


def _why_not(model_id: str, config: Any, family: Family, device: torch.device) -> str:
    """Return the reason for a tiny copy; empty: the model's own weights fit."""
    folder = Path(model_id)
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES):
        return "the folder holds no weights"
    count = count_weights(config, family)
    needed, free = BYTES_A_WEIGHT * count + SPARE, free_bytes(device)
    if free is None:
        return f"how much memory is free is unknown here, and its {count / 1e9:.2f} billion weights need it"
    if needed > free:
        gib = [f"{x / 2**30:.0f} GiB" for x in (needed, free)]
        return f"its {count / 1e9:.2f} billion weights need {gib[0]} with gradients and a reference, {gib[1]} are free"
    return ""


def count_weights(config: Any, family: Family) -> int:
    """Parameters of the model, of which none is made. Files may hold them in any type; their number is what counts."""
    with torch.device("meta"):
        model: nn.Module = auto_class(family).from_config(config)
    return sum(p.numel() for p in model.parameters())


def free_bytes(device: torch.device) -> int | None:
    """Free memory of the device, or of this machine or the container that it is in; None: the system reports none."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min((free for free in (_available(), _left_in_container()) if free is not None), default=None)


def _available() -> int | None:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines() if ":" in line)
        if "MemAvailable" in lines:
            return int(lines["MemAvailable"].split()[0]) * 1024
    names = os.sysconf_names
    if "SC_PAGE_SIZE" in names and "SC_AVPHYS_PAGES" in names:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return None


def _left_in_container(group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Of a memory limit, version 2 of control groups."""
    limit, used = group / "memory.max", group / "memory.current"
    if not limit.exists() or not used.exists() or (text := limit.read_text(encoding="ascii").strip()) == "max":
        return None
    return int(text) - int(used.read_text(encoding="ascii"))


# ---------------------------------------------------------------------- tiny copies

LAYERS, HEADS, EXPERTS = 2, 2, 8
WIDTH = 16
"""Channels a head of an expert."""


def small_copy(model_id: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A random model of the class that `model_id` names, on the CPU.

    Head widths, rotary settings, patches, windows, convolutions, biases and activations are the model's own. Layers (of
    each kind one), heads, experts and vocabulary are few, and the weights random: only the configuration is read. Of a
    family that hears, or whose vision part or experts have other settings than Qwen-VL's, it is `tiny_model`, whatever
    the configuration.

    Raises:
        FamilyError: the family cannot be packed exactly, and what would leak.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_id)
    family = family_named(config.model_type)
    if not _can_shrink(config.to_dict()):
        return tiny_model(family.model_type, dtype=dtype, seed=seed)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        small = type(config).from_dict(shrink(config.to_dict()))
        return auto_class(family).from_config(small, dtype=dtype)


def auto_class(family: Family) -> Any:
    """Return the class that loads a model of this family, with its head."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if family.has_vision else AutoModelForCausalLM


def _can_shrink(config: dict[str, Any]) -> bool:
    """Return whether `shrink` knows the settings of a configuration."""
    text = config.get("text_config", config)
    of_one_kind = not isinstance(text.get("moe_intermediate_size"), list | tuple)
    return (
        of_one_kind
        and "audio_config" not in config
        and ("vision_config" not in config or {"depth", "num_heads"} <= config["vision_config"].keys())
    )


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
    """Tables of n-grams hold more weights than all the rest. Sparse attention gets a budget so small that even the
    samples of a probe have to choose among their blocks."""
    head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    grouped = text["num_key_value_heads"] < text["num_attention_heads"]
    kinds = _layer_types(text)
    always = {
        "hidden_size": HEADS * head_dim,
        "num_hidden_layers": len(kinds) or LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1 if grouped else HEADS,
        "vocab_size": sizes.vocab_size,
        "pad_token_id": sizes.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": sizes.eos_token_id,
    }
    key_heads, value_heads = text.get("linear_num_key_heads", 1), text.get("linear_num_value_heads", 1)
    ngrams = text.get("ngram_size", 1) - 1
    if_there = {
        "intermediate_size": 2 * HEADS * head_dim,
        "layer_types": kinds or None,
        "linear_num_key_heads": HEADS,
        "linear_num_value_heads": HEADS * value_heads // key_heads,
        **{name: min(text.get(name) or 0, EXPERTS) for name in ("num_experts", "num_local_experts")},
        "num_experts_per_tok": min(text.get("num_experts_per_tok") or 0, EXPERTS // 2),
        "moe_intermediate_size": HEADS * WIDTH,
        "shared_expert_intermediate_size": HEADS * WIDTH,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "hc_lowrank": WIDTH,
        "ple_layer_ids": [kinds.index("linear_attention") + 1] if text.get("ple_layer_ids") else [],
        "ple_embed_dim": ngrams * text.get("heads_per_ngram", 0) * WIDTH,
        "ngram_vocab_size_base": 97,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1,
    }
    sparse = {"indexer_compress_ratio": 2, "indexer_budget": 8} if text.get("indexer_compress_ratio") else {}
    chunked = _chunked(kinds) if text.get("attention_chunk_size") else {}
    return {**text, **always, **{name: value for name, value in if_there.items() if name in text}, **sparse, **chunked}


def _chunked(kinds: Sequence[str]) -> dict[str, Any]:
    """Chunks, and steps of the factors of queries, so short that samples of a probe have several."""
    rotary = [int(kind == "chunked_attention") for kind in kinds]
    widths = {"intermediate_size_mlp": HEADS * WIDTH, "moe_layers": list(range(len(kinds)))}
    return {"attention_chunk_size": 8, "floor_scale": 4, "no_rope_layers": rotary, **widths}


def _layer_types(text: dict[str, Any]) -> list[str]:
    """One layer of each kind, in order of first appearance; `LAYERS` of them if there is a single kind."""
    kinds: list[str] = list(dict.fromkeys(text.get("layer_types") or ()))
    return kinds if len(kinds) > 1 else kinds * LAYERS


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
