"""Text models that share their layers with a vision-language family: no vision tower, plain rotary positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import nn

from vlmpack.errors import LayoutError
from vlmpack.families.base import Family
from vlmpack.families.delta import Delta
from vlmpack.families.experts import Experts
from vlmpack.families.mrope import MediaItems, media_items
from vlmpack.layout import Grid


class _TextOnly(Family):
    """A `...ForCausalLM`: one configuration, one tower, one row of positions."""

    has_vision: ClassVar[bool] = False

    def _images(self, grids: Sequence[Grid], config: Any) -> MediaItems:
        self.media_tokens(grids, config)
        return media_items((), 1, "image")

    def _videos(self, grids: Sequence[Grid], seconds: Sequence[float], config: Any) -> MediaItems:
        self.media_tokens(grids, config)
        return media_items((), 1, "video")

    def merge(self, config: Any) -> int:
        """There are no patches: 1."""
        return 1

    def rotary_ids(self, positions: torch.Tensor) -> torch.Tensor:
        """The text row, [1, T]."""
        return positions[0]

    def media_tokens(self, grids: Sequence[Grid], config: Any) -> int:
        """0: there can be no image and no video.

        Raises:
            LayoutError: there are.
        """
        if grids:
            raise LayoutError(f"{self.model_type} is a text model, but the batch has {len(grids)} images or videos")
        return 0

    def media_types(self, input_ids: torch.Tensor, config: Any) -> torch.Tensor:
        """0 for each token, int64 in the shape of `input_ids`."""
        return torch.zeros_like(input_ids)

    def language_model(self, model: nn.Module) -> nn.Module:
        """The model without its head."""
        return self.backbone(model)

    def vision_tower(self, model: nn.Module) -> None:
        """None."""
        return

    def text_config(self, config: Any) -> Any:
        """The configuration itself."""
        return config


@final
@dataclass(frozen=True, kw_only=True)
class Qwen3(_TextOnly):
    """Qwen3: the text model inside Qwen3-VL, with one rotary position a token."""

    model_type: ClassVar[str] = "qwen3"
    model_class: ClassVar[str] = "Qwen3ForCausalLM"


@final
@dataclass(frozen=True, kw_only=True)
class Qwen3Next(_TextOnly):
    """Qwen3-Next: gated delta layers and experts, the forerunner of Qwen3.5-MoE."""

    model_type: ClassVar[str] = "qwen3_next"
    model_class: ClassVar[str] = "Qwen3NextForCausalLM"
    delta: ClassVar[Delta | None] = Delta(modelling="transformers.models.qwen3_next.modeling_qwen3_next")
    experts: ClassVar[Experts | None] = Experts(modelling="transformers.models.qwen3_next.modeling_qwen3_next")
