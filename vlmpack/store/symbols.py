"""Symbols of samples, by content: token ids, and sums of the bytes of images and videos.

input_ids    a b <image> <image> <image> c d          placeholders of every image are the same id
symbols      a b 7f03..  7f03..  7f03..  c d          a number of the image's bytes and its grid
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from PIL import Image

from vlmpack.collate.collator import VLMCollator
from vlmpack.collate.encoded import Encoded, Visual
from vlmpack.collate.processor_metadata import ProcessorMetadata
from vlmpack.data.images import ImageError, ImageLimits, load_image, read_encoded
from vlmpack.errors import ConfigError
from vlmpack.families.registry import family_of_processor
from vlmpack.layout.batch import IMAGE, VIDEO, HostMetadata
from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.row import PackedRow
from vlmpack.layout.segments import Segments
from vlmpack.layout.sharing import find_prefix_tree
from vlmpack.plan.prefix_marks import PrefixMarks

STRIDE = 61
"""Of the values of pixels that came cut into patches, every so manieth is summed up."""


def content_sums(source: Any, limits: ImageLimits) -> Any:
    """Sum up an image by its length, CRC-32 and Adler-32; its size comes first where it is decoded already.

    They take a third of the time of SHA-256, and are enough against accidents.

    Args:
        source: as `load_image` takes it.
        limits: caps for images.

    Returns:
        A list of numbers; the slug of the reason if it cannot be read.
    """
    try:
        if isinstance(source, Image.Image):
            image = load_image(source, limits=limits)
            data, size = image.tobytes(), [image.size]
        else:
            data, size = read_encoded(source, limits=limits), []
    except ImageError as error:
        return error.reason
    return [*size, len(data), zlib.crc32(data), zlib.adler32(data)]


def media_numbers(visuals: Sequence[Visual], limits: ImageLimits) -> list[int]:
    """Return a number of 63 bits for the content and grid of each image or video, which is far above all token ids.

    Args:
        visuals: cut into patches or only measured; their sources are read whole.
        limits: caps for images.
    """
    return [_number(visual, limits) for visual in visuals]


def tree_of(samples: Sequence[Encoded], *, limits: ImageLimits, min_shared: int) -> PrefixTree | None:
    """Find the prefix tree of the row of some samples, without their pixels; None: they share nothing.

    Args:
        samples: of a row without padding, in its order; sources of their media are read whole.
        limits: caps for images.
        min_shared: of `SharePrefixes`.
    """
    if not samples:
        return None
    images = [image for sample in samples for image in sample.images]
    videos = [video for sample in samples for video in sample.videos]
    segments = Segments.from_lengths([sample.num_tokens for sample in samples])
    columns = (np.concatenate([sample.input_ids for sample in samples]), np.concatenate([s.types for s in samples]))
    ids, types = (torch.from_numpy(column).view(1, -1) for column in columns)
    metadata = HostMetadata(
        lengths=segments.lengths,
        image_grids=tuple(image.patch_grid for image in images if not image.runs),
        image_tokens=tuple(sum(image.runs) for image in images if image.runs),
        media_runs=tuple(s.media_runs for s in samples) if any(image.runs for image in images) else (),
        video_grids=tuple(video.patch_grid for video in videos),
        images_per_sample=tuple(len(sample.images) for sample in samples) if images else (),
        videos_per_sample=tuple(len(sample.videos) for sample in samples) if videos else (),
    )
    row = PackedRow(input_ids=ids, segments=segments, mm_token_type_ids=types, metadata=metadata)
    numbers = {"images": media_numbers(images, limits), "videos": media_numbers(videos, limits)}
    return find_prefix_tree(row, **numbers, min_shared=min_shared)


def marks_of(sample: Encoded, metadata: ProcessorMetadata, limits: ImageLimits) -> PrefixMarks:
    """Mark what a sample begins with, for `groups_of_marks`.

    Args:
        sample: cut into patches or only measured; sources of its media are read whole.
        metadata: of the processor.
        limits: caps for images.
    """
    symbols = np.array(sample.input_ids, np.int64)
    ends, patches = [], []
    for kind, visuals in ((IMAGE, sample.images), (VIDEO, sample.videos)):
        places = np.flatnonzero(sample.types == kind)
        tokens = [_tokens(visual, metadata) for visual in visuals]
        symbols[places] = np.repeat(media_numbers(visuals, limits), tokens)
        ends += (places[np.cumsum(tokens) - 1] + 1).tolist() if visuals else []
        patches += [num_patches(visual) for visual in visuals]
    if metadata.by_processor and metadata.has_vision:
        for start, stop in sample.media_runs:
            symbols[start:stop] = _digest(symbols[start:stop].tobytes())
    media = np.array(sorted(zip(ends, patches, strict=True)), np.int64).reshape(-1, 2)
    learnt = sample.labels >= 0
    turn_ends = np.flatnonzero(learnt[1:] != learnt[:-1]) + 1
    return PrefixMarks.of(symbols, turn_ends, media[:, 0], media[:, 1])


def num_patches(visual: Visual) -> int:
    """Patches of an image or video; its tokens, of families that are measured by these."""
    return sum(visual.runs) if visual.grid is None or visual.runs else prod(visual.grid)


def check_storable(collator: VLMCollator) -> None:
    """Refuse a collator whose samples are more than ids, labels, images and videos.

    Raises:
        ConfigError: they may have audio, or have prompts that see all of themselves.
    """
    metadata, name = collator.metadata, type(collator.processor).__name__
    more = f"samples of a {name} may have audio" if metadata.has_audio else None
    if metadata.by_processor and metadata.has_vision and family_of_processor(collator.processor).token_columns:
        more = f"the prompts of a {name} see all of themselves, and stored rows do not say where they end"
    if more:
        raise ConfigError(
            f"stored rows hold ids, labels, images and videos, but {more}; train from the data set itself: "
            "PackedStream and measure_lengths take every family"
        )


def why_no_marks(collator: VLMCollator) -> str | None:
    """Return the reason why it is not marked what a collator's samples begin with, in words; None: it is."""
    if not collator.metadata.has_audio:
        return None
    return f"samples of a {type(collator.processor).__name__} may have audio, whose content is not summed up"


