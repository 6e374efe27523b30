"""Join encoded samples into a padded batch or a packed row. Each tensor is written once; pixels are copied once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import Any

import numpy as np
import torch

from vlmpack.collate.buffers import NotFinite, PixelBuffers, is_finite
from vlmpack.collate.encoded import PIXELS, TYPES, Encoded, Visual
from vlmpack.data.formats import KINDS, Kind
from vlmpack.errors import SampleError, check_kind, check_whole_number
from vlmpack.families.family import Family
from vlmpack.families.tiles import Join
from vlmpack.layout.batch import NO_ENTRY, SIZES, TEACHER, HostMetadata, Media, PaddedBatch
from vlmpack.layout.media import Expected, MediaTable, Medium, content_numbers, image_counts, place
from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.row import IGNORE, PackedRow, roll_left, shift_labels
from vlmpack.layout.segments import Segments, SlotRule
from vlmpack.layout.sharing import MIN_SHARED, find_prefix_tree, with_tree

NO_BUFFERS = PixelBuffers(0)
"""Allocates new memory for every batch."""

_SECONDS = "video_second_per_grid"
"""Qwen-Omni's name for the seconds from one grid of each video to the next."""
DEFAULT_SECONDS = 1.0
"""Seconds per video grid if a sample gives none, as assumed by Qwen2.5-VL's model."""


@dataclass(frozen=True, kw_only=True)
class SharePrefixes:
    """How to lay out the samples of a row as a tree of shared prefixes."""

    min_shared: int = MIN_SHARED
    """Minimum length in tokens of a shared prefix, counted from the previous branch point. A shorter one is repeated in
    each branch, unless it follows a shared prefix and its repetitions would amount to at least this many tokens."""

    def __post_init__(self) -> None:
        """Raise a ConfigError for a number below 1."""
        check_whole_number("SharePrefixes.min_shared", self.min_shared)

    @classmethod
    def of(cls, setting: bool | SharePrefixes) -> SharePrefixes | None:
        """Return how prefixes are shared: True: by default; False: not at all (None). Another type is a ConfigError."""
        if not setting:
            return None
        sharing = cls() if setting is True else setting
        check_kind("share_prefixes", sharing, cls, "SharePrefixes(min_shared=64)")
        return sharing


def to_padded(
    samples: Sequence[Encoded],
    *,
    pad_token_id: int,
    pixel_dtype: torch.dtype | None = None,
    buffers: PixelBuffers = NO_BUFFERS,
    family: Family | None = None,
) -> PaddedBatch:
    """Pad samples on the right to [B, S], where S is the length of the longest one.

    `family` is needed if the model's media differ from Qwen-VL's.

    Raises:
        NotFinite: the pixels of a sample are not finite.
    """
    width = max(sample.num_tokens for sample in samples)
    starts = [row * width for row in range(len(samples))]

    def batch(arrays: Sequence[np.ndarray], fill: float) -> torch.Tensor:
        return _write(arrays, starts, len(samples) * width, fill).unflatten(-1, (len(samples), width))

    return PaddedBatch(
        **_columns(samples, batch, pad_token_id),
        attention_mask=batch([np.ones_like(s.input_ids) for s in samples], 0),
        labels=batch([s.labels for s in samples], IGNORE),
        loss_weights=None if (weights := _weights_of(samples)) is None else batch(weights, 0),
        media=_media(media_of(samples), pixel_dtype, buffers, family),
    )


def to_packed(
    samples: Sequence[Encoded],
    *,
    rule: SlotRule,
    pad_token_id: int,
    pixel_dtype: torch.dtype | None = None,
    buffers: PixelBuffers = NO_BUFFERS,
    family: Family | None = None,
    sharing: SharePrefixes | None = None,
) -> PackedRow:
    """Pack samples into a row [1, T]. Equal to `pack(to_padded(samples), rule=rule)`.

    With `sharing`, the result equals `share` of that row, but shared media are joined only once. A row with a prefix
    tree gets no padding.

    Raises:
        LayoutError: the samples do not fit the rule's fixed row width or number of segments, or cannot be shared.
        NotFinite: the pixels of a sample are not finite.
    """
    visuals: Visuals = media_of(samples)
    tree = None if sharing is None else prefix_tree(samples, sharing=sharing, family=family)
    packed = row_of(samples, rule if tree is None else SlotRule(), pad_token_id)
    if tree is not None:
        packed, table = with_tree(packed, tree), _table_of(packed, family)
        chosen = table.chosen(tree)
        visuals = {kind: [visuals[kind][at] for at in chosen[TYPES[kind]]] for kind in KINDS}
        images = _counted_in_tree(visuals["image"], table.in_tree(tree), _joins(family))
        visuals = {**visuals, "image": images}
    return replace(packed, media=_media(visuals, pixel_dtype, buffers, family))


