"""What one model family does differently: multimodal rotary positions, tokens per image, where its parts are."""

from __future__ import annotations

from vlmpack.families.base import Family
from vlmpack.families.by_sample import BySample
from vlmpack.families.delta import Delta, keeps_zeros
from vlmpack.families.delta_heads import DeltaHeads
from vlmpack.families.experts import ExpertLayer, Experts
from vlmpack.families.features import FeatureForm, media_features
from vlmpack.families.fla import FlaCall, check_fla, fla_boundaries
from vlmpack.families.qwen2_5_vl import Qwen25VL
from vlmpack.families.qwen2_vl import Qwen2VL
from vlmpack.families.qwen3_vl import Qwen3VL, Qwen3VLMoe, Qwen35, Qwen35Moe
from vlmpack.families.qwen4_exp import Qwen4Exp
from vlmpack.families.registry import FAMILIES, family_named, family_of
from vlmpack.families.resize import grid_from_size
from vlmpack.families.text import Qwen3, Qwen3Next

__all__ = [
    "FAMILIES",
    "BySample",
    "Delta",
    "DeltaHeads",
    "ExpertLayer",
    "Experts",
    "Family",
    "FeatureForm",
    "FlaCall",
    "Qwen2VL",
    "Qwen3",
    "Qwen3Next",
    "Qwen3VL",
    "Qwen3VLMoe",
    "Qwen4Exp",
    "Qwen25VL",
    "Qwen35",
    "Qwen35Moe",
    "check_fla",
    "family_named",
    "family_of",
    "fla_boundaries",
    "grid_from_size",
    "keeps_zeros",
    "media_features",
]
