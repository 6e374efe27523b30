"""Qwen2-VL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from vlmpack.families.base import Family
from vlmpack.families.mrope import MediaItems, media_items
from vlmpack.layout import Grid


@final
@dataclass(frozen=True, kw_only=True)
class Qwen2VL(Family):
    """Qwen2-VL: a video is one run of tokens, its frames one position apart."""

    model_type: ClassVar[str] = "qwen2_vl"
    model_class: ClassVar[str] = "Qwen2VLForConditionalGeneration"

    def _videos(self, grids: Sequence[Grid], seconds: Sequence[float], config: Any) -> MediaItems:
        return media_items(grids, self.merge(config), "video")