def prefix_tree(samples: Sequence[Encoded], *, sharing: SharePrefixes, family: Family | None) -> PrefixTree | None:
    """Return the tree of the row that `to_packed` makes of these samples, without joining their pixels."""
    row, media = row_of(samples, SlotRule(), 0), media_of(samples)
    table = _table_of(row, family)
    numbers = {
        f"{kind}s": _numbers(media[kind], _joins(family), [medium.context for medium in table.of_kind(TYPES[kind])])
        for kind in KINDS
    }
    return find_prefix_tree(row, **numbers, min_shared=sharing.min_shared)


def check_alike(outcomes: list[Encoded | SampleError], family: Family | None) -> None:
    """Turn samples into errors whose teacher's entries or media cannot follow those of the samples before them."""
    joins, shapes = _joins(family), dict[str, Sequence[int]]()
    for at, sample in enumerate(outcomes):
        if isinstance(sample, SampleError):
            continue
        visuals = ((PIXELS[kind], visual) for kind, media in sample.media.items() for visual in media)
        tensors = (pair for name, visual in visuals for pair in ((name, visual.pixels), *visual.tensors.items()))
        own = [(name, joins[name].fixed_sizes(x.shape)) for name, x in tensors if x is not None and name in joins]
        own += [(name, entries.shape[1:]) for name, entries in sample.teacher.items()]
        known = dict(own) | shapes
        if odd := next((each for each in own if known[each[0]] != each[1]), None):
            seen = f"its {odd[0]} are of the sizes {[*odd[1]]}, and those of another sample {[*known[odd[0]]]}"
            fault = f"{seen}: make all samples of a data set alike"
            outcomes[at] = SampleError(fault, "bad_shape", index=at, sample_id=sample.sample_id)
        else:
            shapes = known


def join_media(samples: Sequence[Encoded], family: Family | None, pixel_dtype: torch.dtype | None = None) -> Media:
    """Join the media of some samples.

    Raises:
        NotFinite: the pixels of a sample are not finite.
    """
    return _media(media_of(samples), pixel_dtype, NO_BUFFERS, family)


def row_of(samples: Sequence[Encoded], rule: SlotRule, pad_token_id: int) -> PackedRow:
    """Pack samples into a row, without their media."""
    segments = Segments.from_lengths([sample.num_tokens for sample in samples], rule)
    starts = segments.stride[: len(samples)]

    def row(arrays: Sequence[np.ndarray], fill: float) -> torch.Tensor:
        return _write(arrays, starts, segments.total, fill).unsqueeze(-2)

    return PackedRow(
        **_columns(samples, row, pad_token_id),
        segments=segments,
        shift_labels=shift_labels(row([s.labels for s in samples], IGNORE), segments),
        shift_weights=None
        if (weights := _weights_of(samples)) is None
        else roll_left(row(weights, 0), segments, fill=0),
    )


def _table_of(row: PackedRow, family: Family | None) -> MediaTable:
    table = row.known_metadata.media or MediaTable()
    return table if family is None else family.with_contexts(table)


def _columns(samples: Sequence[Encoded], write: Callable[..., torch.Tensor], pad_token_id: int) -> dict[str, Any]:
    """Return the columns that a padded batch and a packed row have in common."""
    return {
        "input_ids": write([s.input_ids for s in samples], pad_token_id),
        "mm_token_type_ids": write([s.types for s in samples], 0),
        "extras": {
            **{name: write([s.columns[name] for s in samples], 0) for name in samples[0].columns},
            **{name: write(columns, 0) for name, columns in _teacher_of(samples).items()},
        },
        "metadata": _metadata(samples),
    }


