"""Gemma's families with vision: image tokens are bidirectional, they attend to later tokens of their image.

    gemma3            in all layers, within the sliding window of a layer
    gemma4            in layers with a sliding window, if the configuration says so (26B-A4B and 31B)
    gemma4_unified    in all layers, also beyond the sliding window (12B)
    paligemma         in all layers, together with the prompt, also beyond the sliding window (version 2, on Gemma 2)

Shared keys and values, per-layer embeddings and other head dimensions work on single tokens, so they need nothing here.
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
    """`mm_tokens_per_image` tokens for every row of `pixel_values` [N, 3, H, W], an image or a crop of one."""
    return [config.mm_tokens_per_image] * len(tensors["pixel_values"])


def _tokens_of_patches(tensors: Tensors, config: Any) -> Sequence[int]:
    """Tokens pooled from the real patches of `pixel_values` [N, P, C]; `image_position_ids` are -1 on padding."""
    has_place = (tensors["image_position_ids"] != -1).all(-1)
    return (has_place.sum(-1) // config.vision_config.pooling_kernel_size**2).tolist()


def _tokens_of_merged_patches(tensors: Tensors, config: Any) -> Sequence[int]:
    """One token for every real patch of `pixel_values` [N, P, C], whose patches are already merged."""
    return (tensors["image_position_ids"] != -1).all(-1).sum(-1).tolist()


def _tokens_of_tower(tensors: Tensors, config: Any) -> Sequence[int]:
    """One token for every patch of each image of `pixel_values` [N, 3, H, W]."""
    return [config.text_config.num_image_tokens] * len(tensors["pixel_values"])


def _prefix_logits(output: torch.Tensor, text_config: Any) -> torch.Tensor:
    """Softcap logits as Gemma 2 does; the text part of PaliGemma's first version has no such setting."""
    return capped_logits(output, text_config) if hasattr(text_config, "final_logit_softcapping") else output


def _images_are_bidirectional(text_config: Any) -> bool:
    """Return whether image tokens are bidirectional; E2B and E4B are causal throughout."""
    return text_config.use_bidirectional_attention == "vision"


def _blank_patches(config: Any) -> Tensors:
    """Return an image of one token, as patches with their positions."""
    vision = config.vision_config
    side, patch = 1, getattr(vision, "model_patch_size", None)
    if patch is None:
        side, patch = vision.pooling_kernel_size, vision.patch_size
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(-1)
    return {"pixel_values": torch.ones(1, side**2, 3 * patch**2), "image_position_ids": places[None]}


_WITH_PLACES = {
    "blank": _blank_patches,
    "token_types": "mm_token_type_ids",
    "media": {"pixel_values": Join(), "image_position_ids": Join()},
    "logits": capped_logits,
}

GEMMA = (
    tiled_family(
        "gemma3",
        tile_tokens=_tokens_of_images,
        token_types="token_type_ids",
        bidirectional=ImageSpans(),
    ),
    tiled_family(
        "gemma4",
        tile_tokens=_tokens_of_patches,
        bidirectional=ImageSpans(layers="sliding", enabled=_images_are_bidirectional),
        **_WITH_PLACES,
    ),
    tiled_family(
        "gemma4_unified",
        oldest_transformers=(5, 23),
        vision_path="model.embed_vision",
        tile_tokens=_tokens_of_merged_patches,
        bidirectional=ImageSpans(enabled=_images_are_bidirectional, beyond_window=True),
        **_WITH_PLACES,
    ),
    tiled_family(
        "paligemma",
        oldest_transformers=(5, 23),
        positions_rule=Rotary(axes=1, start=1),
        tile_tokens=_tokens_of_tower,
        bidirectional=Prefix(),
        logits=_prefix_logits,
    ),
)
"""The descriptors."""
