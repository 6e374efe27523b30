"""Load a model by name: with its own weights if they fit in memory, or a tiny copy of its configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryDirectory
from typing import Any, final

import torch
from safetensors import SafetensorError
from torch import distributed as dist
from torch import nn

from vlmpack.context_parallel.plans import plan_for
from vlmpack.data.processor import load_processor
from vlmpack.errors import ConfigError
from vlmpack.families.family import Family
from vlmpack.families.registry import family_named
from vlmpack.probing.report import one_line
from vlmpack.testing.comparison import of_all_ranks
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


Mesh = Mapping[str, int]
"""Sizes of a mesh: "tp", "fsdp" and "ep" of transformers, which divide the model, and "context"; empty: one rank."""


def load(
    model_id: str, *, device: torch.device, dtype: torch.dtype, tiny: bool = False, mesh: Mesh | None = None
) -> Loaded:
    """Load a model for a probe on `device`.

    Args:
        model_id: hub id or folder.
        device: device of the probe.
        dtype: dtype of the weights.
        tiny: make a tiny copy even if the weights fit.
        mesh: the ranks of this job, over which the model is divided.

    Raises:
        ConfigError: the configuration or the weights cannot be read.
        FamilyError: the family cannot be packed exactly.
    """
    config = read_config(model_id)
    family = family_named(config.model_type)
    mesh = mesh or {}
    reason = "as asked" if tiny else _why_not(model_id, config, family, device, mesh)
    if mesh:  # memory may differ between ranks
        reason = max(of_all_ranks(reason))
    over = described(mesh)
    if reason:
        model = tiny_model(family.model_type, dtype=dtype, like=config)
        weights = f"a tiny copy with random weights{over}: {reason}"
        return Loaded(model=placed(model, device, mesh), processor=None, weights=weights)
    settings = {"distributed_config": _on_mesh(config, mesh)} if _dividing(mesh) else {}
    try:
        model = auto_class(family).from_pretrained(model_id, dtype=dtype, **settings)
    except UNREADABLE as error:
        message = f"{model_id}: its weights cannot be read; --tiny probes a small copy. {one_line(error)}"
        raise ConfigError(message) from error
    processor = _processor(model_id) if family.has_vision else None
    model = model if settings else model.to(device)
    return Loaded(model=model, processor=processor, weights=f"its own weights{over}")


def placed(model: Any, device: torch.device, mesh: Mesh) -> Any:
    """Return a small model on a device, or as transformers loads it onto a mesh."""
    if not _dividing(mesh):
        return model.to(device)
    auto = auto_class(family_named(model.config.model_type))
    with TemporaryDirectory() as own:
        folder = of_all_ranks(own)[0]  # on one machine; rank 0 alone writes
        model.save_pretrained(folder)
        dist.barrier()
        model = auto.from_pretrained(folder, dtype=model.dtype, distributed_config=_on_mesh(model.config, mesh))
        dist.barrier()
    return model


def described(mesh: Mesh) -> str:
    """Say after "weights" how ranks divide them."""
    return ", divided over " + ",".join(f"{name}={size}" for name, size in mesh.items()) if mesh else ""


def _dividing(mesh: Mesh) -> dict[str, int]:
    return {name: size for name, size in mesh.items() if name != "context"}


def _on_mesh(config: Any, mesh: Mesh) -> Any:
    from transformers.distributed.configuration_utils import DistributedConfig

    plan = plan_for(config, tp_size=mesh["tp"]) if "tp" in mesh else None
    sizes: Any = {f"{name}_size": size for name, size in _dividing(mesh).items()}
    return DistributedConfig(**sizes, tp_plan=plan)


def read_config(model_id: str) -> Any:
    """Read the configuration of a hub id or folder.

    Raises:
        ConfigError: there is no readable configuration.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model_id)
    except (OSError, ValueError) as error:
        is_adapter = (Path(model_id) / "adapter_config.json").is_file()
        fault = "adapters without their model" if is_adapter else "no configuration can be read there"
        message = f"{model_id}: {fault}; give a hub id or a folder with a whole model. {one_line(error)}"
        raise ConfigError(message) from error


def _processor(model_id: str) -> Any:
    try:
        return load_processor(model_id)
    except (OSError, ValueError):  # a folder without a processor: the probe uses random ids and pixels
        return None


def _why_not(model_id: str, config: Any, family: Family, device: torch.device, mesh: Mesh) -> str:
    """Return the reason for a tiny copy; "": the model's own weights fit."""
    folder = Path(model_id)
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES):
        return "the folder holds no weights"
    count = count_weights(config, family)
    ranks = prod(size for name, size in mesh.items() if name in ("tp", "fsdp"))
    needed, free = BYTES_A_WEIGHT * count // ranks + SPARE, free_bytes(device)
    if free is not None and mesh and device.type == "cpu":
        free //= int(os.environ["LOCAL_WORLD_SIZE"])
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
