"""Join encoded samples into a padded batch or a packed row: each tensor is written once, pixels are copied once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import final

import numpy as np
import torch

from vlmpack.collate.buffers import NotFinite, PixelBuffers, is_finite
from vlmpack.collate.encoded import Encoded, Visual
from vlmpack.collate.processor_metadata import ProcessorMetadata
from vlmpack.errors import check_whole_number
from vlmpack.families import Join, media_runs, prefix_run
from vlmpack.layout import (
    IGNORE,
    IMAGE,
    MIN_SHARED,
    TEXT,
    Grid,
    HostMetadata,
    Media,
    PackedRow,
    PaddedBatch,
    PrefixTree,
    Segments,
    SlotRule,
    content_numbers,
    find_prefix_tree,
    shift_labels,
    with_tree,
)

NO_BUFFERS = PixelBuffers(0)
"""New memory for every batch."""

PATCHES: Mapping[str, Join] = {}
"""No joins: images are patches with grids, one after the other."""

_SECONDS = "video_second_per_grid"
"""Qwen-Omni's name of the seconds from one grid of each video to the next."""
DEFAULT_SECONDS = 1.0
"""Seconds per video grid where a sample has none: what Qwen2.5-VL's model assumes."""


@final
@dataclass(frozen=True, kw_only=True)
class SharePrefixes:
    """How samples of a row that begin alike are laid out as a tree."""

    min_shared: int = MIN_SHARED
    """Tokens of a shared beginning, counted from the last branching, below which it is repeated in each branch; and the
    repetitions, in tokens, from which a shorter one behind a shared beginning is laid out once after all."""

    def __post_init__(self) -> None:
        """Refuse a number below 1: a ConfigError."""
        check_whole_number("SharePrefixes.min_shared", self.min_shared)


