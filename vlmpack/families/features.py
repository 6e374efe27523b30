"""What a vision tower gives to its text model, as one tensor: so that it can be sent, and handed on elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class MediaFeatures:
    """The fields that transformers' models read of what `get_image_features` and `get_video_features` give back."""

    pooler_output: tuple[torch.Tensor, ...]
    """[n, D] of each image: they take the place of its tokens' embeddings."""
    deepstack_features: list[torch.Tensor | tuple[torch.Tensor, ...]]
    """Of each of the first text layers, after which they are added, [n, D] of all images or of each; in most families
    of none."""


@final
@dataclass(frozen=True, kw_only=True)
class FeatureForm:
    """How a family's features become one tensor [n, D (1 + L)], those of L levels of deepstack beside the first, and
    features again."""

    width: int
    """D."""
    cut_by_image: bool
    """Whether levels of deepstack are a tensor for each image, as in transformers 5.23; in 5.17 they are one."""

    @classmethod
    def of(cls, features: Any) -> FeatureForm:
        """The form of what a model's own `get_image_features` gave."""
        deep = getattr(features, "deepstack_features", None) or ()
        return cls(
            width=features.pooler_output[0].shape[-1],
            cut_by_image=not all(isinstance(level, torch.Tensor) for level in deep),
        )

    def join(self, features: Any) -> torch.Tensor:
        """Features to one tensor."""
        deep = getattr(features, "deepstack_features", None) or ()
        levels = [torch.cat(level) if self.cut_by_image else level for level in deep]
        return torch.cat([torch.cat(features.pooler_output), *levels], -1)

    def split(self, levels: torch.Tensor) -> MediaFeatures:
        """The inverse, as if it all were one image."""
        pooled, *deep = levels.split(self.width, -1)
        return MediaFeatures(
            pooler_output=(pooled,),
            deepstack_features=[(level,) if self.cut_by_image else level for level in deep],
        )


def media_features(backbone: nn.Module, pixels_PC: torch.Tensor, grids: torch.Tensor, **kwargs: Any) -> Any:
    """The features of images or videos (their tower knows no difference), as the family's own function gives them.

    Args:
        backbone: the model without its head.
        pixels_PC: patches.
        grids: int64 [N, 3], (frames, rows, columns) of patches.
        **kwargs: for every layer of the tower.
    """
    own: Any = backbone.get_image_features
    return own(pixels_PC, grids, return_dict=True, **kwargs)
