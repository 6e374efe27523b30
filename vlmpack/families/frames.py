"""Videos with the placeholder of images.

GLM-4V uses one placeholder for images and video frames, so its own code can take only one kind in a call. But its tower
and its positions treat a frame as an image, so rows pass frames as images, in the order of their tokens.

    sample    x ( [ i i ] 0 [ i i ] 1 ) x   x [ i i i ] x       two samples: a video of two frames, an image
    kinds     0 0 0 2 2 0 0 0 2 2 0 0 0 0   0 0 1 1 1 0 0       `(` and `)` start and end a video
    grids     (2, 2, 4)                     (1, 2, 6)
    passed on (1, 2, 4), (1, 2, 4), (1, 2, 6)                   all as images, in the order of the row
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vlmpack.errors import LayoutError
from vlmpack.layout.batch import Media
from vlmpack.layout.device import to_device
from vlmpack.layout.media import IMAGE, VIDEO, MediaTable, Medium
from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.segments import Segments


def kinds_between(
    input_ids: torch.Tensor, config: Any, *, segments: Segments | None = None, column: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the kind of each token, 0 text, 1 image, 2 video: int64 in the shape of `input_ids`. No host–device sync.

    Args:
        input_ids: [1, T] of a row, [B, S] of a batch, or [L] of a sample.
        config: the model's configuration.
        segments: the row's samples; None: each row of `input_ids` is one sample, as in the family's processor.
        column: the caller's `mm_token_type_ids`, which tell images from videos; needed because a checkpoint's
            configuration may name other tokens than its tokenizer has. None: use the tokens that start and end videos.
    """
    is_placeholder = input_ids == config.image_token_id
    if column is not None and column.shape == input_ids.shape:
        return torch.where(is_placeholder, torch.where(column == VIDEO, VIDEO, IMAGE), 0)
    opened = (input_ids == config.video_start_token_id).long() - (input_ids == config.video_end_token_id).long()
    depth = opened.cumsum(-1)
    if segments is not None:
        first_T = torch.arange(segments.total, device=depth.device) - segments.position_in_segment(depth.device)
        depth = depth - (depth - opened).index_select(-1, first_T)
    return torch.where(is_placeholder, torch.where(depth > 0, VIDEO, IMAGE), 0)


def frames_as_images(
    media: Media, table: MediaTable, segments: Segments, tree: PrefixTree | None, model_type: str
) -> tuple[Media, tuple[Medium, ...]]:
    """Replace the videos of a row by their frames, as images in the order of the placeholders.

    Args:
        media: the media tensors of the samples, or of the row's prefix tree.
        table: the media of the samples.
        segments: the boundaries of the samples.
        tree: the prefix tree; None: the row has none.
        model_type: the family, for messages.

    Returns:
        The media tensors, and all images.

    Raises:
        LayoutError: a sample has both images and videos.
    """
    computed = table if tree is None else table.in_tree(tree)
    if not computed.videos:
        return media, computed.images
    both = {medium.sample for medium in table.images} & {medium.sample for medium in table.videos}
    if both:
        raise LayoutError(
            f"sample {min(both)} has images and videos, which {model_type} writes with one placeholder: its own code "
            "takes either, and refuses such a sample. Leave one of them out, or give frames as images"
        )
    starts: list[int] = []
    parts: list[tuple[Medium, torch.Tensor]] = []
    for kind, pixels in ((IMAGE, media.pixel_values), (VIDEO, media.pixel_values_videos)):
        if of_kind := computed.of_kind(kind):
            assert pixels is not None, "their patches were counted"
            starts += computed.spans(segments, kind)[:, 0].tolist()
            parts += zip(of_kind, pixels.split([medium.patches for medium in of_kind]), strict=True)
    order = np.argsort(starts if tree is None else tree.place().numpy()[starts])
    images: list[Medium] = []
    for medium, _ in (parts[at] for at in order):
        assert medium.grid is not None, "a family with grids"
        grid = (1, *medium.grid[1:]) if medium.kind == VIDEO else medium.grid
        images += [replace(medium, kind=IMAGE, grid=grid, runs=(run,)) for run in medium.runs]
    joined = torch.cat([parts[at][1] for at in order])
    grids = to_device(np.asarray([image.grid for image in images]), joined.device)
    return Media(pixel_values=joined, image_grid_thw=grids), tuple(images)
