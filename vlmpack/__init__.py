"""Train unmodified Hugging Face Qwen-VL models on packed rows: packed == alone, proved on your machine, and faster.

    from vlmpack import VLMCollator, enable_packing

    trainer = Trainer(model=enable_packing(model), data_collator=VLMCollator(processor, layout="packed"), ...)

This file is the whole public face. Every name is loaded when it is first used, so that `import vlmpack` costs
nothing and brings in no transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlmpack.collate import Ceiling, VLMCollator
    from vlmpack.context_parallel import Parallel, sum_counts
    from vlmpack.data import ImageLimits, open_dataset
    from vlmpack.errors import BackendError, ConfigError, FamilyError, LayoutError, SampleError, VlmpackError
    from vlmpack.layout import HostMetadata, Media, PackedRow, PaddedBatch, Segments, SlotRule, pack, unpack
    from vlmpack.loading import PackedBatchSampler, PackedStream, RowSettings, StreamPacker
    from vlmpack.model import PackedStep, StepConfig, StepResult, compile_layers, disable_packing, enable_packing
    from vlmpack.plan import Budget, CostModel, LengthTable, Plan, plan_bins
    from vlmpack.probing import probe
    from vlmpack.store import PackedDataset, StoreSettings, measure_lengths, write_rows
    from vlmpack.trainer import Evaluation, PackedTrainer, check_trainer, evaluate, loss_metrics

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "Budget",
    "Ceiling",
    "ConfigError",
    "CostModel",
    "Evaluation",
    "FamilyError",
    "HostMetadata",
    "ImageLimits",
    "LayoutError",
    "LengthTable",
    "Media",
    "PackedBatchSampler",
    "PackedDataset",
    "PackedRow",
    "PackedStep",
    "PackedStream",
    "PackedTrainer",
    "PaddedBatch",
    "Parallel",
    "Plan",
    "RowSettings",
    "SampleError",
    "Segments",
    "SlotRule",
    "StepConfig",
    "StepResult",
    "StoreSettings",
    "StreamPacker",
    "VLMCollator",
    "VlmpackError",
    "check_trainer",
    "compile_layers",
    "disable_packing",
    "enable_packing",
    "evaluate",
    "loss_metrics",
    "measure_lengths",
    "open_dataset",
    "pack",
    "plan_bins",
    "probe",
    "sum_counts",
    "unpack",
    "write_rows",
]

_ROOM = {
    "collate": ("Ceiling", "VLMCollator"),
    "data": ("ImageLimits", "open_dataset"),
    "errors": ("BackendError", "ConfigError", "FamilyError", "LayoutError", "SampleError", "VlmpackError"),
    "layout": ("HostMetadata", "Media", "PackedRow", "PaddedBatch", "Segments", "SlotRule", "pack", "unpack"),
    "store": ("PackedDataset", "StoreSettings", "measure_lengths", "write_rows"),
    "context_parallel": ("Parallel", "sum_counts"),
    "plan": ("Budget", "CostModel", "LengthTable", "Plan", "plan_bins"),
    "probing": ("probe",),
    "model": ("PackedStep", "StepConfig", "StepResult", "compile_layers", "disable_packing", "enable_packing"),
    "loading": ("PackedBatchSampler", "PackedStream", "RowSettings", "StreamPacker"),
    "trainer": ("Evaluation", "PackedTrainer", "check_trainer", "evaluate", "loss_metrics"),
}
_HOME = {name: f"vlmpack.{room}" for room, names in _ROOM.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load a public name from its room the first time somebody asks for it."""
    if name not in _HOME:
        raise AttributeError(f"module 'vlmpack' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = vars(import_module(_HOME[name]))[name]
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
