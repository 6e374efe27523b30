"""Synthetic images of families whose images are rows of a batch, or tiles, from a configuration alone: no processor.

A grid (1, rows, columns) stands for the form of an image; each family's rule makes of it the tokens that its processor
would write, and the tensors that it would make.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from vlmpack.families import Family
from vlmpack.layout import Grid


class Sample(dict[str, torch.Tensor]):
    """What a processor gives for one conversation, without the batch axis; and the family that takes it."""

    family: Family | None = None
    """None: it has no media, or they are joined along their first axis."""

    @classmethod
    def of(cls, tensors: dict[str, torch.Tensor], family: Family | None) -> Sample:
        """The sample of these tensors for a model of this family."""
        sample = cls(tensors)
        sample.family = family
        return sample


def sample_like(sample: Mapping[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> Sample:
    """Make a sample of these tensors for the family of another; a plain dictionary has none."""
    return Sample.of(tensors, sample.family if isinstance(sample, Sample) else None)


@final
@dataclass(frozen=True, kw_only=True)
class TiledImage:
    """One image."""

    ids: Sequence[int]
    """Its tokens: placeholders, and what stands around and between them."""
    tensors: dict[str, torch.Tensor]
    """What a processor makes of it, by name."""


Draw = Callable[..., torch.Tensor]
"""Sizes to float32 numbers from N(0, 1)."""

TileRule = Callable[[Any, Grid, Draw], TiledImage]
"""The configuration, the form of an image, and a source of pixels, to the image."""


def _fixed_tiles(config: Any, grid: Grid, draw: Draw) -> TiledImage:
    """As many tiles of one size as the form has cells, and a thumbnail if these are several."""
    cells = grid[1] * grid[2]
    tiles = cells + (cells > 1)
    ids = [config.vision_start_token_id, *[config.image_token_id] * config.image_seq_length * tiles]
    side = config.vision_config.image_size[0]
    pixels = {"pixel_values": draw(tiles, 3, side, side)}
    return TiledImage(ids=[*ids, config.vision_end_token_id], tensors=pixels)


def _crops(config: Any, grid: Grid, draw: Draw) -> TiledImage:
    """A whole image, and two crops of it if the form has several cells: each with its own start and end."""
    tiles = 1 if grid[1] * grid[2] == 1 else 3
    ids = [config.boi_token_index, *[config.image_token_id] * config.mm_tokens_per_image, config.eoi_token_index]
    side = config.vision_config.image_size
    return TiledImage(ids=ids * tiles, tensors={"pixel_values": draw(tiles, 3, side, side)})


MOST_PATCHES = 84
"""Patches to which every image is padded where a processor pads them."""


def _padded_patches(config: Any, grid: Grid, draw: Draw) -> TiledImage:
    """Patches with places, pooled to one token a cell, and padding without."""
    vision = config.vision_config
    pooled, side = vision.pooling_kernel_size, 3 * vision.patch_size**2
    rows, columns = (pooled * cells for cells in grid[1:])
    places = torch.full((1, MOST_PATCHES, 2), -1)
    places[0, : rows * columns] = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(-1)
    pixels = draw(1, MOST_PATCHES, side)
    pixels[0, rows * columns :] = 0
    tokens = [config.image_token_id] * (grid[1] * grid[2])
    tensors = {"pixel_values": pixels, "image_position_ids": places}
    return TiledImage(ids=[config.boi_token_id, *tokens, config.eoi_token_id], tensors=tensors)


TILE_RULES: dict[str, TileRule] = {"internvl": _fixed_tiles, "gemma3": _crops, "gemma4": _padded_patches}
"""By `config.model_type`."""
