"""Qwen3-VL and Qwen3.5, dense and as mixtures of experts: one way to place videos."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from vlmpack.families.base import Family
from vlmpack.families.delta import Delta
from vlmpack.families.experts import Experts
from vlmpack.families.mrope import MediaItems, media_items
from vlmpack.layout import Grid


class FramesApart(Family):
    """Every frame of a video is a run of its own, as if it were an image; time stamps are text between."""

    def _videos(self, grids: Sequence[Grid], seconds: Sequence[float], config: Any) -> MediaItems:
        videos = media_items(grids, self.merge(config), "video")
        frames = np.repeat(videos.grids * (0, 1, 1) + (1, 0, 0), videos.grids[:, 0], axis=0)
        medium = np.repeat(videos.medium, videos.grids[:, 0])
        return MediaItems(grids=frames, interval=np.ones(len(frames), np.float32), medium=medium)


@final
@dataclass(frozen=True, kw_only=True)
class Qwen3VL(FramesApart):
    """Qwen3-VL: every frame of a video is a run of its own, as if it were an image; time stamps are text between."""

    model_type: ClassVar[str] = "qwen3_vl"
    model_class: ClassVar[str] = "Qwen3VLForConditionalGeneration"


@final
@dataclass(frozen=True, kw_only=True)
class Qwen3VLMoe(FramesApart):
    """Qwen3-VL-MoE: Qwen3-VL with experts in the layers of its text model."""

    model_type: ClassVar[str] = "qwen3_vl_moe"
    model_class: ClassVar[str] = "Qwen3VLMoeForConditionalGeneration"
    experts: ClassVar[Experts | None] = Experts(modelling="transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe")


@final
@dataclass(frozen=True, kw_only=True)
class Qwen35(FramesApart):
    """Qwen3.5: three of four layers of its text model are gated delta layers."""

    model_type: ClassVar[str] = "qwen3_5"
    model_class: ClassVar[str] = "Qwen3_5ForConditionalGeneration"
    delta: ClassVar[Delta | None] = Delta(modelling="transformers.models.qwen3_5.modeling_qwen3_5")


@final
@dataclass(frozen=True, kw_only=True)
class Qwen35Moe(FramesApart):
    """Qwen3.5-MoE: Qwen3.5 with experts, one of them shared by all tokens, in every layer."""

    model_type: ClassVar[str] = "qwen3_5_moe"
    model_class: ClassVar[str] = "Qwen3_5MoeForConditionalGeneration"
    delta: ClassVar[Delta | None] = Delta(modelling="transformers.models.qwen3_5_moe.modeling_qwen3_5_moe")
    experts: ClassVar[Experts | None] = Experts(modelling="transformers.models.qwen3_5_moe.modeling_qwen3_5_moe")