def check_marks(collator: VLMCollator) -> None:
    """Refuse a collator whose samples' beginnings are not marked.

    Raises:
        ConfigError: its samples may have audio.
    """
    if without := why_no_marks(collator):
        raise ConfigError(
            f"min_shared finds what samples share by the content of their images, but {without}; leave it out: "
            "VLMCollator(share_prefixes=True) shares prefixes within a row all the same"
        )


def _tokens(visual: Visual, metadata: ProcessorMetadata) -> int:
    return sum(visual.runs) if visual.runs else prod(visual.patch_grid) // metadata.merge_size**2


def _number(visual: Visual, limits: ImageLimits) -> int:
    content: list[Any] = [_content(visual, limits), visual.grid, visual.seconds, visual.timestamps]
    content += [visual.runs] if visual.runs else []  # an image beside others may have other tokens than alone
    return _digest(json.dumps(content).encode())


def _digest(content: bytes) -> int:
    """A number of 63 bits."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1


def _content(visual: Visual, limits: ImageLimits) -> Sequence[Any]:
    if visual.source is not None:
        source = visual.source.source
        frames = source if isinstance(source, list | tuple) else [source]
        sums = ((content_sums(frame, limits), frame) for frame in frames)
        return [each if isinstance(each, list) else [each, f"{frame!r:.200}"] for each, frame in sums]
    assert visual.pixels is not None, "a medium has a source or pixels"
    values = visual.pixels.detach().reshape(-1)[::STRIDE].double().numpy().tobytes()
    return [len(values), zlib.crc32(values), zlib.adler32(values)]
