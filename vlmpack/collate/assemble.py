"""Encoded samples → the padded batch or the packed row; each tensor is written once, and pixels are copied once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import final

import numpy as np
import torch

from vlmpack.collate.buffers import NotFinite, PixelBuffers, is_finite
from vlmpack.collate.encoded import Encoded, Visual
from vlmpack.collate.processor_metadata import ProcessorMetadata
from vlmpack.layout import IGNORE, IMAGE, HostMetadata, Media, PackedRow, PaddedBatch, Segments, SlotRule, shift_labels

NO_BUFFERS = PixelBuffers(0)
"""New memory for every batch."""


@final
class BrokenPixels(Exception):  # noqa: N818 (never leaves the room: the collator refuses the sample)
    """An image or a video of at least one sample holds NaN or infinity."""

    def __init__(self) -> None:
        super().__init__("its pixels hold NaN or infinity; the image is broken or was normalised by 0")


def has_broken_pixels(sample: Encoded) -> bool:
    """Whether a sample is one of those for which `BrokenPixels` is raised."""
    visuals = (*sample.images, *sample.videos)
    return not all(is_finite(visual.pixels) for visual in visuals if visual.pixels is not None)


UNTOLD_SECONDS = 1.0
"""Seconds per video grid where a sample does not tell: what Qwen2.5-VL's model assumes."""


def to_padded(
    samples: Sequence[Encoded],
    *,
    pad_token_id: int,
    pixel_dtype: torch.dtype | None = None,
    buffers: PixelBuffers = NO_BUFFERS,
) -> PaddedBatch:
    """[B, S], padded on the right; S is the longest sample.

    Raises:
        BrokenPixels: pixels of a sample are not finite.
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
    """[1, T], straight from the samples: equal to `pack(to_padded(samples), rule=rule)`.

    Raises:
        LayoutError: the samples do not fit the rule's fixed row width or number of segments.
        BrokenPixels: pixels of a sample are not finite.
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
        metadata=_metadata(samples, segments=segments),
    )


def filler(metadata: ProcessorMetadata) -> Encoded:
    """What stands in for a batch without samples: one smallest black image, or one token of text; nothing to learn.

    A rank with nothing to do would leave the others waiting in the next collective operation; this gives it a forward
    and a backward pass through every part of the model, with a loss of 0.
    """
    if not metadata.has_vision:
        ids = np.array([metadata.pad_token_id], np.int64)
        return Encoded(input_ids=ids, labels=np.full_like(ids, IGNORE), types=np.zeros_like(ids))
    ids = np.array([metadata.vision_start_id, metadata.image_token_id, metadata.vision_end_id], np.int64)
    merge = metadata.merge_size
    image = Visual(pixels=torch.zeros(merge * merge, metadata.patch_dim), grid=(1, merge, merge))
    types = np.array([0, IMAGE, 0], np.int64)
    return Encoded(input_ids=ids, labels=np.full_like(ids, IGNORE), types=types, images=(image,))


def _write(arrays: Sequence[np.ndarray], starts: Sequence[int], total: int, fill: int) -> torch.Tensor:
    """int64 [total]: each array at its start, `fill` elsewhere."""
    out = np.full(total, fill, np.int64)
    for array, start in zip(arrays, starts, strict=True):
        out[start : start + len(array)] = array
    return torch.from_numpy(out)


def _metadata(samples: Sequence[Encoded], segments: Segments | None = None) -> HostMetadata:
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
        segments=segments,
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
    """One entry a video if any video tells; () if none does."""
    seconds = [video.seconds for sample in samples for video in sample.videos]
    if all(second is None for second in seconds):
        return ()
    return tuple(UNTOLD_SECONDS if second is None else second for second in seconds)


def _grids(visuals: Sequence[Visual]) -> torch.Tensor | None:
    return torch.tensor([visual.grid for visual in visuals], dtype=torch.int64) if visuals else None


def _join(visuals: Sequence[Visual], dtype: torch.dtype | None, buffers: PixelBuffers) -> torch.Tensor | None:
    """[P, C] in the given type, or in the widest of their own."""
    if not visuals:
        return None
    parts = [visual.pixels.detach() for visual in visuals if visual.pixels is not None]
    assert len(parts) == len(visuals), "an outline has no pixels: fill it first"
    try:
        return buffers.join(parts, dtype or reduce(torch.promote_types, (part.dtype for part in parts)))
    except NotFinite as found:
        raise BrokenPixels from found
