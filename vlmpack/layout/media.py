"""The media of a row: one host record for each image, video and audio, made together with the batch.

    sample 0     x [ i i i i ] x             sample 1     x [ i i ] 0 [ i i ] x
    Medium       IMAGE, runs ((2, 6),)       Medium       VIDEO, runs ((2, 4), (7, 9))

Positions, token types, towers, prefix trees, audio windows and context parallelism read the same records. They
are read from a batch's tensors and token ids (`families.media_of_row`), or made by a collator while it encodes samples.

T row tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import final

import numpy as np
import torch

from vlmpack.errors import LayoutError
from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.segments import Segments, ranges

Grid = tuple[int, int, int]
"""(frames, rows, columns) of patches of one image or video."""

Runs = tuple[tuple[int, int], ...]
"""(start, stop) of each run of tokens, in increasing order."""

TEXT, IMAGE, VIDEO, AUDIO = 0, 1, 2, 3
"""Kinds of tokens: the values of `mm_token_type_ids`."""

KINDS = {IMAGE: "image", VIDEO: "video", AUDIO: "audio"}
"""The name of each kind of medium."""

_TENSORS = {
    IMAGE: ("pixel_values", "image_grid_thw"),
    VIDEO: ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts", "video_second_per_grid"),
    AUDIO: ("input_features", "feature_attention_mask"),
}
"""Tensors of images and videos with grids, and of audio."""


@final
@dataclass(frozen=True, kw_only=True)
class Medium:
    """One image, video or audio; for a tiled family without host metadata, one tile of an image."""

    kind: int
    """IMAGE, VIDEO or AUDIO."""
    sample: int = 0
    """Index of its sample."""
    runs: Runs = ()
    """(start, stop) of each run of its placeholders, counted from its sample's first token."""
    grid: Grid | None = None
    """Frames, rows and columns of patches; None: audio, or the family's images have no grids."""
    seconds: float | None = None
    """Seconds from one frame of a video's grid to the next (Qwen2.5-VL, Qwen-Omni); None: not known."""
    frames: int = 0
    """Log-mel frames of an audio."""
    sizes: tuple[tuple[int, ...], ...] = ()
    """Its rows of `image_sizes`, `target_sizes` or `target_sizes_videos`, which tell a tower where each image ends."""
    bidirectional: bool = False
    """True if models may let its tokens attend to each other in both directions."""
    entries: Mapping[str, int] = field(default_factory=dict, compare=False)
    """For an image or video without a grid: number of its entries in each media tensor; {}: not counted."""
    context: Hashable = field(default=None, compare=False)
    """A further value that its features depend on: whether it is the only image of its sample (LLaVA-OneVision), or the
    length of its sample's longest audio in frames (Qwen3-Omni)."""

    @property
    def tokens(self) -> int:
        """Number of its placeholders."""
        return sum(stop - start for start, stop in self.runs)

    @property
    def patches(self) -> int:
        """Number of patches of its grid; 0 without a grid."""
        return 0 if self.grid is None else prod(self.grid)

    def entries_in(self, tensor: str) -> int:
        """Return the number of its entries in the media tensor of this name."""
        if self.grid is None and self.kind != AUDIO:
            return self.entries.get(tensor, 0)
        if tensor not in _TENSORS[self.kind]:
            return 0
        return self.patches if tensor.startswith("pixel_values") else 1

    @property
    def span(self) -> tuple[int, int]:
        """(start, stop) in its sample, from its first placeholder to its last."""
        return self.runs[0][0], self.runs[-1][1]


