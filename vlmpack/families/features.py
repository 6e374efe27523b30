"""What a vision tower gives to its text model, as one tensor: so that it can be sent, and handed on elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn


@final
@dataclass(frozen=True, kw_only=True)
class MediaFeatures:
    """The fields that transformers' models read of what `get_image_features` and `get_video_features` give back."""

    pooler_output: tuple[torch.Tensor, ...]
    """[n, D] of each image: they take the place of its tokens' embeddings."""
    deepstack_features: list[tuple[torch.Tensor, ...]]
    """[n, D] of each image, for each of the first text layers, after which they are added; empty in most families."""

    @classmethod
    def from_levels(cls, levels_nD: torch.Tensor, width: int) -> MediaFeatures:
        """The inverse of `media_levels`; `width` is D."""
        pooled, *deep = levels_nD.split(width, -1)
        return cls(pooler_output=(pooled,), deepstack_features=[(level,) for level in deep])


def media_levels(backbone: nn.Module, pixels_PC: torch.Tensor, grids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """[n, D (1 + L)]: the features of images or videos (their tower knows no difference), those of L levels of
    deepstack beside them.

    Args:
        backbone: the model without its head.
        pixels_PC: patches.
        grids: int64 [N, 3], (frames, rows, columns) of patches.
        **kwargs: for every layer of the tower.
    """
    own: Any = backbone.get_image_features
    output = own(pixels_PC, grids, return_dict=True, **kwargs)
    levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
    return torch.cat([torch.cat(level) for level in levels], -1)
