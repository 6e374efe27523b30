"""Model families as data: rotary positions, tokens per image, and the submodules of each model."""

from __future__ import annotations

from vlmpack.families.family import Family
from vlmpack.families.registry import family_named, family_of

__all__ = [
    "Family",
    "family_named",
    "family_of",
]
