"""The images, videos and audios of a row, each with its part of the media tensors, so that some of them can be kept.

    pixel_values      a a a a b b c c c c c c       patches; `a`, `b`, `c` are images
    image_grid_thw    a       b   c                 a row of the tensor each

Of images and videos with grids these parts follow from the grids (`grid_units`). Of other images and of audio the
model's family knows them (`Family.media_units`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, final

import numpy as np
import torch

from vlmpack.errors import LayoutError
from vlmpack.layout.batch import MEDIA_KEYS, Grid, HostMetadata, Media
from vlmpack.layout.device import on_host

if TYPE_CHECKING:
    from vlmpack.layout.row import PackedRow

LOOKED_AT = 2**13
"""Values of a medium, spread over it, that have to agree with another's before both are compared whole."""
PIECE = 2**15
"""Values that are compared at a time, in the cache of a core."""


# ---------------------------------------------------------------------- parts of tensors


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Entries:
    """The entries of one media tensor that belong to each medium."""

    of_medium: Sequence[np.ndarray]
    """int64 of each medium: its entries along `axis`, rising."""
    axis: int = 0
    """The axis along which media follow each other; 1: of a batch [B, N, ...], row after row."""

    @classmethod
    def of_counts(cls, counts: Iterable[int], *, axis: int = 0) -> Entries:
        """Media that follow each other, of so many entries each."""
        lengths = np.fromiter(counts, np.int64)
        stops = lengths.cumsum()
        return cls(of_medium=[np.arange(stop - n, stop) for stop, n in zip(stops, lengths, strict=True)], axis=axis)

    def contents(self, tensor: torch.Tensor) -> Sequence[Hashable]:
        """Number the parts of media by their content."""
        return content_numbers([self._part(tensor, entries) for entries in self.of_medium])

    def take(self, tensor: torch.Tensor, media: Sequence[int], samples: Sequence[int] | None) -> torch.Tensor:
        """The parts of these media, in this order."""
        if list(media) == list(range(len(self.of_medium))):
            return tensor
        return torch.cat([self._part(tensor, self.of_medium[at]) for at in media], self.axis)

    def _part(self, tensor: torch.Tensor, entries: np.ndarray) -> torch.Tensor:
        """A view, where the entries follow each other."""
        if self.axis == 1 and len(tensor) > 1:
            tensor = tensor.flatten(0, 1)[None]
        first, count = int(entries[0]) if len(entries) else 0, len(entries)
        if not count or int(entries[-1]) - first == count - 1:
            return tensor.narrow(self.axis, first, count)
        return tensor.index_select(self.axis, torch.from_numpy(entries))


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ImagesOfSamples:
    """A tensor [samples with images] that counts the images of each.

    The model reads off it alone whether an image is the only one of its sample. Those that are not stand side by side,
    in a prefix tree too, where further images of their samples follow them.
    """

    is_alone: Sequence[bool]
    """True of each image that is the only one of its sample."""

    def contents(self, tensor: torch.Tensor) -> Sequence[Hashable]:
        """Return whether each image is alone: it has other features then."""
        return [*self.is_alone]

    def take(self, tensor: torch.Tensor, media: Sequence[int], samples: Sequence[int] | None) -> torch.Tensor:
        """Count these images: of each sample, or without samples of neighbours that are not alone."""
        counts: list[int] = []
        before: Hashable = None
        for place, medium in enumerate(media):
            alone = self.is_alone[medium]
            group = (False if samples is None else samples[place], alone)
            counts[-1:] = [*counts[-1:], 1] if alone or group != before else [counts[-1] + 1]
            before = group
        return torch.tensor(counts, dtype=tensor.dtype)


Parts = Entries | ImagesOfSamples


# ---------------------------------------------------------------------- media


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class MediaUnits:
    """The media of one kind, images, videos or audios."""

    parts: Mapping[str, Parts] = field(default_factory=dict)
    """Of each of their tensors, by its name: what belongs to each of them."""
    context: Sequence[Hashable] | None = None
    """A further value for each, on which its features depend; None: tensors alone decide."""

    def numbers(self, media: Media) -> list[int]:
        """One number for each medium; equal ones have equal features."""
        tensors = media.to_hf()
        contents = [part.contents(torch.as_tensor(tensors[name])) for name, part in self.parts.items()]
        numbers: dict[Hashable, int] = {}
        further = [] if self.context is None else [self.context]
        return [numbers.setdefault(content, len(numbers)) for content in zip(*contents, *further, strict=True)]

    def take(self, media: Media, chosen: Sequence[int], samples: Sequence[int] | None) -> dict[str, torch.Tensor]:
        """The tensors of these media, in this order; `samples`: that of each, None of those of a tree."""
        tensors = media.to_hf()
        taken = {name: part.take(torch.as_tensor(tensors[name]), chosen, samples) for name, part in self.parts.items()}
        return {name: tensor for name, tensor in taken.items() if tensor.numel()}  # none of them may have tiles


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class RowMedia:
    """The media of a row by kind; every media tensor belongs to one of them."""

    metadata: HostMetadata
    """Of the row, with the grids or tokens of every medium."""
    types: torch.Tensor | None = None
    """[1, T]: kinds of tokens, of a row that may have none; None: it has."""
    images: MediaUnits = field(default_factory=MediaUnits)
    videos: MediaUnits = field(default_factory=MediaUnits)
    audios: MediaUnits = field(default_factory=MediaUnits)

    @property
    def by_kind(self) -> tuple[MediaUnits, MediaUnits, MediaUnits]:
        """Images, videos, audios."""
        return self.images, self.videos, self.audios

    def take(
        self, media: Media, chosen: Sequence[Sequence[int]], samples: Sequence[Sequence[int] | None] = (None,) * 3
    ) -> Media:
        """The images, videos and audios of these numbers, in this order; `samples`: that of each, None in a tree."""
        tensors: dict[str, torch.Tensor] = {}
        for units, numbers, of_samples in zip(self.by_kind, chosen, samples, strict=True):
            tensors |= units.take(media, numbers, of_samples)
        return Media.from_hf(tensors, names=[name for name in tensors if name not in MEDIA_KEYS])