Visuals = Mapping[Kind, Sequence[Visual]]
"""The media of a batch, or of a prefix tree, by kind and in order."""


def media_of(samples: Sequence[Encoded]) -> Visuals:
    """Return the media of some samples."""
    return {kind: [visual for sample in samples for visual in sample.media[kind]] for kind in KINDS}


def _joins(family: Family | None) -> Mapping[str, Join]:
    return {} if family is None else family.media


def _numbers(visuals: Sequence[Visual], joins: Mapping[str, Join], contexts: Sequence[Hashable]) -> list[int]:
    """Number the media so that equal numbers mean equal features. `contexts` gives a further value for each."""
    contents: list[Sequence[Hashable]] = [content_numbers(_pixels(visuals))]
    for name in dict.fromkeys(name for visual in visuals for name in visual.tensors):
        if not joins[name].counts_images:
            contents.append(content_numbers([visual.tensors.get(name, _NOTHING) for visual in visuals]))
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(content, len(numbers)) for content in zip(contexts, *contents, strict=True)]


_NOTHING = torch.zeros(0)


def _counted_in_tree(images: Sequence[Visual], table: MediaTable, joins: Mapping[str, Join]) -> Sequence[Visual]:
    """Update the image counts for a tree. Each count is attached to the first image of its group."""
    for name in (name for name, join in joins.items() if join.counts_images):
        counts = torch.tensor(image_counts(table.images, in_tree=True), dtype=torch.int64)
        firsts = dict(zip((counts.cumsum(0) - counts).tolist(), counts.split(1), strict=True))
        images = [
            replace(image, tensors={**image.tensors, name: firsts.get(at, counts[:0])})
            for at, image in enumerate(images)
        ]
    return images


def _weights_of(samples: Sequence[Encoded]) -> list[np.ndarray] | None:
    """Return the weights of each sample, float32 [n]; None: no sample has weights."""
    if all(sample.weights is None for sample in samples):
        return None
    return [np.ones(s.num_tokens, np.float32) if s.weights is None else s.weights for s in samples]


def _teacher_of(samples: Sequence[Encoded]) -> dict[str, list[np.ndarray]]:
    """Return each sample's entries of a teacher by name, [K, n]: `NO_ENTRY` if it has none; {}: no sample has any."""
    first = next((sample.teacher for sample in samples if sample.teacher), None)
    if first is None:
        return {}

    def of_sample(sample: Encoded, name: str) -> np.ndarray:
        shape, dtype = (first[name].shape[1], sample.num_tokens), first[name].dtype
        return sample.teacher[name].T if sample.teacher else np.full(shape, NO_ENTRY, dtype)

    return {name: [of_sample(sample, name) for sample in samples] for name in TEACHER}


def _write(arrays: Sequence[np.ndarray], starts: Sequence[int], total: int, fill: float) -> torch.Tensor:
    """Write the arrays [..., n] at their starts into a tensor [..., total] of their dtype, with `fill` elsewhere."""
    out = np.full((*arrays[0].shape[:-1], total), fill, arrays[0].dtype)
    for array, start in zip(arrays, starts, strict=True):
        out[..., start : start + array.shape[-1]] = array
    return torch.from_numpy(out)


def _metadata(samples: Sequence[Encoded]) -> HostMetadata:
    return HostMetadata(
        lengths=tuple(sample.num_tokens for sample in samples),
        media=media_table(samples),
        prefixes=tuple(sample.prefix for sample in samples) if samples[0].columns else (),
        num_targets=sum(sample.num_targets for sample in samples),
        sample_ids=tuple(sample.sample_id for sample in samples if sample.sample_id is not None),
        channels=tuple(s.channel for s in samples) if any(s.channel is not None for s in samples) else (),
    )


