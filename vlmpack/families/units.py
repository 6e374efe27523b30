"""Find the media of a row, each with its part of the tensors, for any family (`Family.media_units`).

    pixel_values [5 tiles, 3, H, W]     tiles of two images, or crops, or images that are a row each
    tokens of tiles                     4 4 4 | 4 4
    image_tokens of the metadata        12    | 8        an image is as many tiles as make its tokens

Without metadata of the images each tile is a medium of its own: its features depend on no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vlmpack.errors import LayoutError
from vlmpack.families.spans import Runs
from vlmpack.layout.batch import HostMetadata
from vlmpack.layout.media_units import (
    Entries,
    ImagesOfSamples,
    MediaUnits,
    RowMedia,
    check_pixels_on_host,
    units_of_grids,
)
from vlmpack.layout.row import PackedRow
from vlmpack.layout.segments import Segments

if TYPE_CHECKING:
    from vlmpack.families.family import Family


def find_media(family: Family, config: Any, row: PackedRow) -> RowMedia:
    """Find the media of a row.

    Args:
        family: of the model.
        config: the model's configuration.
        row: on the host; with a prefix tree its media are those that the tree computes.

    Raises:
        LayoutError: tensors that are not of this family, or that do not fit each other or the metadata; media on a
            device.
    """
    tensors = row.media.to_hf()
    if unknown := {*tensors} - {*family.media, "second_per_grid_ts"}:
        raise LayoutError(f"the row has {min(unknown)}, which a {family.model_type} does not take; leave it out")
    for tensor in tensors.values():
        check_pixels_on_host(torch.as_tensor(tensor))
    types = family.types_of_row(row, config)
    of_row = RowMedia(metadata=row.host_metadata(), types=types)
    if family.has_grids:
        of_grids = units_of_grids(row)
        of_row = replace(of_row, images=of_grids.images, videos=of_grids.videos)
    else:
        of_row = of_row if row.media.pixel_values is None else _with_tiles(of_row, family, config, row)
        of_row = of_row if family.video_tokens is None else _with_clips(of_row, family, config, row)
    if row.media.audio_mask is not None:
        of_row = replace(of_row, audios=_audios(family, row, types))
    return replace(of_row, metadata=_with_runs(of_row.metadata, family, config, row, types))


def _with_tiles(of_row: RowMedia, family: Family, config: Any, row: PackedRow) -> RowMedia:
    """Add images that are tiles, or rows of a batch, and the tokens of each."""
    assert family.tile_tokens is not None
    tensors, known = row.media.to_hf(), row.metadata_of_media().image_tokens
    tokens = [int(count) for count in family.tile_tokens(tensors, config)]
    tiles = _tiles_of_images(tokens, known or tokens)
    entries = {} if family.tile_entries is None else family.tile_entries(tensors, config)
    parts: dict[str, Entries | ImagesOfSamples] = {}
    for name, tensor in tensors.items():
        if name in _OF_VIDEOS:
            continue
        axis = family.media[name].axis
        if family.media[name].counts_images:
            parts[name] = ImagesOfSamples(is_alone=[n == 1 for n in tensor.tolist() for _ in range(n)])
            continue
        of_tiles = entries.get(name) or list(np.arange(tensor.shape[axis])[:, None])
        if len(of_tiles) != len(tokens):
            raise LayoutError(
                f"{name} is {list(tensor.shape)}, but the row has {len(tokens)} images or tiles; keep what the "
                "processor gives"
            )
        parts[name] = Entries(of_medium=[_joined(of_tiles[start:stop]) for start, stop in tiles], axis=axis)
    metadata = of_row.metadata
    if not metadata.image_tokens:
        metadata = replace(metadata, image_tokens=(*tokens,))
    return replace(of_row, images=MediaUnits(parts=parts), metadata=metadata)


_OF_VIDEOS = ("pixel_values_videos", "target_sizes_videos")
"""Tensors of videos without grids."""


def _with_clips(of_row: RowMedia, family: Family, config: Any, row: PackedRow) -> RowMedia:
    """Add videos that are rows of a batch, or frames of videos that are patches, and the tokens of each."""
    assert family.video_tokens is not None
    tensors = row.media.to_hf()
    if _OF_VIDEOS[0] not in tensors:
        return of_row
    tokens = [int(count) for count in family.video_tokens(tensors, config)]
    entries = {} if family.tile_entries is None else family.tile_entries(tensors, config)
    parts: dict[str, Entries | ImagesOfSamples] = {
        name: Entries(
            of_medium=list(entries.get(name) or Entries.of_counts([1] * len(tokens)).of_medium),
            axis=family.media[name].axis,
        )
        for name in _OF_VIDEOS
        if name in tensors
    }
    videos = MediaUnits(parts=parts)
    metadata = of_row.metadata if of_row.metadata.video_tokens else replace(of_row.metadata, video_tokens=(*tokens,))
    return replace(of_row, videos=videos, metadata=metadata)


def _joined(entries: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *entries])


def _tiles_of_images(tokens: Sequence[int], images: Sequence[int]) -> list[tuple[int, int]]:
    """Begin and end, in tiles of so many tokens, of images of so many tokens.

    Raises:
        LayoutError: an image ends inside a tile, or there are other tokens.
    """
    ends = np.append(0, np.cumsum(tokens, dtype=np.int64))
    edges = np.searchsorted(ends, np.append(0, np.cumsum(images, dtype=np.int64)))
    if edges[-1] != len(tokens) or (ends[np.minimum(edges, len(tokens))][1:] != np.cumsum(images)).any():
        raise LayoutError(
            f"the host metadata has images of {list(images)[:9]} tokens, but pixel_values and what came with it make "
            f"images or tiles of {list(tokens)[:9]}; leave the metadata out of a batch whose images were changed"
        )
    return list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))


def _audios(family: Family, row: PackedRow, types: torch.Tensor) -> MediaUnits:
    """Audios of the row; where the tower reads padding, their features depend on the longest one of their sample."""
    assert family.audio is not None
    count = len(row.media.to_hf()["feature_attention_mask"])
    parts = {name: Entries.of_counts([1] * count) for name in ("input_features", "feature_attention_mask")}
    longest = None
    if family.audio.reads_padding and row.tree is None:
        longest = family.audio.longest_of_samples(types, row.segments, row.host_metadata()).tolist()
    return MediaUnits(parts=parts, context=longest)


def _with_runs(
    metadata: HostMetadata, family: Family, config: Any, row: PackedRow, types: torch.Tensor
) -> HostMetadata:
    """Add the runs of tokens of each sample that see each other in both directions, where they are not known."""
    sees = family.sees
    if sees is None or metadata.media_runs or not sees.enabled(family.text_config(config)):
        return metadata
    return replace(metadata, media_runs=_by_sample(sees.of_row(row, types, ()), row.segments))


def _by_sample(runs: Runs, segments: Segments) -> tuple[Runs, ...]:
    """Runs of a row as those of each sample, from its first token on."""
    return tuple(
        tuple((start - first, stop - first) for start, stop in runs if first <= start < end)
        for first, end in segments.spans
    )
