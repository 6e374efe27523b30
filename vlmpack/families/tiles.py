"""Images that are rows of a batch, or tiles: how tensors of samples are joined, and how their tokens are counted.

If the tower's own code computes every tile separately, it needs no boundaries. But transformers writes the features, in
order, to the placeholders of the whole row, so the numbers of placeholders must match:

    row       x [ i i i i ] x   x [ i i ; i i ] x       two samples; `i` a placeholder, `;` text between tiles
    tokens        4                 2     2             of each tile or image, in the order of the tensors
    ends                4                 8             number of placeholders up to the end of each sample

A sample must end where an image ends, so that no image's features are in two samples (`layout.media.place`).

N tiles or images, S samples, T row tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional as F

from vlmpack.errors import LayoutError
from vlmpack.layout.segments import Segments

TileTokens = Callable[[Mapping[str, torch.Tensor], Any], Sequence[int]]
"""Function of media tensors by name and the model's configuration; returns the number of placeholder tokens of each
tile or image, in order."""

TileEntries = Callable[[Mapping[str, torch.Tensor], Any], Mapping[str, Sequence[int]]]
"""Function of media tensors by name and the model's configuration; returns the number of entries of each tile or image,
along the axis on which samples are joined, for the tensors where it is not 1."""

TileBoundaries = Callable[[Mapping[str, torch.Tensor], Any], Sequence[Segments]]
"""Function of media tensors by name and the model's configuration; returns all sets of boundaries that blocks of the
tower attend within."""


@final
@dataclass(frozen=True, kw_only=True)
class Join:
    """Rule for joining a media tensor of several samples."""

    axis: int = 0
    """The axis along which samples are concatenated."""
    pad: bool = False
    """True if the other axes are padded with zeros to a common size."""
    counts_images: bool = False
    """True if the tensor has the number of images of each sample, [samples with images]."""

    def __call__(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join tensors with the same number of axes, in order.

        Raises:
            LayoutError: their sizes differ on another axis.
        """
        if self.pad:
            sizes = np.max([tensor.shape for tensor in tensors], axis=0)
            tensors = [_padded(tensor, sizes, self.axis) for tensor in tensors]
        if len({self.fixed_sizes(tensor.shape) for tensor in tensors}) > 1:
            raise LayoutError(
                f"media of the samples are {', '.join(str(list(tensor.shape)) for tensor in tensors[:9])}, which "
                f"cannot follow each other along axis {self.axis}; let one processor make them all, with one nframes"
            )
        return torch.cat([*tensors], self.axis)

    def fixed_sizes(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes in a tensor's shape that all joined tensors must share; (): padding makes them equal."""
        return () if self.pad else (*shape[: self.axis], *shape[self.axis + 1 :])


def _padded(tensor: torch.Tensor, sizes: np.ndarray, axis: int) -> torch.Tensor:
    missing = [0 if at == axis else int(size) - n for at, (size, n) in enumerate(zip(sizes, tensor.shape, strict=True))]
    return F.pad(tensor, [end for n in reversed(missing) for end in (0, n)]) if any(missing) else tensor


QWEN_MEDIA: Mapping[str, Join] = {
    name: Join() for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
}
"""Patches and grids of images and videos, concatenated."""


# ---------------------------------------------------------------------- tokens of tiles


def patches_in(pixels: Sequence[torch.Tensor], vision: Any) -> int:
    """Count the patches of all these pixels; `vision`: the vision part's configuration."""
    vision = getattr(vision, "sam_config", vision)  # the part of DeepSeek-OCR 2's tower that reads pixels
    sides = vision.patch_size if isinstance(vision.patch_size, list | tuple) else (vision.patch_size,) * 2
    return sum(tensor.numel() for tensor in pixels) // (getattr(vision, "num_channels", 3) * prod(sides))


def tiles_of_images(tokens: Sequence[int], images: Sequence[int]) -> list[tuple[int, int]]:
    """Return (start, stop) of the tiles of each image.

    Args:
        tokens: number of tokens of each tile.
        images: number of tokens of each image.

    Raises:
        LayoutError: an image ends inside a tile, or the totals differ.
    """
    ends = np.append(0, np.cumsum(tokens, dtype=np.int64))
    edges = np.searchsorted(ends, np.append(0, np.cumsum(images, dtype=np.int64)))
    if edges[-1] != len(tokens) or (ends[np.minimum(edges, len(tokens))][1:] != np.cumsum(images)).any():
        raise LayoutError(
            f"the host metadata has images of {list(images)[:9]} tokens, but pixel_values and what came with it make "
            f"images or tiles of {list(tokens)[:9]}; leave the metadata out of a batch whose images were changed"
        )
    return list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))
