"""Multimodal rotary positions of a packed row, as table look-ups. The README of this room draws the maths.

The host has every grid, so it lists once, for each media token of the row, its offsets (t, h, w) from the place
where its item starts, and how far the item moves on what follows. The device holds which tokens are media: the k-th
of them takes the k-th entry. A cumulative sum does the rest, without a host–device sync.

N media items, M media tokens, T row tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch

from vlmpack.errors import LayoutError
from vlmpack.layout import IMAGE, VIDEO, Grid, Segments, to_device


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class MediaItems:
    """N runs of media tokens, in row order: images, whole videos, or single frames of videos."""

    grids: np.ndarray
    """[N, 3] int64: frames, rows, columns of merged tokens."""
    interval: np.ndarray
    """[N] float32: positions between one frame of the item and the next, before rounding down."""
    medium: np.ndarray
    """[N] int64, rising: the image or video that each run belongs to."""

    @property
    def num_media(self) -> int:
        """Images, or videos."""
        return int(self.medium[-1]) + 1 if len(self.medium) else 0

    @property
    def num_tokens(self) -> int:
        """Media tokens M of all items."""
        return int(self.grids.prod(1).sum())

    def table(self) -> np.ndarray:
        """[4, M] int64: offsets t, h, w of each token, and the advance after it.

        An item advances by max(h, w) after its last token, whatever its number of frames: so does transformers'
        `get_rope_index`. The temporal offset is a float32 product rounded down, as there.
        """
        sizes = self.grids.prod(1)
        item = np.repeat(np.arange(len(sizes)), sizes)
        ends = sizes.cumsum()
        local = np.arange(len(item)) - (ends - sizes)[item]
        _, rows, columns = self.grids.T
        frame, within = np.divmod(local, (rows * columns)[item])
        out = np.zeros((4, len(item)), np.int64)
        out[0] = frame.astype(np.float32) * self.interval[item]
        out[1], out[2] = np.divmod(within, columns[item])
        out[3, ends - 1] = np.maximum(rows, columns)
        return out


def media_items(grids: Sequence[Grid], merge: int, modality: str) -> MediaItems:
    """Items whose frames lie one position apart, from grids in patches.

    Raises:
        LayoutError: a grid that is not (frames, rows, columns), has a side of 0, or that `merge` does not divide.
    """
    for i, grid in enumerate(grids):
        if len(grid) != 3 or min(grid) < 1:
            raise LayoutError(
                f"{modality} {i}: its grid is {tuple(grid)}; it must be (frames, rows, columns), all >= 1"
            )
        if grid[1] % merge or grid[2] % merge:
            raise LayoutError(
                f"{modality} {i}: its grid {tuple(grid)} is not a multiple of the merge size {merge} in height and "
                "width; grids are counted in patches, before merging: give `image_grid_thw` as the processor made it"
            )
    patches = np.asarray(grids, np.int64).reshape(-1, 3)
    interval, medium = np.ones(len(patches), np.float32), np.arange(len(patches))
    return MediaItems(grids=patches // (1, merge, merge), interval=interval, medium=medium)


def row_positions(
    mm_token_type_ids: torch.Tensor | None,
    segments: Segments,
    *,
    images: MediaItems,
    videos: MediaItems,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """int64 [4, 1, T]: the text row, then time, height and width. Restarts at 0 in every segment; 0 on padding.

    Media tokens beyond those that the items stand for count as text: their number is on the device, and it is not
    waited for. `check_runs` compares them.

    Args:
        mm_token_type_ids: [1, T], 0 text, 1 image, 2 video; None: text only.
        segments: the boundaries at which positions restart.
        images: the images of the row, in row order.
        videos: the videos (or their frames) of the row, in row order.
        device: where the result lives if there are no token types.

    Raises:
        LayoutError: what the host can see to be wrong: shapes, or more media tokens than the row has room for.
    """
    _check(mm_token_type_ids, segments, images, videos)
    if mm_token_type_ids is None:
        text = segments.position_in_segment("cpu" if device is None else device)
        return text.repeat(4, 1, 1)
    device = mm_token_type_ids.device
    text = segments.position_in_segment(device)
    if not images.num_tokens + videos.num_tokens:
        return text.repeat(4, 1, 1)
    offsets_3T, advance = _look_up(mm_token_type_ids.view(-1), images, videos)
    before = advance.cumsum(0) - advance
    # The row index of each token's segment start; a pad is its own, which makes its position 0.
    start = torch.arange(segments.total, device=device) - text
    spatial_3T = before - before.index_select(0, start) + offsets_3T
    if segments.has_gaps:
        spatial_3T = spatial_3T.masked_fill(segments.padding_mask(device), 0)
    return torch.cat((text[None], spatial_3T))[:, None]


def _look_up(types: torch.Tensor, images: MediaItems, videos: MediaItems) -> tuple[torch.Tensor, torch.Tensor]:
    """(offsets [3, T], advance [T]) of every token, from one table: images, then videos, then one entry for text."""
    num_images, num_videos = images.num_tokens, videos.num_tokens
    text = np.asarray([[0], [0], [0], [1]])
    table = to_device(np.concatenate((images.table(), videos.table(), text), 1), types.device)
    entry = torch.full_like(types, num_images + num_videos, dtype=torch.int64)
    for modality, first, count in ((IMAGE, 0, num_images), (VIDEO, num_images, num_videos)):
        is_kind = types == modality
        k = is_kind.cumsum(0) - 1
        entry = torch.where(is_kind & (k < count), first + k, entry)
    entries = table.index_select(1, entry)
    return entries[:3], entries[3]


def _check(types: torch.Tensor | None, segments: Segments, images: MediaItems, videos: MediaItems) -> None:
    needed = images.num_tokens + videos.num_tokens
    if types is None:
        if needed:
            raise LayoutError(
                f"the row has {len(images.grids)} images and {len(videos.grids)} videos (or frames) but no "
                "mm_token_type_ids, so their tokens cannot be found; keep what the processor returns under that name"
            )
        return
    if tuple(types.shape) != (1, segments.total):
        raise LayoutError(
            f"mm_token_type_ids is {list(types.shape)} but the segments describe a row of [1, {segments.total}]"
        )
    if needed > segments.total:
        raise LayoutError(
            f"the grids of {len(images.grids)} images and {len(videos.grids)} videos (or frames) stand for {needed} "
            f"tokens, but the row has only {segments.total}; were media and token ids taken from different batches, "
            "or were the samples truncated?"
        )
