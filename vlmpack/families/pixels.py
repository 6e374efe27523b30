"""Tensors of images and videos without grids, as the families' processors make them.

The caller draws the values: ones for a small image on a rank that has none, random numbers for tests. A grid (frames,
rows, columns) gives the shape, in cells whose meaning is the family's own: tiles, tokens, or merged patches. The
descriptor's rule counts the placeholders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vlmpack.layout.media import Grid

Draw = Callable[..., torch.Tensor]
"""Function of sizes that returns float32 values."""
Tensors = dict[str, torch.Tensor]
Draws = Callable[[Any, Grid, Draw], Tensors]
"""Function of the configuration, a grid and a `Draw`; returns the tensors of one image or video."""
MOST_PATCHES = 84
"""Number of patches that every image is padded to, in families whose processors pad patches."""


def _side(config: Any) -> int:
    side = config.vision_config.image_size
    return side if isinstance(side, int) else side[0]


def square_tiles(config: Any, grid: Grid, draw: Draw, *, tiles: int | None = None) -> Tensors:
    """Square tiles: one for a grid of one cell, else `tiles`; None: one for each cell, and a thumbnail."""
    cells, side = grid[1] * grid[2], _side(config)
    return {"pixel_values": draw(1 if cells == 1 else tiles or cells + 1, 3, side, side)}


def tiles_with_mask(config: Any, grid: Grid, draw: Draw) -> Tensors:
    """A tile for each cell of the grid, with a mask of pixels."""
    shape = (1, grid[1] * grid[2], _side(config), _side(config))
    mask = torch.ones(shape, dtype=torch.int64)
    return {"pixel_values": draw(*shape[:2], 3, *shape[2:]), "pixel_attention_mask": mask}


def padded_patches(config: Any, grid: Grid, draw: Draw, *, merged: bool = False) -> Tensors:
    """Patches with position ids (-1 for padding). `merged`: a cell is one patch; else the patches that are pooled."""
    vision = config.vision_config
    patches, side = (1, vision.model_patch_size) if merged else (vision.pooling_kernel_size, vision.patch_size)
    rows, columns = (patches * cells for cells in grid[1:])
    places = torch.full((1, MOST_PATCHES, 2), -1)
    places[0, : rows * columns] = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(-1)
    pixels = draw(1, MOST_PATCHES, 3 * side**2)
    pixels[0, rows * columns :] = 0
    return {"pixel_values": pixels, "image_position_ids": places}


def thumbnail_and_tiles(config: Any, grid: Grid, draw: Draw, *, thumbnail: bool = False) -> Tensors:
    """A thumbnail, and unless only that is wanted, the tiles of the grid that fits the image's proportions best."""
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    side, size = _side(config), [11 * grid[1], 13 * grid[2]]
    tiles = 1 if thumbnail else image_size_to_num_patches(size, config.image_grid_pinpoints, side)
    return {"pixel_values": draw(1, tiles, 3, side, side), "image_sizes": torch.tensor([size])}


def image_of_any_size(config: Any, grid: Grid, draw: Draw) -> Tensors:
    """An image of one merged patch for each cell of the grid."""
    side = config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)
    size = [grid[1] * side, grid[2] * side]
    return {"pixel_values": draw(1, 3, *size), "image_sizes": torch.tensor([size])}


def row_of_patches(config: Any, grid: Grid, draw: Draw, *, of: str = "") -> Tensors:
    """Patches of an image, or of all frames of a video, one after the other along the last axis."""
    side, frames = config.vision_config.patch_size, grid[0]
    rows, columns = (2 * n**config.merger_times * m for n, m in zip(config.merge_kernel_size, grid[1:], strict=True))
    sizes = torch.tensor([[rows, columns]] * frames, dtype=torch.int32)
    return {f"pixel_values{of}": draw(1, 3, side, side * frames * rows * columns), f"target_sizes{of}": sizes}


def masked_patches(config: Any, grid: Grid, draw: Draw) -> Tensors:
    """An image in the shape of the grid; with more than two cells, this is a thumbnail after two square tiles. All are
    padded to a common number of patches, with a mask."""
    cells = [*[(2, 2)] * 2 * (grid[1] * grid[2] > 2), grid[1:]]
    shapes = config.downsample_factor * torch.tensor(cells)
    patches = shapes.prod(-1)
    mask = (torch.arange(int(patches.max()) + 3) < patches[:, None]).long()
    pixels = draw(*mask.shape, 3 * config.vision_config.patch_size**2) * mask[..., None]
    return {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": shapes}


def views(config: Any, grid: Grid, draw: Draw) -> Tensors:
    """A whole image, and two tiles of half its side if the grid has several cells."""
    tiles, side = 2 * (grid[1] * grid[2] > 1), config.vision_config.sam_config.image_size
    tensors = {"pixel_values": draw(1, 3, side, side), "num_local_patches": torch.tensor([tiles])}
    return tensors | ({"pixel_values_local": draw(tiles, 3, side // 2, side // 2)} if tiles else {})


def frames_of_one_size(config: Any, grid: Grid, draw: Draw) -> Tensors:
    """Frames of the size of a tile."""
    return {"pixel_values_videos": draw(1, grid[0], 3, _side(config), _side(config))}


def frames_of_patches(config: Any, grid: Grid, draw: Draw, *, merged: bool = False) -> Tensors:
    """Frames as padded patches."""
    frames = [padded_patches(config, grid, draw, merged=merged) for _ in range(grid[0])]
    pixels, places = (torch.cat([frame[name] for frame in frames]) for name in frames[0])
    count = torch.tensor([grid[0]])
    return {"pixel_values_videos": pixels, "video_position_ids": places, "num_frames_per_video": count}


def tile_or_image(config: Any, grid: Grid, draw: Draw) -> Tensors:
    """A tile, or with Pixtral's tower an image with its size."""
    if config.vision_config.model_type == "pixtral":
        return image_of_any_size(config, grid, draw)
    return square_tiles(config, grid, draw, tiles=1)