@final
@dataclass(frozen=True, kw_only=True)
class MediaTable:
    """The media of a row or batch: images, then videos, then audios, each kind in the order of its placeholders."""

    media: tuple[Medium, ...] = ()
    """The records."""
    axes: Mapping[str, int] = field(default_factory=dict, compare=False)
    """The axis along which media are concatenated, for the media tensors where it is not the first axis."""
    image_counts: str | None = field(default=None, compare=False)
    """Name of the tensor that counts the images of each sample with images (LLaVA-OneVision); None: there is none."""

    def of_kind(self, kind: int) -> tuple[Medium, ...]:
        """The media of one kind."""
        return tuple(medium for medium in self.media if medium.kind == kind)

    @property
    def images(self) -> tuple[Medium, ...]:
        """All images."""
        return self.of_kind(IMAGE)

    @property
    def videos(self) -> tuple[Medium, ...]:
        """All videos."""
        return self.of_kind(VIDEO)

    @property
    def audios(self) -> tuple[Medium, ...]:
        """All audios."""
        return self.of_kind(AUDIO)

    @property
    def patches(self) -> int:
        """Number of patches of all grids."""
        return sum(medium.patches for medium in self.media)

    def grids(self, kind: int) -> tuple[Grid, ...]:
        """The grids of one kind of media."""
        return tuple(medium.grid for medium in self.media if medium.kind == kind and medium.grid is not None)

    def types(self, segments: Segments) -> np.ndarray:
        """Return the kind of each token of a row with these samples: int64 [T], 0 for text and padding."""
        types_T = np.zeros(segments.total, np.int64)
        for medium in self.media:
            first = segments.stride[medium.sample]
            for start, stop in medium.runs:
                types_T[first + start : first + stop] = medium.kind
        return types_T

    def spans(self, segments: Segments, kind: int) -> np.ndarray:
        """Return (start, stop) in a row of each medium of one kind, including text inside it: int64 [N, 2]."""
        spans = [np.add(medium.span, segments.stride[medium.sample]) for medium in self.of_kind(kind)]
        return np.asarray(spans, np.int64).reshape(-1, 2)

    def starts(self, segments: Segments) -> list[np.ndarray]:
        """Return the position in a row of the first placeholder of each image, of each video and of each audio."""
        return [self.spans(segments, kind)[:, 0] for kind in KINDS]

    def in_tree(self, tree: PrefixTree) -> MediaTable:
        """Return only the media that a prefix tree computes, each kind in the order of the tree.

        Raises:
            LayoutError: the tree computes a medium that the table does not have.
        """
        chosen: list[Medium] = []
        for kind, name in KINDS.items():
            numbers, media = tree.of_kind(kind), self.of_kind(kind)
            if max(numbers, default=-1) >= len(media):
                raise LayoutError(
                    f"the tree computes {name} {max(numbers)}, but the metadata has {len(media)} {name}s; a row that "
                    "is shared needs its metadata ('vlmpack'): leave it in the batch"
                )
            chosen += [media[number] for number in numbers]
        return replace(self, media=tuple(chosen))


def placeholders(media: Sequence[Medium], segments: Segments) -> np.ndarray:
    """Return the positions in a row of the placeholders of these media, medium by medium: int64 [M]."""
    runs = [(segments.stride[medium.sample] + start, stop - start) for medium in media for start, stop in medium.runs]
    starts, lengths = np.asarray(runs, np.int64).reshape(-1, 2).T
    return ranges(starts, lengths)


# ---------------------------------------------------------------------- find the placeholders of media


@final
@dataclass(frozen=True, kw_only=True)
class Expected:
    """A medium whose placeholders are not found yet."""

    medium: Medium
    """The record, without sample and runs."""
    tokens: tuple[int, ...]
    """Number of placeholders of each of its runs."""


@final
class _Found:
    """The runs of placeholders of one kind in a row; no run crosses a sample boundary."""

    def __init__(self, kind: int, types_T: np.ndarray, segments: Segments) -> None:
        self.name, self.segments = KINDS[kind], segments
        begins_T = np.ones(len(types_T), bool)
        np.not_equal(types_T[1:], types_T[:-1], out=begins_T[1:])
        begins_T[[edge for span in segments.spans for edge in span if edge < segments.total]] = True
        edges = np.append(np.flatnonzero(begins_T), len(types_T))
        of_kind = types_T[edges[:-1]] == kind
        self.starts, self.stops = edges[:-1][of_kind], edges[1:][of_kind]
        self.lengths = self.stops - self.starts
        ends = np.asarray([stop for _, stop in segments.spans], np.int64)
        # search the ends of slots, so that an empty sample gets no run
        samples = np.searchsorted(np.asarray(segments.stride[1:], np.int64), self.starts, side="right")
        is_inside = (self.starts < np.append(ends, 0)[samples]) & (samples < segments.num_samples)
        self.samples = np.where(is_inside, samples, _PADDING)


