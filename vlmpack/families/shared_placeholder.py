"""Videos written with the placeholder of images (GLM-4V): which tokens are theirs; their frames, handed on as images.

    sample    x ( [ i i ] 0 [ i i ] 1 ) x   x [ i i i ] x       two samples: a video of two frames, an image
    kinds     0 0 0 2 2 0 0 0 2 2 0 0 0 0   0 0 1 1 1 0 0       `(` and `)` start and end a video
    grids     (2, 2, 4)                     (1, 2, 6)
    handed on (1, 2, 4), (1, 2, 4), (1, 2, 6)                   all as images, in the order of the row

The model's own code puts features of images on all placeholders of a call, and features of videos on the same ones, so
that it takes either images or videos. To its tower and its positions a frame is an image, so packed rows hand frames on
as images, in the order of their tokens. A sample with both is refused: the model alone has no answer to compare with.

P patches, S samples, T row tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from vlmpack.errors import LayoutError
from vlmpack.families.audio import media_starts
from vlmpack.families.spans import types_on_host
from vlmpack.layout.batch import IMAGE, VIDEO, Grid, HostMetadata, Media
from vlmpack.layout.device import to_device
from vlmpack.layout.row import PackedRow, metadata_of_tree
from vlmpack.layout.segments import Segments


def kinds_between(
    input_ids: torch.Tensor, config: Any, *, segments: Segments | None = None, column: torch.Tensor | None = None
) -> torch.Tensor:
    """0 text, 1 image, 2 video for each token, int64 in the shape of `input_ids`. No host–device sync.

    Args:
        input_ids: [1, T] of a row, [B, S] of a batch, or [L].
        config: the model's configuration.
        segments: the row's samples; None: each row of `input_ids` is one, as in the family's processor.
        column: what a caller gives as `mm_token_type_ids`, which decides between images and videos: configurations of
            checkpoints may name other tokens than their tokenizers have. None: tokens that start and end videos do.
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
    row: PackedRow, types: torch.Tensor, metadata: HostMetadata, model_type: str
) -> tuple[Media, tuple[Grid, ...]]:
    """Replace the videos of a row by their frames, as images in the order of its placeholders.

    A row with images and videos whose metadata do not count them by sample, or have no `type_runs` of a prefix tree,
    takes one host–device sync on a device.

    Args:
        row: whose media are those of the samples, or of its prefix tree.
        types: [1, T], 0 text, 1 image, 2 video.
        metadata: with the grids of images and videos of the samples.
        model_type: of the family, for errors.

    Returns:
        The media, and their grids.

    Raises:
        LayoutError: a sample has images and videos, or the metadata count other media.
    """
    media, tree = row.media, row.tree
    computed = metadata if tree is None else metadata_of_tree(metadata, tree)
    images, frames = computed.image_grids, _frames(computed)
    if not frames:
        return media, images
    assert media.pixel_values_videos is not None, "their patches were counted"
    pixels, grids = media.pixel_values_videos, frames
    if images:
        assert media.pixel_values is not None, "their patches were counted"
        counts_S2 = _media_of_samples(types, row.segments, metadata)
        _check_apart(counts_S2, (len(metadata.image_grids), len(_frames(metadata))), model_type)
        if tree is not None:  # its nodes have whole media, in its order
            types_T = types_on_host(types, row.segments, metadata.type_runs)
            counts_S2 = _counted_by_tokens(types_T[tree.source().numpy()], tree.nodes)
        pixels, grids = _interleaved(counts_S2, (images, frames), (media.pixel_values, media.pixel_values_videos))
    table = to_device(np.asarray(grids, np.int64), pixels.device)
    return Media(pixel_values=pixels, image_grid_thw=table), grids


def _media_of_samples(types: torch.Tensor, segments: Segments, metadata: HostMetadata) -> np.ndarray:
    """int64 [S, 2]: images and frames of each sample."""
    images, videos = metadata.images_per_sample, metadata.videos_per_sample
    if len(images) == len(videos) == segments.num_samples:
        lengths = np.append(0, np.cumsum([count for count, _, _ in metadata.video_grids]))
        last = np.minimum(np.cumsum(videos), len(lengths) - 1)
        return np.stack([np.asarray(images), np.diff(lengths[last], prepend=0)], 1)
    return _counted_by_tokens(types_on_host(types, segments, metadata.type_runs), segments)


def _counted_by_tokens(types_T: np.ndarray, segments: Segments) -> np.ndarray:
    """int64 [S, 2]: runs of placeholders of images, and of frames, in each segment."""
    of_segments = [types_T[start:stop] for start, stop in segments.spans]
    return np.asarray([[len(media_starts(kinds, kind)) for kind in (IMAGE, VIDEO)] for kinds in of_segments])


def _frames(metadata: HostMetadata) -> tuple[Grid, ...]:
    """A grid for each frame of all videos."""
    return tuple((1, rows, columns) for count, rows, columns in metadata.video_grids for _ in range(count))


def _check_apart(counts_S2: np.ndarray, totals: tuple[int, int], model_type: str) -> None:
    if tuple(counts_S2.sum(0)) != totals:
        raise LayoutError(
            f"the samples have {counts_S2[:, 0].tolist()} images and {counts_S2[:, 1].tolist()} frames of videos, but "
            f"the row has grids of {totals[0]} and {totals[1]}; leave the metadata out of a batch that was changed"
        )
    if (both := counts_S2.all(1)).any():
        raise LayoutError(
            f"sample {int(both.argmax())} has images and videos, which {model_type} writes with one placeholder: its "
            "own code takes either, and refuses such a sample. Leave one of them out, or give frames as images"
        )


def _interleaved(
    counts_S2: np.ndarray, grids: tuple[Sequence[Grid], ...], pixels: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, tuple[Grid, ...]]:
    """Patches of images and frames in the order of samples, each of which has one kind, and their grids."""
    parts: list[torch.Tensor] = []
    order: list[Grid] = []
    used, patches = [0, 0], [0, 0]
    for counts in counts_S2.tolist():
        for kind, count in enumerate(counts):
            taken = grids[kind][used[kind] : used[kind] + count]
            size = sum(map(prod, taken))
            parts.append(pixels[kind][patches[kind] : patches[kind] + size])
            order += taken
            used[kind] += count
            patches[kind] += size
    return torch.cat(parts), tuple(order)
