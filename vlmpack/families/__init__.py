"""Model families as data: multimodal rotary positions, tokens per image, where a model's parts are."""

from __future__ import annotations

from vlmpack.families.family import Family
from vlmpack.families.registry import FAMILIES, check_parts, family_named, family_of
from vlmpack.families.tiny import TinySizes, tiny_config, tiny_model
from vlmpack.families.tiny_configs import MEDIA_TOKENS

__all__ = [
    "FAMILIES",
    "MEDIA_TOKENS",
    "Family",
    "TinySizes",
    "check_parts",
    "family_named",
    "family_of",
    "tiny_config",
    "tiny_model",
]
