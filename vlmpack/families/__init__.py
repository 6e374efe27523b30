"""Model families as data: rotary positions, tokens per image, and the submodules of each model."""

from __future__ import annotations

from vlmpack.families.family import Family
from vlmpack.families.media import media_of_row, media_reader
from vlmpack.families.registry import family_named, family_of

__all__ = ["Family", "family_named", "family_of", "media_of_row", "media_reader"]