_PADDING = -1
"""Sample index of a token that belongs to no sample."""
_REMEDY = (
    "images and videos come in the order of their samples, each in a run of placeholders of its own (so do frames "
    "from Qwen3-VL on), between vision_start and vision_end; give pixels and grids in that order"
)
_EVERY = "every image, video and audio needs its placeholders and its values, in the order of samples"


def place(
    expected: Sequence[Expected], types_T: np.ndarray, segments: Segments, *, counted: Collection[int] = ()
) -> MediaTable:
    """Find the placeholders of each medium; media of one kind are in the order of the row.

    Args:
        expected: the media, each kind in the order of samples.
        types_T: int64 [T], 0 text, 1 image, 2 video, 3 audio.
        segments: the row's samples.
        counted: kinds of media whose placeholders are assigned by their number alone (tiles). There may be text between
            the placeholders of one medium, and none between two media.

    Raises:
        LayoutError: media and placeholders do not match, or the placeholders of one medium are in two samples. Names
            the sample, what was found and what was expected.
    """
    media: list[Medium] = []
    for kind in KINDS:
        of_kind = [each for each in expected if each.medium.kind == kind]
        if of_kind or (types_T == kind).any():
            media += _placed(of_kind, _Found(kind, types_T, segments), by_number=kind in counted)
    return MediaTable(media=tuple(media))


def _placed(expected: Sequence[Expected], found: _Found, *, by_number: bool) -> list[Medium]:
    """Set samples and runs of media of one kind."""
    if _PADDING in found.samples:
        is_padding = found.samples == _PADDING
        raise LayoutError(
            f"padding of the row has {found.lengths[is_padding].sum()} {found.name} placeholders, the first at place "
            f"{found.starts[is_padding][0]}; {_EVERY}"
        )
    tokens = np.asarray([sum(each.tokens) for each in expected], np.int64)
    if by_number:
        _check_samples(found, tokens)
    else:
        sizes = np.asarray([size for each in expected for size in each.tokens], np.int64)
        _check_runs(found, sizes, np.repeat(np.arange(len(expected)), [len(each.tokens) for each in expected]))
    # count placeholders from the first one in the row: a piece ends where a run does, or a medium inside a run
    run_ends, ends = found.lengths.cumsum(), tokens.cumsum()
    piece_ends = np.union1d(run_ends, ends) if by_number else run_ends
    run = run_ends.searchsorted(piece_ends)
    samples = found.samples[run]
    stops = found.stops[run] - (run_ends[run] - piece_ends) - np.asarray(found.segments.stride, np.int64)[samples]
    pieces = list(zip((stops - np.diff(piece_ends, prepend=0)).tolist(), stops.tolist(), strict=True))
    bounds = pairwise([0, *(1 + piece_ends.searchsorted(ends)).tolist()])
    return [
        replace(each.medium, sample=int(samples[first]), runs=tuple(pieces[first:last]))
        for each, (first, last) in zip(expected, bounds, strict=True)
    ]


def _unequal(found: _Found, media: int, tokens: int, seen: str) -> LayoutError:
    return LayoutError(
        f"{seen}the row has {found.lengths.sum()} {found.name} placeholders, but its {media} {found.name}s make "
        f"{tokens} tokens; {_EVERY} (was the batch split on its way? accelerate: set dispatch_batches=False)"
    )


def _check_samples(found: _Found, tokens: np.ndarray) -> None:
    """Compare the placeholders of each sample with the tokens [N] of media: a sample must end where a medium ends."""
    name, total = found.name, int(found.lengths.sum())
    if len(empty := np.flatnonzero(tokens < 1)):
        raise LayoutError(f"{name} {empty[0]} of the row makes no token; leave it out of its sample")
    counted = np.bincount(found.samples, found.lengths, len(found.segments.lengths)).astype(int)
    differs, seen = ~np.isin(counted.cumsum(), np.append(tokens.cumsum(), 0)), ""
    if differs.any():
        at = int(differs.argmax())
        seen = f"sample {at} ends in the middle of an {name}: "
        if total != tokens.sum():
            seen = f"sample {at} has {counted[at]} {name} placeholders and ends where no {name} does: "
    if seen or total != tokens.sum():
        raise _unequal(found, len(tokens), tokens.sum(), seen)


