"""A packed row in; loss, log-probabilities and per-sample results out. Attach to a model, and detach."""

from __future__ import annotations

from vlmpack.step.attach import (
    LossCount,
    PackingState,
    bind_loss_metrics,
    disable_packing,
    enable_packing,
    is_packing,
    packing_state,
)
from vlmpack.step.balance import RouterStatistics
from vlmpack.step.compiling import compile_layers
from vlmpack.step.engine import StepConfig, run_row
from vlmpack.step.forward import PackedOutput, Sink
from vlmpack.step.head import target_logprobs
from vlmpack.step.keys import SINK
from vlmpack.step.models import find_model
from vlmpack.step.packed_step import PackedStep
from vlmpack.step.result import StepResult, Work

__all__ = [
    "SINK",
    "LossCount",
    "PackedOutput",
    "PackedStep",
    "PackingState",
    "RouterStatistics",
    "Sink",
    "StepConfig",
    "StepResult",
    "Work",
    "bind_loss_metrics",
    "compile_layers",
    "disable_packing",
    "enable_packing",
    "find_model",
    "is_packing",
    "packing_state",
    "run_row",
    "target_logprobs",
]
