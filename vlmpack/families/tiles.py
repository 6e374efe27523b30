"""Images that are rows of a batch, or tiles of one: how tensors of samples are joined, and which tokens stand for them.

A tower whose own code keeps images apart needs no boundaries of a row. What has to be right is the place of each
image's features: transformers puts them, one after the other, on the placeholders of the whole row.

    row       x [ i i i i ] x   x [ i i ; i i ] x       two samples; `i` a placeholder, `;` text between tiles
    tokens        4                 2     2             of each tile or image, in the order of the tensors
    ends                4                 8             placeholders up to the end of each sample

A sample ends where an image does, so no image's features lie in two samples. Where the host metadata counts the images
of samples, each sample has the placeholders of its own.

N tiles or images, S samples, T row tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
import torch.nn.functional as F

from vlmpack.errors import LayoutError
from vlmpack.families.spans import Runs
from vlmpack.layout.batch import IMAGE, VIDEO, HostMetadata, Media
from vlmpack.layout.device import on_host, require, to_device
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

TileTokens = Callable[[Mapping[str, torch.Tensor], Any], Sequence[int]]
"""Media tensors by name, and the model's configuration, to the placeholder tokens of each tile or image, in order."""

TileEntries = Callable[[Mapping[str, torch.Tensor], Any], Mapping[str, Sequence[np.ndarray]]]
"""Media tensors by name, and the model's configuration, to the entries of each tile or image, int64 along the axis on
which samples are joined, in the tensors that have not one each."""

TileBoundaries = Callable[[Mapping[str, torch.Tensor], Any], Sequence[Segments]]
"""Media tensors by name, and the model's configuration, to every set of boundaries that blocks of a tower attend in."""


