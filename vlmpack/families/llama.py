"""Llama 4, text alone and with images.

    chunks           layers with rotary positions attend within chunks of 8192 tokens, counted from the sample's start
    query scaling    the others, every fourth, have none; their queries are scaled by the token's place in the sample
    experts          in every layer, or in every other one: sigmoids of the best scores multiply what goes into experts
    images           tiles of one size, rows of a batch; the tower attends within each
    head             of the model with images it is inside its text part, so that no module is the model without it

A row of two samples, chunks of 2 tokens:

    row        a a a a a  b b b
    chunks     0 0 1 1 2  3 3 4        a token attends to those of its chunk before it
    places     0 1 2 3 4  0 1 2        of which the others' queries are scaled

Chunks are in no descriptor: they are measured in the masks of the model's own code, as windows are. Chunks of images
are no others than those of text: a tile's tokens may lie in two of them.

Its image processor is in transformers for torchvision only, and makes pixels in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vlmpack.families.text import text_family
from vlmpack.families.tiled import tiled_family


def tokens_of_tiles(tensors: Mapping[str, torch.Tensor], config: Any) -> Sequence[int]:
    """Every row of `pixel_values` [N, 3, H, W], a tile or a whole image, makes a token of each square of patches that
    `pixel_shuffle_ratio` makes one."""
    vision = config.vision_config
    side = vision.image_size // vision.patch_size
    return [int(side**2 * vision.pixel_shuffle_ratio**2)] * len(tensors["pixel_values"])


_MECHANISMS = {
    "experts": {"layer": "feed_forward", "router": "router"},
    "query_scale": {"layer": "self_attn"},
}

LLAMA = (
    tiled_family(
        "llama4",
        "Llama4",
        oldest_transformers=(5, 23),
        mechanisms=_MECHANISMS,
        backbone_path="",
        text_path="language_model.model",
        vision_path="vision_model",
        head_path="language_model.lm_head",
        tile_tokens=tokens_of_tiles,
    ),
    text_family(
        "llama4_text", "Llama4ForCausalLM", oldest_transformers=(5, 23), mechanisms=_MECHANISMS, text_type="llama4"
    ),
)
"""The descriptors."""
