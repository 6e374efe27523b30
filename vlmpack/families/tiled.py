"""Families whose images are rows of a batch, or tiles, with one rotary position a token: one descriptor each.

Their towers stay as they are. A rule a family counts the placeholder tokens of each tile or image, as its processor
writes them and its model computes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vlmpack.families.family import Family, OneAxis
from vlmpack.families.tiles import Join

Tensors = Mapping[str, torch.Tensor]


def tiled_family(model_type: str, model_class: str, processor: str, **settings: Any) -> Family:
    """A family whose images are rows of a batch or tiles, and whose text part has one position a token."""
    tiled: dict[str, Any] = {
        "positions_rule": OneAxis(),
        "token_types": None,
        "vision_path": "model.vision_tower",
        "vision_boundaries": False,
        "media": {"pixel_values": Join()},
    }
    return Family(model_type=model_type, model_class=model_class, processor=processor, **{**tiled, **settings})


# ---------------------------------------------------------------------- placeholder tokens of tiles and images


def tiles_of_one_size(tensors: Tensors, config: Any) -> Sequence[int]:
    """Every row of `pixel_values` [N, 3, H, W] makes `image_seq_length` tokens."""
    return [config.image_seq_length] * len(tensors["pixel_values"])


# ---------------------------------------------------------------------- the families

TILED = (
    tiled_family("internvl", "InternVLForConditionalGeneration", "InternVLProcessor", tile_tokens=tiles_of_one_size),
)
"""The descriptors."""
