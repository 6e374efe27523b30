"""Model steps: they take a packed row and return its loss, log-probabilities and per-sample results."""

from __future__ import annotations

from vlmpack.model.distillation import Distillation, topk_divergence
from vlmpack.model.enable import disable_packing, enable_packing, is_packing
from vlmpack.model.engine import StepConfig
from vlmpack.model.head import target_logprobs
from vlmpack.model.loss_count import LossCount
from vlmpack.model.mechanisms.experts import RouterStatistics
from vlmpack.model.plain import compile_layers
from vlmpack.model.result import PackedOutput, StepResult, Work
from vlmpack.model.step import PackedStep
from vlmpack.model.thd import RouterLosses, ThdInputs, ThdStep, masked_router_losses

__all__ = [
    "Distillation",
    "LossCount",
    "PackedOutput",
    "PackedStep",
    "RouterLosses",
    "RouterStatistics",
    "StepConfig",
    "StepResult",
    "ThdInputs",
    "ThdStep",
    "Work",
    "compile_layers",
    "disable_packing",
    "enable_packing",
    "is_packing",
    "masked_router_losses",
    "target_logprobs",
    "topk_divergence",
]
