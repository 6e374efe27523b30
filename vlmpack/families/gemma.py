"""Gemma's families with vision: image tokens see later ones of their image.

    gemma3            in all layers, within the window of a layer that has one
    gemma4            in layers with a sliding window, in the models whose configuration says so (26B-A4B and 31B)
    gemma4_unified    in all layers, and all of their image beyond the window too (12B)
    paligemma         in all layers, the prompt too, and beyond the window of the second version's layers (on Gemma 2)

Layers that share keys and values, embeddings for each layer, and head widths of their own concern single tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vlmpack.families.family import Rotary
from vlmpack.families.spans import ImageSpans, Prefix
from vlmpack.families.text import capped_logits
from vlmpack.families.tiled import tiled_family
from vlmpack.families.tiles import Join

Tensors = Mapping[str, torch.Tensor]


def _tokens_of_images(tensors: Tensors, config: Any) -> Sequence[int]:
    """Every row of `pixel_values` [N, 3, H, W], a whole image or a crop of one, makes `mm_tokens_per_image` tokens."""
    return [config.mm_tokens_per_image] * len(tensors["pixel_values"])


def _tokens_of_patches(tensors: Tensors, config: Any) -> Sequence[int]:
    """Patches of `pixel_values` [N, P, C] that have a place, `image_position_ids` [N, P, 2], are pooled to tokens."""
    has_place = (tensors["image_position_ids"] != -1).all(-1)
    return (has_place.sum(-1) // config.vision_config.pooling_kernel_size**2).tolist()


def _tokens_of_merged_patches(tensors: Tensors, config: Any) -> Sequence[int]:
    """Patches of `pixel_values` [N, P, C], merged before they come, make a token each if they have a place."""
    return (tensors["image_position_ids"] != -1).all(-1).sum(-1).tolist()


def _tokens_of_tower(tensors: Tensors, config: Any) -> Sequence[int]:
    """Every row of `pixel_values` [N, 3, H, W], a whole image, makes a token of each patch."""
    return [config.text_config.num_image_tokens] * len(tensors["pixel_values"])


def _prefix_logits(output: torch.Tensor, text_config: Any) -> torch.Tensor:
    """Bound logits as Gemma 2 does; the first version's text part has no such setting."""
    return capped_logits(output, text_config) if hasattr(text_config, "final_logit_softcapping") else output


def _sees_images(text_config: Any) -> bool:
    """Return whether images are seen in both directions: E2B and E4B are causal throughout."""
    return text_config.use_bidirectional_attention == "vision"


_WITH_PLACES = {
    "token_types": "mm_token_type_ids",
    "media": {"pixel_values": Join(), "image_position_ids": Join()},
    "logits": capped_logits,
}

GEMMA = (
    tiled_family("gemma3", "Gemma3", tile_tokens=_tokens_of_images, token_types="token_type_ids", sees=ImageSpans()),
    tiled_family(
        "gemma4",
        "Gemma4",
        tile_tokens=_tokens_of_patches,
        sees=ImageSpans(layers="sliding", enabled=_sees_images),
        **_WITH_PLACES,
    ),
    tiled_family(
        "gemma4_unified",
        "Gemma4Unified",
        oldest_transformers=(5, 23),
        vision_path="model.embed_vision",
        tile_tokens=_tokens_of_merged_patches,
        sees=ImageSpans(enabled=_sees_images, beyond_window=True),
        **_WITH_PLACES,
    ),
    tiled_family(
        "paligemma",
        "PaliGemma",
        oldest_transformers=(5, 23),
        positions_rule=Rotary(axes=1, start=1),
        tile_tokens=_tokens_of_tower,
        sees=Prefix(),
        logits=_prefix_logits,
    ),
)
"""The descriptors."""