FindMedia = Callable[["PackedRow"], RowMedia]
"""Finds the media of a row whose tensors are those of its samples, or of its tree."""


def grid_units(row: PackedRow) -> RowMedia:
    """Find images and videos by their grids.

    Raises:
        LayoutError: tensors of other media, other patches than the grids describe, or pixels on a device.
    """
    media = row.media
    if media.audio_mask is not None:
        raise LayoutError(f"the row has audio, {_OF_FAMILY}")
    by_grids = media.pixel_values is None or media.image_grid_thw is not None or row.known_metadata.image_grids
    if not by_grids or {*media.tensors} - {"video_second_per_grid"}:
        raise LayoutError(
            "media of this row are not images and videos with grids alone (image_grid_thw, video_grid_thw), "
            f"{_OF_FAMILY}"
        )
    return units_of_grids(row)


def units_of_grids(row: PackedRow) -> RowMedia:
    """Find images and videos by their grids, and leave audio out."""
    media, metadata = row.media, row.metadata_of_media()
    return RowMedia(
        metadata=row.host_metadata(),
        images=_of_grids(media, metadata.image_grids, ("pixel_values", "image_grid_thw")),
        videos=_of_grids(
            media,
            metadata.video_grids,
            ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts", "video_second_per_grid"),
        ),
    )


_OF_FAMILY = (
    "so that those of one sample cannot be found without the model's family: give "
    "units=family_named(model.config.model_type).media_units(model.config) of vlmpack.families; "
    "VLMCollator(share_prefixes=True) needs nothing"
)


def _of_grids(media: Media, grids: Sequence[Grid], names: Sequence[str]) -> MediaUnits:
    """Media of these grids, the first name that of their patches."""
    tensors = media.to_hf()
    pixels = tensors.get(names[0])
    count, expected = 0 if pixels is None else len(pixels), sum(map(prod, grids))
    if count != expected:
        raise LayoutError(f"the grids describe {expected} patches, the row has {count}; give every sample's media")
    if pixels is not None:
        check_pixels_on_host(pixels)
    parts = {name: Entries.of_counts([1] * len(grids)) for name in names[1:] if name in tensors}
    if pixels is not None:
        parts[names[0]] = Entries.of_counts(map(prod, grids))
    return MediaUnits(parts=parts)


def check_pixels_on_host(pixels: torch.Tensor) -> None:
    """Raise a `LayoutError` for media on a device, whose content is not compared there."""
    if not on_host(pixels):
        raise LayoutError(f"the pixels are on {pixels.device}; share the row before it is moved to a device")


# ---------------------------------------------------------------------- content


def content_numbers(blocks: Sequence[torch.Tensor]) -> list[int]:
    """Number media by their content: equal numbers if and only if shape, type and every value are the same bits.

    Some values of each find those that may be equal; these are then compared whole.

    Args:
        blocks: the values of each, of any shape, on the host.
    """
    numbers: list[int] = []
    by_object: dict[int, int] = {}
    alike: dict[Hashable, list[int]] = {}  # places of different media that agree in the values looked at
    for at, block in enumerate(blocks):
        if id(block) not in by_object:
            values = _bits(block)
            step = len(values) // LOOKED_AT | 1  # odd: sides of patches are even
            candidates = alike.setdefault((block.shape, block.dtype, values[::step].tobytes()), [])
            equal = next((other for other in candidates if _are_equal(values, _bits(blocks[other]))), at)
            if equal == at:
                candidates.append(at)
            by_object[id(block)] = equal
        numbers.append(by_object[id(block)])
    return numbers


_OF_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(block: torch.Tensor) -> np.ndarray:
    """Every value as a whole number of the same bits: NaN equals itself, and no type is missing in numpy."""
    return block.detach().contiguous().view(_OF_WIDTH[block.element_size()]).numpy().reshape(-1)


def _are_equal(values: np.ndarray, others: np.ndarray) -> bool:
    """Compare piece by piece, up to the first difference."""
    pieces = range(0, len(values), PIECE)
    return all(np.array_equal(values[at : at + PIECE], others[at : at + PIECE]) for at in pieces)
