"""Train unmodified Hugging Face models on packed rows: packed == alone, proved on your machine, and faster.

    from vlmpack import VLMCollator, enable_packing

    trainer = Trainer(model=enable_packing(model), data_collator=VLMCollator(processor, layout="packed"), ...)

Each name is imported on first use, so `import vlmpack` is quick and does not import transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlmpack.collate import VLMCollator
    from vlmpack.errors import VlmpackError
    from vlmpack.layout import PackedRow, PaddedBatch, Segments, SlotRule, pack, unpack
    from vlmpack.loading import PackedBatchSampler, PackedStream
    from vlmpack.model import (
        PackedStep,
        StepConfig,
        StepResult,
        ThdStep,
        compile_layers,
        disable_packing,
        enable_packing,
    )
    from vlmpack.plan import Plan, plan_bins
    from vlmpack.probing import probe
    from vlmpack.trainer import PackedTrainer

__version__ = "0.1.0"

__all__ = [
    "PackedBatchSampler",
    "PackedRow",
    "PackedStep",
    "PackedStream",
    "PackedTrainer",
    "PaddedBatch",
    "Plan",
    "Segments",
    "SlotRule",
    "StepConfig",
    "StepResult",
    "ThdStep",
    "VLMCollator",
    "VlmpackError",
    "compile_layers",
    "disable_packing",
    "enable_packing",
    "pack",
    "plan_bins",
    "probe",
    "unpack",
]

_NAMES = {
    "collate": ("VLMCollator",),
    "errors": ("VlmpackError",),
    "layout": ("PackedRow", "PaddedBatch", "Segments", "SlotRule", "pack", "unpack"),
    "loading": ("PackedBatchSampler", "PackedStream"),
    "model": (
        *("PackedStep", "StepConfig", "StepResult", "ThdStep"),
        *("compile_layers", "disable_packing", "enable_packing"),
    ),
    "plan": ("Plan", "plan_bins"),
    "probing": ("probe",),
    "trainer": ("PackedTrainer",),
}
_HOME = {name: f"vlmpack.{package}" for package, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import the package of a public name on first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'vlmpack' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = vars(import_module(_HOME[name]))[name]
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