@final
@dataclass(frozen=True, kw_only=True)
class Join:
    """Rule for joining the tensors of one name of several samples."""

    axis: int = 0
    """The axis along which samples follow each other."""
    pad: bool = False
    """True if the other axes are padded with zeros to a common size."""
    counts_images: bool = False
    """True if its entries are the numbers of images of samples, [samples with images]."""

    def __call__(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join tensors of any equal number of axes, in order.

        Raises:
            LayoutError: their sizes differ on another axis than that along which they are joined.
        """
        if self.pad:
            sizes = np.max([tensor.shape for tensor in tensors], axis=0)
            tensors = [_padded(tensor, sizes, self.axis) for tensor in tensors]
        shapes = {(*tensor.shape[: self.axis], *tensor.shape[self.axis :][1:]) for tensor in tensors}
        if len(shapes) > 1:
            raise LayoutError(
                f"media of the samples are {', '.join(str(list(tensor.shape)) for tensor in tensors[:9])}, which "
                f"cannot follow each other along axis {self.axis}; let one processor make them all"
            )
        return torch.cat([*tensors], self.axis)


def _padded(tensor: torch.Tensor, sizes: np.ndarray, axis: int) -> torch.Tensor:
    missing = [0 if at == axis else int(size) - n for at, (size, n) in enumerate(zip(sizes, tensor.shape, strict=True))]
    return F.pad(tensor, [end for n in reversed(missing) for end in (0, n)]) if any(missing) else tensor


QWEN_MEDIA: Mapping[str, Join] = {
    name: Join() for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
}
"""Patches and grids of images and of videos, one after the other."""


# ---------------------------------------------------------------------- tokens of tiles


def counted_tokens(media: Media, known: Sequence[int], rule: TileTokens, config: Any) -> tuple[int, ...]:
    """Count the placeholder tokens of each tile or image of a row.

    On a device with metadata that is its count; without, sizes of images are read, one host–device sync.

    Args:
        media: the row's.
        known: placeholder tokens of each image as the host metadata counts them; empty: not counted.
        rule: of the family.
        config: the model's configuration.

    Raises:
        LayoutError: the metadata counts other tokens than the tensors make.
    """
    tensors = media.to_hf()
    pixels = tensors.get("pixel_values")
    if pixels is not None and known and not on_host(pixels):
        return tuple(known)
    counted = () if pixels is None else tuple(int(n) for n in rule(tensors, config))
    if known and sum(known) != sum(counted):
        raise LayoutError(
            f"the host metadata counts {sum(known)} tokens of {len(known)} images, but pixel_values and what came with "
            f"it make {sum(counted)}; leave the metadata out of a batch whose images were changed"
        )
    return tuple(known) or counted


def patches_in(pixels: Sequence[torch.Tensor], vision: Any) -> int:
    """Count the patches of all these pixels; `vision`: the vision part's configuration."""
    vision = getattr(vision, "sam_config", vision)  # of DeepSeek-OCR 2's tower the part that is given pixels
    sides = vision.patch_size if isinstance(vision.patch_size, list | tuple) else (vision.patch_size,) * 2
    return sum(tensor.numel() for tensor in pixels) // (getattr(vision, "num_channels", 3) * prod(sides))


def check_tiles(types: torch.Tensor, segments: Segments, metadata: HostMetadata, *, kind: int = IMAGE) -> None:
    """Insist that each sample has the placeholders of its own images, or videos. No host–device sync.

    Args:
        types: [1, T], 0 text, 1 image, 2 video.
        segments: the row's samples.
        metadata: with the tokens of each image or tile, and the images of each sample, if that was counted; of videos
            with theirs in place of images'.
        kind: of the placeholders.

    Raises:
        LayoutError: placeholders on padding, of another number than the images make, or images in two samples; on the
            host it names the sample.
    """
    counts = (types[0] == kind).cumsum(0)
    counts_T1 = torch.cat((counts.new_zeros(1), counts))
    edges = np.asarray([edge for span in segments.spans for edge in span], np.int64)
    of_spans = counts_T1.index_select(0, to_device(edges, types.device)).view(-1, 2)
    of_samples = of_spans[:, 1] - of_spans[:, 0]
    expected, images = _per_sample(metadata), np.asarray(metadata.image_tokens, np.int64)
    if on_host(types):
        _check_on_host(of_samples.numpy(), int(counts_T1[-1]), images, expected, _NOUNS[kind])
        return
    total = (counts_T1[-1] == int(images.sum())) & (of_samples.sum() == int(images.sum()))
    if expected is not None:
        right = (of_samples == to_device(expected, types.device)).all()
    else:
        right = torch.isin(of_samples.cumsum(0), to_device(np.append(images.cumsum(), 0), types.device)).all()
    require(total & right, _SOMEWHERE.format(_NOUNS[kind]) + _REMEDY, LayoutError)


_NOUNS = {IMAGE: "image", VIDEO: "video"}
_SOMEWHERE = "{0} placeholders of a sample are not as many as its {0}s make: "
_REMEDY = "every image or video needs its placeholders and its pixels, in the order of samples"


def _per_sample(metadata: HostMetadata) -> np.ndarray | None:
    """int64 [S]: placeholders of each sample; None: its images are not counted."""
    per_sample = np.asarray(metadata.images_per_sample, np.int64)
    if not len(per_sample) or per_sample.sum() != len(metadata.image_tokens):
        return None
    ends = np.append(0, np.cumsum(metadata.image_tokens, dtype=np.int64))
    last = per_sample.cumsum()
    return ends[last] - ends[last - per_sample]


def _check_on_host(counted: np.ndarray, total: int, images: np.ndarray, expected: np.ndarray | None, noun: str) -> None:
    if total != counted.sum():
        raise LayoutError(
            f"padding of the row has {total - counted.sum()} {noun} placeholders; {_REMEDY}, and padding has none"
        )
    differs = counted != expected
    if expected is None:
        differs = ~np.isin(counted.cumsum(), np.append(images.cumsum(), 0))
    seen = ""
    if differs.any():
        at = int(differs.argmax())
        seen = f"sample {at} has {counted[at]} {noun} placeholders"
        if expected is not None:
            seen += f", but its {noun}s make {expected[at]} tokens: "
        elif total != images.sum():
            seen += f" and ends where no {noun} does: "
        else:
            seen = f"sample {at} ends in the middle of an {noun}: "
    if seen or total != images.sum():
        raise LayoutError(
            f"{seen}the row has {total} {noun} placeholders, but its {len(images)} {noun}s or tiles make "
            f"{images.sum()} tokens; {_REMEDY}"
        )


# ---------------------------------------------------------------------- the media of a row, for shared prefixes


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
        known = row.metadata_of_media().image_tokens
        images, image_tokens = _tiles(family, config, tensors, family.tile_tokens, known, videos=False)
        videos, video_tokens = _tiles(family, config, tensors, family.video_tokens, (), videos=True)
        metadata = replace(
            of_row.metadata,
            image_tokens=of_row.metadata.image_tokens or image_tokens,
            video_tokens=of_row.metadata.video_tokens or video_tokens,
        )
        of_row = replace(of_row, images=images, videos=videos, metadata=metadata)
    if row.media.audio_mask is not None:
        of_row = replace(of_row, audios=_audios(family, row, types))
    return replace(of_row, metadata=_with_runs(of_row.metadata, family, config, row, types))


_OF_VIDEOS = ("pixel_values_videos", "target_sizes_videos")
"""Tensors of videos without grids."""


def _tiles(
    family: Family,
    config: Any,
    tensors: Mapping[str, torch.Tensor],
    rule: TileTokens | None,
    known: Sequence[int],
    *,
    videos: bool,
) -> tuple[MediaUnits, tuple[int, ...]]:
    """Images, or videos, that are tiles or rows of a batch, and the tokens of each tile; `known`: of each image."""
    names = [name for name in tensors if (name in _OF_VIDEOS) == videos]
    if rule is None or f"pixel_values{'_videos' * videos}" not in names:
        return MediaUnits(), ()
    tokens = tuple(int(count) for count in rule(tensors, config))
    spans = _tiles_of_images(tokens, known or tokens)
    entries = {} if family.tile_entries is None else family.tile_entries(tensors, config)
    parts: dict[str, Entries | ImagesOfSamples] = {}
    for name in names:
        tensor, join = tensors[name], family.media[name]
        if join.counts_images:
            parts[name] = ImagesOfSamples(is_alone=[n == 1 for n in tensor.tolist() for _ in range(n)])
            continue
        of_tiles = entries.get(name) or list(np.arange(tensor.shape[join.axis])[:, None])
        if len(of_tiles) != len(tokens):
            raise LayoutError(
                f"{name} is {list(tensor.shape)}, but the row has {len(tokens)} images or tiles; keep what the "
                "processor gives"
            )
        parts[name] = Entries(of_medium=[_joined(of_tiles[start:stop]) for start, stop in spans], axis=join.axis)
    return MediaUnits(parts=parts), tokens


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
