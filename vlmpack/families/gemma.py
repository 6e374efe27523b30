"""Gemma's families with vision: image tokens are bidirectional, they attend to later tokens of their image.

    gemma3            in all layers, within the sliding window of a layer
    gemma4            in layers with a sliding window, if the configuration says so (26B-A4B and 31B)
    gemma4_unified    in all layers, also beyond the sliding window (12B)
    paligemma         in all layers, together with the prompt, also beyond the sliding window (version 2, on Gemma 2)

Shared keys and values, per-layer embeddings and other head dimensions work on single tokens, so they need nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch

from vlmpack.families.family import TRANSFORMERS, Rotary
from vlmpack.families.pixels import frames_of_patches, padded_patches, square_tiles
from vlmpack.families.spans import ImageSpans, Prefix
from vlmpack.families.text import capped_logits
from vlmpack.families.tiled import tiled_family
from vlmpack.families.tiles import Join

Tensors = Mapping[str, torch.Tensor]


def _tokens_of_images(tensors: Tensors, config: Any) -> Sequence[int]:
    """`mm_tokens_per_image` tokens for every row of `pixel_values` [N, 3, H, W], an image or a crop of one."""
    return [config.mm_tokens_per_image] * len(tensors["pixel_values"])


def _tokens_of_patches(tensors: Tensors, config: Any, *, name: str = "image_position_ids") -> Sequence[int]:
    """Tokens pooled from the real patches of images or frames [N, P, C]; their position ids are -1 on padding."""
    return ((tensors[name] != -1).all(-1).sum(-1) // _pooling(config.vision_config) ** 2).tolist()


def _pooling(vision: Any) -> int:
    """Return the patches along each side of a token; 1 if the processor merges them."""
    return 1 if hasattr(vision, "model_patch_size") else vision.pooling_kernel_size


def _tokens_of_videos(tensors: Tensors, config: Any) -> Sequence[int]:
    """Tokens of each video: those of its frames."""
    of_frames = iter(_tokens_of_patches(tensors, config, name="video_position_ids"))
    return [sum(islice(of_frames, count)) for count in tensors["num_frames_per_video"].tolist()]


def _frames_of_videos(tensors: Tensors, config: Any) -> Mapping[str, Sequence[int]]:
    """Number of frames of each video in `pixel_values_videos` [F, P, C] and their position ids."""
    if (counts := tensors.get("num_frames_per_video")) is None:
        return {}
    return dict.fromkeys(("pixel_values_videos", "video_position_ids"), counts.tolist())


def _tokens_of_tower(tensors: Tensors, config: Any) -> Sequence[int]:
    """One token for every patch of each image of `pixel_values` [N, 3, H, W]."""
    return [config.text_config.num_image_tokens] * len(tensors["pixel_values"])


def _prefix_logits(output: torch.Tensor, text_config: Any) -> torch.Tensor:
    """Softcap logits as Gemma 2 does; the text part of PaliGemma's first version has no such setting."""
    return capped_logits(output, text_config) if hasattr(text_config, "final_logit_softcapping") else output


def _images_are_bidirectional(text_config: Any) -> bool:
    """Return whether image tokens are bidirectional; E2B and E4B are causal throughout."""
    return text_config.use_bidirectional_attention == "vision"


_IMAGES = ("pixel_values", "image_position_ids")
_VIDEOS = ("pixel_values_videos", "video_position_ids", "num_frames_per_video")
_TAKES_VIDEOS = TRANSFORMERS >= (5, 23)
"""Whether the installed transformers takes videos of different lengths."""
_WITH_PLACES = {
    "token_types": "mm_token_type_ids",
    "tile_tokens": _tokens_of_patches,
    "tile_entries": _frames_of_videos,
    "video_tokens": _tokens_of_videos if _TAKES_VIDEOS else None,
    "media": dict.fromkeys((*_IMAGES, *_VIDEOS) if _TAKES_VIDEOS else _IMAGES, Join()),
    "logits": capped_logits,
}

GEMMA = (
    tiled_family(
        "gemma3",
        tile_tokens=_tokens_of_images,
        image=partial(square_tiles, tiles=3),
        token_types="token_type_ids",
        bidirectional=ImageSpans(),
    ),
    tiled_family(
        "gemma4",
        image=padded_patches,
        video=frames_of_patches,
        bidirectional=ImageSpans(layers="sliding", enabled=_images_are_bidirectional),
        **_WITH_PLACES,
    ),
    tiled_family(
        "gemma4_unified",
        image=partial(padded_patches, merged=True),
        video=partial(frames_of_patches, merged=True),
        oldest_transformers=(5, 23),
        vision_path="model.embed_vision",
        bidirectional=ImageSpans(enabled=_images_are_bidirectional, beyond_window=True),
        **_WITH_PLACES,
    ),
    tiled_family(
        "paligemma",
        oldest_transformers=(5, 23),
        positions_rule=Rotary(axes=1, start=1),
        tile_tokens=_tokens_of_tower,
        image=partial(square_tiles, tiles=1),
        bidirectional=Prefix(),
        logits=_prefix_logits,
    ),
)
"""The descriptors."""
