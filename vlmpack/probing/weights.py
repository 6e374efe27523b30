"""Load a model by name: with its own weights if they fit in memory, or a tiny copy of its configuration."""

from __future__ import annotations

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
from vlmpack.testing.models import tiny_model

BYTES_A_WEIGHT = 12
"""Bytes per weight that a probe needs: weight, gradient and reference gradient in float32. With bfloat16 weights, the
float32 copy needs this memory."""
SPARE = 1 << 30
"""Memory for activations, in bytes."""
WEIGHT_FILES = ("*.safetensors", "*.bin")
UNREADABLE = (OSError, RuntimeError, ValueError, EOFError, UnpicklingError, SafetensorError)
"""Errors of transformers, safetensors and torch for files that are truncated, or of another format or shape."""


@final
@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model to probe."""

    model: Any
    """The model, with its head."""
    processor: Any
    """The model's processor; None: there is none, or the model is a tiny copy, which it does not fit."""
    weights: str
    """Readable description of where the weights come from."""


def load(model_id: str, *, device: torch.device, dtype: torch.dtype, tiny: bool = False) -> Loaded:
    """Load a model for a probe on `device`.

    Args:
        model_id: hub id or folder.
        device: device of the probe.
        dtype: dtype of the weights.
        tiny: make a tiny copy even if the weights fit.

    Raises:
        ConfigError: the configuration or the weights cannot be read.
        FamilyError: the family cannot be packed exactly.
    """
    config = read_config(model_id)
    family = family_named(config.model_type)
    reason = "as asked" if tiny else _why_not(model_id, config, family, device)
    if reason:
        model = tiny_model(family.model_type, dtype=dtype, like=config)
        return Loaded(model=model.to(device), processor=None, weights=f"a tiny copy with random weights: {reason}")
    try:
        model = auto_class(family).from_pretrained(model_id, dtype=dtype)
    except UNREADABLE as error:
        message = f"{model_id}: its weights cannot be read; --tiny probes a small copy. {one_line(error)}"
        raise ConfigError(message) from error
    processor = _processor(model_id) if family.has_vision else None
    return Loaded(model=model.to(device), processor=processor, weights="its own weights")


def read_config(model_id: str) -> Any:
    """Read the configuration of a hub id or folder.

    Raises:
        ConfigError: there is no readable configuration.
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
    except (OSError, ValueError):  # a folder without a processor: the probe uses random ids and pixels
        return None


def _why_not(model_id: str, config: Any, family: Family, device: torch.device) -> str:
    """Return the reason for a tiny copy; "": the model's own weights fit."""
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


def auto_class(family: Family) -> Any:
    """Return the transformers auto class that loads models of this family with their head."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if family.has_vision else AutoModelForCausalLM


def count_weights(config: Any, family: Family) -> int:
    """Count the model's parameters without allocating them."""
    with torch.device("meta"):
        model: nn.Module = auto_class(family).from_config(config)
    return sum(p.numel() for p in model.parameters())


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory, in bytes, of a GPU, or of this machine or container; None: it is not reported."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min((free for free in (_available(), _left_in_container()) if free is not None), default=None)


def _available() -> int | None:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines() if ":" in line)
        if "MemAvailable" in lines:
            return int(lines["MemAvailable"].split()[0]) * 1024
    return None


def _left_in_container(group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the unused part of the container's memory limit (cgroup v2); None: there is no limit."""
    limit, used = group / "memory.max", group / "memory.current"
    if not limit.exists() or not used.exists() or (text := limit.read_text(encoding="ascii").strip()) == "max":
        return None
    return int(text) - int(used.read_text(encoding="ascii"))
