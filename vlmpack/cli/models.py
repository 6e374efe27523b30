"""Load processors and models by name: a hub id, a folder, or "tiny:FAMILY", which makes a small random model."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryDirectory
from typing import Any, final

import torch
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from torch import distributed as dist
from transformers import AutoConfig, AutoTokenizer

from vlmpack.cli.options import ModelOptions
from vlmpack.collate.processor_metadata import parts_of
from vlmpack.context_parallel.mesh import gathered
from vlmpack.context_parallel.plans import plan_for
from vlmpack.data.processor import WHOLE, is_saved_alone, load_processor
from vlmpack.errors import ConfigError, check_extra
from vlmpack.families.family import Family
from vlmpack.families.registry import family_named, family_of
from vlmpack.terminal import quiet_transformers
from vlmpack.testing.models import DEFAULT_FAMILY, tiny_config, tiny_model
from vlmpack.testing.processors import CHAT_TEMPLATE, processor_families, tiny_processor

BYTES_A_WEIGHT = 12
"""Bytes per weight that a probe needs: weight, gradient and reference gradient in float32. With bfloat16 weights, the
float32 copy needs this memory."""
SPARE = 1 << 30
"""Memory for activations, in bytes."""
WEIGHT_FILES = ("*.safetensors", "*.bin")
UNREADABLE = (OSError, RuntimeError, ValueError, EOFError, UnpicklingError, SafetensorError)
"""Errors of transformers, safetensors and torch for files that are truncated, or of another format or shape."""
REFUSALS: Any = (ValueError, TypeError, KeyError, ImportError, RuntimeError, re.error, *HfHubHTTPError.__bases__)
"""Errors of transformers, PEFT and the hub about settings."""


@contextmanager
def reading(option: str, name: str, *, remedy: str = "give a hub id or the folder of a model") -> Iterator[None]:
    """Turn errors of transformers about reading `name` into an error that names the option.

    Raises:
        ConfigError: it is a file, cannot be read, or transformers does not support the model.
    """
    if (path := Path(name).expanduser()).is_file():
        raise ConfigError(f"{option} {name} is a file; give its folder: {path.parent}")
    try:
        yield
    except UNREADABLE as error:
        raise ConfigError(f"{option} {name} cannot be read ({_one_line(error)}); {remedy}") from error


@contextmanager
def refused_as(what: str) -> Iterator[None]:
    """Turn errors of other libraries about settings into a ConfigError that begins with `what`."""
    try:
        yield
    except REFUSALS as error:
        raise ConfigError(f"{what}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


# ---------------------------------------------------------------------- processors


def tiny_family(name: str) -> str | None:
    """Return the family of a built-in model, "tiny" or "tiny:FAMILY"; None: the name is a hub id or a folder.

    Raises:
        FamilyError: the family is unknown.
    """
    tiny, _, family = name.partition(":")
    return family_named(family or DEFAULT_FAMILY).model_type if tiny == "tiny" else None


def named_processor(name: str) -> Any:
    """Load a processor, or the tokenizer of a text model: of a hub id, a folder, or a built-in model.

    Raises:
        ConfigError: nothing of that name exists. FamilyError: the model's family is not supported.
    """
    if (family := tiny_family(name)) is not None:
        if family_named(family).has_vision:
            return tiny_processor(family)
        tokenizer = tiny_processor().tokenizer
        tokenizer.chat_template = CHAT_TEMPLATE
        return tokenizer
    remedy = "give a hub id, a folder with config.json and tokenizer, or tiny for a built-in one"
    with reading("processor", name, remedy=remedy), quiet_transformers():
        if is_saved_alone(name):
            return load_processor(name)
        model_type = AutoConfig.from_pretrained(name).model_type
        has_vision = family_named(WHOLE.get(model_type, model_type)).has_vision
        return load_processor(name) if has_vision else AutoTokenizer.from_pretrained(name)


def limit_pixels(processor: Any, max_pixels: int | None) -> Any:
    """Return a copy of a processor with this maximum image area in pixels; None: the processor itself.

    Raises:
        ConfigError: the processor takes no images, is not limited by area, or enlarges all images beyond it.
    """
    if max_pixels is None:
        return processor
    processor, option = deepcopy(processor), f"--max-pixels {max_pixels}"
    images = parts_of(processor).image_processor
    if images is None:
        raise ConfigError(f"{option}: a text model has no images; leave it out")
    size = {name: value for name, value in dict(images.size).items() if value}
    if set(size) != {"shortest_edge", "longest_edge"}:
        raise ConfigError(
            f"{option}: a {type(images).__name__} resizes images by {size}, not by area; set the size in its "
            "preprocessor_config.json"
        )
    least = size["shortest_edge"]
    if max_pixels < least:
        raise ConfigError(f"{option}: the processor enlarges images to at least {least} pixels")
    images.size = type(images.size)(shortest_edge=least, longest_edge=max_pixels)
    return processor


# ---------------------------------------------------------------------- models to train


def read_config(name: str) -> Any:
    """Return the configuration of a hub id, a folder, or a built-in model.

    Raises:
        ConfigError: there is no readable configuration. FamilyError: the built-in model's family is unknown.
    """
    if (family := tiny_family(name)) is not None:
        return tiny_config(family)
    with reading("model", name, remedy="give a hub id or a folder with a whole model"):
        return AutoConfig.from_pretrained(name)


def open_model(name: str, processor: Any, dtype: torch.dtype, *, only_shapes: bool = False) -> Any:
    """Load a model with its head, or make a built-in one for this processor, or tokenizer of a text model.

    Args:
        name: hub id, folder, or name of a built-in model.
        processor: its processor.
        dtype: dtype of the weights.
        only_shapes: make a model that is not built in on the meta device, without weights.

    Raises:
        ConfigError: it cannot be read. FamilyError: it cannot be packed exactly.
    """
    if tiny := tiny_family(name):
        has_vision = family_named(tiny).has_vision
        if has_vision and not hasattr(processor, "tokenizer"):
            raise ConfigError(f"the processor is of a text model, and {name} takes images; leave the processor out")
        sizes: dict[str, Any] = {"processor": processor} if has_vision else {"vocab_size": len(processor)}
        return tiny_model(tiny, dtype=dtype, **sizes)
    config = read_config(name)
    auto = family_named(config.model_type).auto_class
    with torch.device("meta" if only_shapes else "cpu"), reading("model", name):
        return auto.from_config(config, dtype=dtype) if only_shapes else auto.from_pretrained(name, dtype=dtype)


def make_model(options: ModelOptions, processor: Any, *, only_shapes: bool = False) -> Any:
    """Load the model and add adapters; `only_shapes` makes it on the meta device, without weights.

    Raises:
        ConfigError: it cannot be read. FamilyError: it cannot be packed exactly.
    """
    dtype = options.dtype or ("bfloat16" if options.method == "lora" and torch.cuda.is_available() else "float32")
    model = open_model(options.model, processor, getattr(torch, dtype), only_shapes=only_shapes)
    family = family_of(model)
    frozen = family.vision_path if options.freeze_vision else None
    if options.method == "full":
        if frozen:
            model.get_submodule(frozen).requires_grad_(False)
        return model
    check_extra("peft", "peft", needed_by="method=lora")
    from peft import LoraConfig, get_peft_model

    targets: Any = options.lora_targets
    if targets == "all-linear":  # PEFT's own also adapts experts and routers
        parts = tuple(f"{path}." for path in {family.text_path, None if frozen else family.vision_path} if path)
        layers = (name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear))
        targets = [name for name in layers if name.startswith(parts)]
    with refused_as(f"lora_targets {options.lora_targets}"):
        config = LoraConfig(
            r=options.lora_rank,
            lora_alpha=2 * options.lora_rank if options.lora_alpha is None else options.lora_alpha,
            lora_dropout=options.lora_dropout,
            target_modules=targets,
            exclude_modules=rf"{frozen}\..*" if frozen else None,
        )
        return get_peft_model(model, config)


# ---------------------------------------------------------------------- models to probe

Mesh = Mapping[str, int]
"""Sizes of a mesh: "tp", "fsdp" and "ep" of transformers, which divide the model, and "context"; empty: one rank."""


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


def load(
    name: str, *, device: torch.device, dtype: torch.dtype, tiny: bool = False, mesh: Mesh | None = None
) -> Loaded:
    """Load a model for a probe on `device`: its own weights if they fit, or a tiny copy of its configuration.

    Args:
        name: hub id, folder, or name of a built-in model.
        device: device of the probe.
        dtype: dtype of the weights.
        tiny: make a tiny copy even if the weights fit.
        mesh: the ranks of this job, over which the model is divided.

    Raises:
        ConfigError: the configuration or the weights cannot be read.
        FamilyError: the family cannot be packed exactly.
    """
    mesh, processor = mesh or {}, None
    dividing = {axis: size for axis, size in mesh.items() if axis != "context"}
    over = ", divided over " + ",".join(f"{axis}={size}" for axis, size in mesh.items()) if mesh else ""
    if built_in := tiny_family(name):
        processor = tiny_processor(built_in) if built_in in processor_families() else None
        model = placed(tiny_model(built_in, dtype=dtype, processor=processor), device, dividing)
        return Loaded(model=model, processor=processor, weights=f"random weights{over}")
    config = read_config(name)
    family = family_named(config.model_type)
    reason = "as asked" if tiny else _why_not(name, config, family, device, mesh)
    if reason := max(gathered(reason)):  # free memory may differ between ranks
        model = placed(tiny_model(family.model_type, dtype=dtype, like=config), device, dividing)
        return Loaded(model=model, processor=None, weights=f"a tiny copy with random weights{over}: {reason}")
    settings = {"distributed_config": _on_mesh(config, dividing)} if dividing else {}
    with reading("the weights of", name, remedy="--tiny probes a small copy"):
        model = family.auto_class.from_pretrained(name, dtype=dtype, **settings)
    with suppress(OSError, ValueError):  # without a processor, the probe uses random ids and pixels
        processor = load_processor(name) if family.has_vision else None
    return Loaded(model=model if settings else model.to(device), processor=processor, weights=f"its own weights{over}")


def placed(model: Any, device: torch.device, dividing: Mesh) -> Any:
    """Return a small model on a device, or as transformers loads it onto a mesh with these sizes."""
    if not dividing:
        return model.to(device)
    auto = family_named(model.config.model_type).auto_class
    with TemporaryDirectory() as own:
        folder = gathered(own)[0]  # on one machine; rank 0 alone writes
        model.save_pretrained(folder)
        dist.barrier()
        model = auto.from_pretrained(folder, dtype=model.dtype, distributed_config=_on_mesh(model.config, dividing))
        dist.barrier()
    return model


def _on_mesh(config: Any, dividing: Mesh) -> Any:
    from transformers.distributed.configuration_utils import DistributedConfig

    plan = plan_for(config, tp_size=dividing["tp"]) if "tp" in dividing else None
    sizes: Any = {f"{name}_size": size for name, size in dividing.items()}
    return DistributedConfig(**sizes, tp_plan=plan)


# ---------------------------------------------------------------------- memory


def _why_not(name: str, config: Any, family: Family, device: torch.device, mesh: Mesh) -> str:
    """Return the reason for a tiny copy; "": the model's own weights fit."""
    folder = Path(name)
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES):
        return "the folder holds no weights"
    count = count_weights(config, family)
    ranks = prod(size for axis, size in mesh.items() if axis in ("tp", "fsdp"))
    needed, free = BYTES_A_WEIGHT * count // ranks + SPARE, free_bytes(device)
    if free is None:
        return f"how much memory is free is unknown here, and its {count / 1e9:.2f} billion weights need it"
    if mesh and device.type == "cpu":
        free //= int(os.environ["LOCAL_WORLD_SIZE"])
    if needed > free:
        gib = [f"{x / 2**30:.0f} GiB" for x in (needed, free)]
        return f"its {count / 1e9:.2f} billion weights need {gib[0]} with gradients and a reference, {gib[1]} are free"
    return ""


def count_weights(config: Any, family: Family) -> int:
    """Count the model's parameters without allocating them."""
    with torch.device("meta"):
        return family.auto_class.from_config(config).num_parameters()


def free_bytes(device: torch.device, container: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the free memory, in bytes, of a GPU, or of this machine or container; None: it is not reported.

    `container` is the folder of its limits (cgroup v2).
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free: list[int] = []
    meminfo, limit = Path("/proc/meminfo"), container / "memory.max"
    if meminfo.exists():
        free += [1024 * int(size) for size in re.findall(r"MemAvailable:\s*(\d+)", meminfo.read_text(encoding="ascii"))]
    if limit.exists() and (most := limit.read_text(encoding="ascii").strip()) != "max":
        free.append(int(most) - int((container / "memory.current").read_text(encoding="ascii")))
    return min(free, default=None)
