"""The model step: a packed row in; loss, log-probabilities and per-sample results out."""

from __future__ import annotations

from vlmpack.model.backbone import pack_backbone
from vlmpack.model.enable import bind_loss_metrics, disable_packing, enable_packing, is_packing
from vlmpack.model.engine import PackingState, StepConfig, packing_state
from vlmpack.model.forward import STEP, StepCall
from vlmpack.model.head import target_logprobs
from vlmpack.model.mechanisms import ModelParts
from vlmpack.model.mechanisms.attention import layer_reaches, spans_in
from vlmpack.model.mechanisms.experts import RouterStatistics, expert_layers
from vlmpack.model.mechanisms.gated_delta_fla import FlaCall, uses_fla
from vlmpack.model.path_attention import attend_along_paths
from vlmpack.model.plain import compile_layers, find_model
from vlmpack.model.result import LossCount, PackedOutput, StepResult, Work
from vlmpack.model.row import CONTEXT
from vlmpack.model.step import PackedStep, RouterLosses, ThdInputs, ThdStep, masked_router_losses

__all__ = [
    "CONTEXT",
    "STEP",
    "FlaCall",
    "LossCount",
    "ModelParts",
    "PackedOutput",
    "PackedStep",
    "PackingState",
    "RouterLosses",
    "RouterStatistics",
    "StepCall",
    "StepConfig",
    "StepResult",
    "ThdInputs",
    "ThdStep",
    "Work",
    "attend_along_paths",
    "bind_loss_metrics",
    "compile_layers",
    "disable_packing",
    "enable_packing",
    "expert_layers",
    "find_model",
    "is_packing",
    "layer_reaches",
    "masked_router_losses",
    "pack_backbone",
    "packing_state",
    "spans_in",
    "target_logprobs",
    "uses_fla",
]