def media_table(samples: Sequence[Encoded]) -> MediaTable:
    """Return the table of the media of checked samples, each with its placeholders."""
    media = media_of(samples)
    if not any(media.values()):
        return MediaTable()
    seconds = iter(_seconds(media["video"]))
    expected = [
        _expected(visual, kind, sample, next(seconds, None) if kind == "video" else None)
        for kind in KINDS
        for sample in samples
        for visual in sample.media[kind]
    ]
    segments = Segments.from_lengths([sample.num_tokens for sample in samples])
    types = np.concatenate([sample.types for sample in samples])
    return place(expected, types, segments, counted=TYPES.values())


def _expected(visual: Visual, kind: Kind, sample: Encoded, seconds: float | None) -> Expected:
    """Return a medium's record with its number of placeholders: with a grid, its share by patches."""
    if visual.grid is None or visual.runs:
        tokens = sum(visual.runs)
    else:
        patches = sum(prod(each.patch_grid) for each in sample.media[kind])
        tokens = np.count_nonzero(sample.types == TYPES[kind]) * prod(visual.grid) // patches
    sizes = next((visual.tensors[name].tolist() for name in SIZES if name in visual.tensors), [])
    medium = Medium(
        kind=TYPES[kind],
        grid=visual.grid,
        frames=visual.pixels.shape[2] if kind == "audio" and visual.pixels is not None else 0,
        sizes=tuple(map(tuple, sizes)),
        seconds=seconds,
        bidirectional=visual.grid is None and kind != "audio" and not sample.columns,
    )
    return Expected(medium=medium, tokens=(tokens,))


def _media(row: Visuals, dtype: torch.dtype | None, buffers: PixelBuffers, family: Family | None) -> Media:
    """Join the tensors of media. Log-mel frames stay float32, because the model casts them itself."""
    joins, seconds, parts = _joins(family), _seconds(row["video"]), {}
    for kind in KINDS:
        for visual, pixels in zip(row[kind], _pixels(row[kind]), strict=True):
            for name, tensor in {PIXELS[kind]: pixels, **visual.tensors}.items():
                parts.setdefault(name, []).append(tensor.detach())
    tensors = {}
    for name, each in parts.items():
        memory = buffers if name.startswith("pixel_values") else NO_BUFFERS
        tensors[name] = _join(each, joins.get(name, Join()), None if name == PIXELS["audio"] else dtype, memory)
    if seconds and _SECONDS in joins:
        tensors[_SECONDS] = torch.tensor(seconds)
    return Media(
        pixel_values=tensors.pop("pixel_values", None),
        image_grid_thw=_grids(row["image"]),
        pixel_values_videos=tensors.pop("pixel_values_videos", None),
        video_grid_thw=_grids(row["video"]),
        second_per_grid_ts=torch.tensor(seconds) if seconds and _SECONDS not in joins else None,
        tensors=tensors,
    )


def _join(parts: Sequence[torch.Tensor], join: Join, dtype: torch.dtype | None, memory: PixelBuffers) -> torch.Tensor:
    """Join the tensors of several media. Floats get `dtype`, or the widest dtype among them.

    Raises:
        NotFinite: a tensor holds NaN or infinity.
    """
    if not parts[0].is_floating_point():
        return join(parts)
    dtype = dtype or reduce(torch.promote_types, (part.dtype for part in parts))
    if join.axis == 0 and len({part.shape[1:] for part in parts}) == 1:
        return memory.join(parts, dtype)
    if not all(map(is_finite, parts)):
        raise NotFinite
    return join([part.to(dtype) for part in parts])


def _seconds(videos: Sequence[Visual]) -> tuple[float, ...]:
    """Return one entry per video if any video has seconds, or () if none has."""
    seconds = [video.seconds for video in videos]
    if all(second is None for second in seconds):
        return ()
    return tuple(DEFAULT_SECONDS if second is None else second for second in seconds)


def _grids(visuals: Sequence[Visual]) -> torch.Tensor | None:
    grids = [visual.grid for visual in visuals if visual.grid is not None]
    return torch.tensor(grids, dtype=torch.int64) if grids else None


def _pixels(visuals: Sequence[Visual]) -> list[torch.Tensor]:
    """Return the pixels of each medium, [P, C]. Media that were processed once are the same tensor."""
    parts = [visual.pixels for visual in visuals if visual.pixels is not None]
    assert len(parts) == len(visuals), "a measured sample has no pixels: decode it first"
    return parts
