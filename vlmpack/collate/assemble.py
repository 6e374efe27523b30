"""Join encoded samples into a padded batch or a packed row: each tensor is written once, pixels are copied once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np
import torch

from vlmpack.collate.buffers import PixelBuffers
from vlmpack.collate.encoded import Encoded, Visual
from vlmpack.collate.processor_metadata import ProcessorMetadata
from vlmpack.layout import (
    IGNORE,
    IMAGE,
    TEXT,
    HostMetadata,
    Media,
    PackedRow,
    PaddedBatch,
    Segments,
    SlotRule,
    shift_labels,
)

NO_BUFFERS = PixelBuffers(0)
"""New memory for every batch."""


DEFAULT_SECONDS = 1.0
"""Seconds per video grid where a sample has none: what Qwen2.5-VL's model assumes."""


def to_padded(
    samples: Sequence[Encoded],
    *,
    pad_token_id: int,
    pixel_dtype: torch.dtype | None = None,
    buffers: PixelBuffers = NO_BUFFERS,
) -> PaddedBatch:
    """Pad samples on the right to [B, S]; S is the longest one.

    Raises:
        NotFinite: pixels of a sample are not finite.
    """
    width = max(sample.num_tokens for sample in samples)
    starts = [row * width for row in range(len(samples))]

    def batch(arrays: Sequence[np.ndarray], fill: int) -> torch.Tensor:
        return _write(arrays, starts, len(samples) * width, fill).view(len(samples), width)

    return PaddedBatch(
        input_ids=batch([s.input_ids for s in samples], pad_token_id),
        attention_mask=batch([np.ones_like(s.input_ids) for s in samples], 0),
        labels=batch([s.labels for s in samples], IGNORE),
        mm_token_type_ids=batch([s.types for s in samples], 0),
        media=_media(samples, pixel_dtype, buffers),
        metadata=_metadata(samples),
    )


def to_packed(
    samples: Sequence[Encoded],
    *,
    rule: SlotRule,
    pad_token_id: int,
    pixel_dtype: torch.dtype | None = None,
    buffers: PixelBuffers = NO_BUFFERS,
) -> PackedRow:
    """Pack samples into a row [1, T]: equal to `pack(to_padded(samples), rule=rule)`.

    Raises:
        LayoutError: the samples do not fit the rule's fixed row width or number of segments.
        NotFinite: pixels of a sample are not finite.
    """
    segments = Segments.from_lengths([sample.num_tokens for sample in samples], rule)
    starts = segments.stride[: len(samples)]

    def row(arrays: Sequence[np.ndarray], fill: int) -> torch.Tensor:
        return _write(arrays, starts, segments.total, fill).view(1, -1)

    return PackedRow(
        input_ids=row([s.input_ids for s in samples], pad_token_id),
        segments=segments,
        shift_labels=shift_labels(row([s.labels for s in samples], IGNORE), segments),
        mm_token_type_ids=row([s.types for s in samples], 0),
        media=_media(samples, pixel_dtype, buffers),
        metadata=_metadata(samples),
    )


def filler(metadata: ProcessorMetadata) -> Encoded:
    """Build the sample of a batch without samples: the smallest black image, or one token of text; no targets.

    A rank without a step would block the others in the next collective; with this sample it runs forward and backward
    through every part of the model, with a loss of 0.
    """
    ids, types, images = [metadata.pad_token_id], [TEXT], ()
    if metadata.has_vision:
        ids, types = [metadata.vision_start_id, metadata.image_token_id, metadata.vision_end_id], [TEXT, IMAGE, TEXT]
        merge = metadata.merge_size
        images = (Visual(pixels=torch.zeros(merge * merge, metadata.patch_dim), grid=(1, merge, merge)),)
    labels = np.full(len(ids), IGNORE, np.int64)
    return Encoded(input_ids=np.array(ids, np.int64), labels=labels, types=np.array(types, np.int64), images=images)


def _write(arrays: Sequence[np.ndarray], starts: Sequence[int], total: int, fill: int) -> torch.Tensor:
    """int64 [total]: each array at its start, `fill` elsewhere."""
    out = np.full(total, fill, np.int64)
    for array, start in zip(arrays, starts, strict=True):
        out[start : start + len(array)] = array
    return torch.from_numpy(out)


def _metadata(samples: Sequence[Encoded]) -> HostMetadata:
    images = tuple(len(sample.images) for sample in samples)
    videos = tuple(len(sample.videos) for sample in samples)
    return HostMetadata(
        lengths=tuple(sample.num_tokens for sample in samples),
        image_grids=tuple(image.grid for sample in samples for image in sample.images),
        video_grids=tuple(video.grid for sample in samples for video in sample.videos),
        images_per_sample=images if any(images) else (),
        videos_per_sample=videos if any(videos) else (),
        seconds_per_grid=_seconds(samples),
        num_targets=sum(sample.num_targets for sample in samples),
        sample_ids=tuple(sample.sample_id for sample in samples if sample.sample_id is not None),
    )


def _media(samples: Sequence[Encoded], dtype: torch.dtype | None, buffers: PixelBuffers) -> Media:
    images = [image for sample in samples for image in sample.images]
    videos = [video for sample in samples for video in sample.videos]
    seconds = _seconds(samples)
    return Media(
        pixel_values=_join(images, dtype, buffers),
        image_grid_thw=_grids(images),
        pixel_values_videos=_join(videos, dtype, buffers),
        video_grid_thw=_grids(videos),
        second_per_grid_ts=torch.tensor(seconds) if seconds else None,
    )


def _seconds(samples: Sequence[Encoded]) -> tuple[float, ...]:
    """One entry a video if any video has seconds; () if none has."""
    seconds = [video.seconds for sample in samples for video in sample.videos]
    if all(second is None for second in seconds):
        return ()
    return tuple(DEFAULT_SECONDS if second is None else second for second in seconds)


def _grids(visuals: Sequence[Visual]) -> torch.Tensor | None:
    return torch.tensor([visual.grid for visual in visuals], dtype=torch.int64) if visuals else None


def _join(visuals: Sequence[Visual], dtype: torch.dtype | None, buffers: PixelBuffers) -> torch.Tensor | None:
    """Join pixels into [P, C] of this type, or of the widest that they have."""
    if not visuals:
        return None
    parts = [visual.pixels.detach() for visual in visuals if visual.pixels is not None]
    assert len(parts) == len(visuals), "a measured sample has no pixels: decode it first"
    return buffers.join(parts, dtype or reduce(torch.promote_types, (part.dtype for part in parts)))