def _check_runs(found: _Found, sizes: np.ndarray, medium: np.ndarray) -> None:
    """Compare runs of placeholders with the expected sizes [N]; `medium` [N] is the medium of each expected run."""
    name, starts, lengths, samples = found.name, found.starts, found.lengths, found.samples
    shared = min(len(lengths), len(sizes))
    first = int(np.append(lengths[:shared] != sizes[:shared], True).argmax())  # first mismatch
    if lengths.sum() != sizes.sum():
        seen = ""
        if first < len(lengths):
            makes = f"its next {name} makes {sizes[first]}" if first < len(sizes) else f"no {name} is left"
            seen = f"sample {samples[first]} has a run of {lengths[first]}, but {makes}: "
        raise _unequal(found, len({*medium.tolist()}), sizes.sum(), seen)
    if first < shared:
        stop, follows = found.stops[first], samples[first + 1 : first + 2]
        cut_short = lengths[first] < sizes[first] and stop in starts
        if cut_short and follows[0] != samples[first]:
            raise LayoutError(_split(found, int(medium[first]), int(follows[0])))
        part = "a frame of " if (medium == medium[first]).sum() > 1 else ""
        raise LayoutError(
            f"sample {samples[first]}: a run of {lengths[first]} {name} placeholders begins at place {starts[first]} "
            f"of the row, but {part}{name} {medium[first]}, which is next, makes {sizes[first]} tokens; {_REMEDY}"
        )
    if len(split := np.flatnonzero((medium[1:] == medium[:-1]) & (samples[1:] != samples[:-1]))):
        raise LayoutError(_split(found, int(medium[split[0]]), int(samples[split[0] + 1])))


def _split(found: _Found, medium: int, sample: int) -> str:
    name, start = found.name, found.segments.stride[sample]
    return (
        f"{name} {medium} of the row is cut in two where sample {sample} starts, at place {start} of the row: move "
        f"that boundary of cu_seqlens_q before the {name}, or behind it"
    )


def image_counts(images: Sequence[Medium], *, in_tree: bool = False) -> list[int]:
    """Return the number of images of each sample with images.

    A model uses these counts only to tell whether an image is the only one of its sample (`Medium.context`). In a
    prefix tree, neighboring images that are not the only one of their sample are counted as images of one sample.
    """
    counts: list[int] = []
    before: Hashable = None
    for image in images:
        group = (None if in_tree else image.sample, image.context)
        counts[-1:] = [*counts[-1:], 1] if image.context or group != before else [counts[-1] + 1]
        before = group
    return counts


# ---------------------------------------------------------------------- content

LOOKED_AT = 2**13
"""Approximate number of evenly spaced values that must agree before two media are compared in full."""


def content_numbers(blocks: Sequence[torch.Tensor]) -> list[int]:
    """Number media by their content: equal numbers if and only if shape, dtype and the bits of all values are equal.

    Evenly spaced values are hashed first; media that agree in these are compared in full.

    Args:
        blocks: the values of each medium, any shape, on the host.
    """
    numbers: list[int] = []
    by_object: dict[int, int] = {}
    alike: dict[Hashable, list[int]] = {}  # distinct media that agree in the values looked at
    for at, block in enumerate(blocks):
        if id(block) not in by_object:
            values = _bits(block)
            step = len(values) // LOOKED_AT | 1  # odd, because the sides of patches are even
            candidates = alike.setdefault((block.shape, block.dtype, values[::step].numpy().tobytes()), [])
            equal = next((other for other in candidates if torch.equal(values, _bits(blocks[other]))), at)
            if equal == at:
                candidates.append(at)
            by_object[id(block)] = equal
        numbers.append(by_object[id(block)])
    return numbers


_OF_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(block: torch.Tensor) -> torch.Tensor:
    """Reinterpret every value as an integer with the same bits: NaN equals itself, and numpy supports every dtype."""
    return block.detach().contiguous().view(_OF_WIDTH[block.element_size()]).view(-1)