def to_padded(
    samples: Sequence[Encoded],
    *,
    pad_token_id: int,
    pixel_dtype: torch.dtype | None = None,
    buffers: PixelBuffers = NO_BUFFERS,
    joins: Mapping[str, Join] = PATCHES,
) -> PaddedBatch:
    """Pad samples on the right to [B, S]; S is the longest one. `joins`: of `Family.media`, for images without grids.

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
        media=_with_audio(_media(_images(samples), _videos(samples), pixel_dtype, buffers, joins), samples, joins),
        extras={name: batch([s.columns[name] for s in samples], 0) for name in samples[0].columns},
        metadata=_metadata(samples),
    )


def to_packed(
    samples: Sequence[Encoded],
    *,
    rule: SlotRule,
    pad_token_id: int,
    pixel_dtype: torch.dtype | None = None,
    buffers: PixelBuffers = NO_BUFFERS,
    joins: Mapping[str, Join] = PATCHES,
    sharing: SharePrefixes | None = None,
) -> PackedRow:
    """Pack samples into a row [1, T]: equal to `pack(to_padded(samples), rule=rule)`.

    With `sharing` it equals `share` of that row, but what samples share is joined once.

    Raises:
        LayoutError: the samples do not fit the rule's fixed row width or number of segments, or cannot be shared.
        NotFinite: pixels of a sample are not finite.
    """
    segments = Segments.from_lengths([sample.num_tokens for sample in samples], rule)
    starts = segments.stride[: len(samples)]

    def row(arrays: Sequence[np.ndarray], fill: int) -> torch.Tensor:
        return _write(arrays, starts, segments.total, fill).view(1, -1)

    packed = PackedRow(
        input_ids=row([s.input_ids for s in samples], pad_token_id),
        segments=segments,
        shift_labels=shift_labels(row([s.labels for s in samples], IGNORE), segments),
        mm_token_type_ids=row([s.types for s in samples], 0),
        extras={name: row([s.columns[name] for s in samples], 0) for name in samples[0].columns},
        metadata=_metadata(samples),
    )
    images, videos = _images(samples), _videos(samples)
    tree = None if sharing is None else _tree(packed, images, videos, sharing)
    if tree is not None:
        packed = with_tree(packed, tree)
        images, videos = [images[at] for at in tree.images], [videos[at] for at in tree.videos]
    media = _media(images, videos, pixel_dtype, buffers, joins)
    return replace(packed, media=_with_audio(media, samples, joins))


def _tree(
    row: PackedRow, images: Sequence[Visual], videos: Sequence[Visual], sharing: SharePrefixes
) -> PrefixTree | None:
    """The tree of a row without pixels, found before those of its media are joined."""
    return find_prefix_tree(
        row,
        images=content_numbers(_pixels(images)),
        videos=content_numbers(_pixels(videos)),
        min_shared=sharing.min_shared,
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
    audios = tuple(len(sample.audios) for sample in samples)
    has_tiles = any(image.grid is None for image in _images(samples))
    return HostMetadata(
        lengths=tuple(sample.num_tokens for sample in samples),
        media_runs=tuple(map(_runs, samples)) if has_tiles or samples[0].columns else (),
        image_grids=_grids(_images(samples)),
        video_grids=_grids(_videos(samples)),
        image_tokens=tuple(sum(image.runs) for image in _images(samples) if image.grid is None),
        images_per_sample=images if any(images) else (),
        videos_per_sample=videos if any(videos) else (),
        audio_frames=tuple(0 if a.pixels is None else a.pixels.shape[2] for a in _audios(samples)),
        audios_per_sample=audios if any(audios) else (),
        seconds_per_grid=_seconds(_videos(samples)),
        num_targets=sum(sample.num_targets for sample in samples),
        sample_ids=tuple(sample.sample_id for sample in samples if sample.sample_id is not None),
    )


def _runs(sample: Encoded) -> tuple[tuple[int, int], ...]:
    """The prefix of a sample whose family has prefixes, or the runs of its media tokens."""
    column = next(iter(sample.columns.values()), None)
    return media_runs(sample.types) if column is None else prefix_run(column)


def _images(samples: Sequence[Encoded]) -> list[Visual]:
    return [image for sample in samples for image in sample.images]


def _videos(samples: Sequence[Encoded]) -> list[Visual]:
    return [video for sample in samples for video in sample.videos]


def _audios(samples: Sequence[Encoded]) -> list[Visual]:
    return [audio for sample in samples for audio in sample.audios]


def _with_audio(media: Media, samples: Sequence[Encoded], joins: Mapping[str, Join]) -> Media:
    """Add log-mel frames, padded to the longest, and their mask. They stay float32: the model casts them itself."""
    if not (audios := _audios(samples)):
        return media
    frames = _pixels(audios)
    finite = [is_finite(part) for part in frames]
    if not all(finite):
        raise NotFinite(finite.index(False))
    tensors = {
        "input_features": joins["input_features"](frames),
        "feature_attention_mask": joins["feature_attention_mask"](
            [audio.tensors["feature_attention_mask"] for audio in audios]
        ),
    }
    return replace(media, tensors={**media.tensors, **tensors})


def _media(
    images: Sequence[Visual],
    videos: Sequence[Visual],
    dtype: torch.dtype | None,
    buffers: PixelBuffers,
    joins: Mapping[str, Join],
) -> Media:
    seconds, grids = _seconds(videos), _grids(images)
    parts = {name: [image.tensors[name] for image in images if name in image.tensors] for name in joins}
    return Media(
        pixel_values=_join(images, dtype, buffers, joins.get("pixel_values", Join())),
        image_grid_thw=_table(grids),
        pixel_values_videos=_join(videos, dtype, buffers, Join()),
        video_grid_thw=_table(_grids(videos)),
        second_per_grid_ts=torch.tensor(seconds) if seconds and _SECONDS not in joins else None,
        tensors={name: joins[name](_cast(tensors, dtype)) for name, tensors in parts.items() if tensors}
        | ({_SECONDS: torch.tensor(seconds)} if seconds and _SECONDS in joins else {}),
    )


def _cast(tensors: Sequence[torch.Tensor], dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Floats, such as the tiles of images, in the type of pixels.

    Raises:
        NotFinite: one holds NaN or infinity.
    """
    if not tensors[0].is_floating_point():
        return [*tensors]
    if not all(finite := [is_finite(tensor) for tensor in tensors]):
        raise NotFinite(finite.index(False))
    return [tensor if dtype is None else tensor.to(dtype) for tensor in tensors]


def _seconds(videos: Sequence[Visual]) -> tuple[float, ...]:
    """One entry a video if any video has seconds; () if none has."""
    seconds = [video.seconds for video in videos]
    if all(second is None for second in seconds):
        return ()
    return tuple(DEFAULT_SECONDS if second is None else second for second in seconds)


def _grids(visuals: Sequence[Visual]) -> tuple[Grid, ...]:
    return tuple(visual.grid for visual in visuals if visual.grid is not None)


def _table(grids: Sequence[Grid]) -> torch.Tensor | None:
    return torch.tensor(grids, dtype=torch.int64) if grids else None


def _join(
    visuals: Sequence[Visual], dtype: torch.dtype | None, buffers: PixelBuffers, join: Join
) -> torch.Tensor | None:
    """Join pixels, along the first axis in reused memory, into this type or the widest that they have."""
    if not visuals:
        return None
    parts = [pixels.detach() for pixels in _pixels(visuals)]
    dtype = dtype or reduce(torch.promote_types, (part.dtype for part in parts))
    if join.axis == 0 and len({part.shape[1:] for part in parts}) == 1:
        return buffers.join(parts, dtype)
    if not all(finite := [is_finite(part) for part in parts]):
        raise NotFinite(finite.index(False))
    return join([part.to(dtype) for part in parts])


def _pixels(visuals: Sequence[Visual]) -> list[torch.Tensor]:
    """[P, C] of each: one object for media that were cut once."""
    parts = [visual.pixels for visual in visuals if visual.pixels is not None]
    assert len(parts) == len(visuals), "a measured sample has no pixels: decode it first"
    return parts
