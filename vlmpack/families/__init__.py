"""Model families as data: multimodal rotary positions, tokens per image, where a model's parts are."""

from __future__ import annotations

from vlmpack.families.family import Family
from vlmpack.families.registry import family_named, family_of

__all__ = [
    "Family",
    "family_named",
    "family_of",
]
