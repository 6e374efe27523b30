"""Llama 4, with and without images.

    chunks           layers with rotary positions attend within chunks of 8192 tokens, counted from the sample's start
    query scaling    every fourth layer has no rotary positions; its queries are scaled by the position in the sample
    experts          in every layer or every other one; inputs of experts are multiplied by sigmoids of the best scores
    images           tiles of one size, rows of a batch; the tower attends within each tile
    head             with images, it is inside the text part, so there is no submodule for the model without its head

A row of two samples, chunks of 2 tokens:

    row        a a a a a  b b b
    chunks     0 0 1 1 2  3 3 4        a token attends to earlier tokens of its chunk
    positions  0 1 2 3 4  0 1 2        these scale queries in layers without rotary positions

Chunks are not in the descriptors: like sliding windows, they are measured in the masks of the model's own code. Image
tokens are chunked like text, so the tokens of a tile may be in two chunks.

transformers has its image processor for torchvision only; the processor returns pixels in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vlmpack.families.text import text_family
from vlmpack.families.tiled import tiled_family


def tokens_of_tiles(tensors: Mapping[str, torch.Tensor], config: Any) -> Sequence[int]:
    """Return the tokens of every row of `pixel_values` [N, 3, H, W], a tile or an image.

    `pixel_shuffle_ratio` is the ratio of tokens to patches along each side.
    """
    vision = config.vision_config
    side = vision.image_size // vision.patch_size
    return [int(side**2 * vision.pixel_shuffle_ratio**2)] * len(tensors["pixel_values"])


_MECHANISMS = {"experts": {"layer": "feed_forward", "router": "router"}, "query_scale": {"layer": "self_attn"}}

LLAMA = (
    tiled_family(
        "llama4",
        oldest_transformers=(5, 23),
        mechanisms=_MECHANISMS,
        backbone_path=None,
        text_path="language_model.model",
        vision_path="vision_model",
        head_path="language_model.lm_head",
        tile_tokens=tokens_of_tiles,
        not_over_ranks="its images enter in the module that holds its head, which takes no features in their place",
    ),
    text_family("llama4_text", oldest_transformers=(5, 23), mechanisms=_MECHANISMS, text_type="llama4"),
)
"""The descriptors."""
