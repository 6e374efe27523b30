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
from itertools import groupby
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

    def sizes(self, kind: int) -> tuple[tuple[int, ...], ...]:
        """The rows of sizes of one kind of media."""
        return tuple(row for medium in self.media if medium.kind == kind for row in medium.sizes)

    def types(self, segments: Segments) -> np.ndarray:
        """Return the kind of each token of a row with these samples: int64 [T], 0 for text and padding."""
        types_T = np.zeros(segments.total, np.int64)
        for medium in self.media:
            first = segments.stride[medium.sample]
            for start, stop in medium.runs:
                types_T[first + start : first + stop] = medium.kind
        return types_T

    def runs(self, segments: Segments) -> Runs:
        """Return (start, stop) in a row of the runs of placeholders of all media. No run crosses a sample boundary."""
        return runs_of_equal(np.where(self.types(segments) > 0, segments.seq_idx().numpy(), -1))

    def spans(self, segments: Segments, kind: int) -> np.ndarray:
        """Return (start, stop) in a row of each medium of one kind, including text inside it: int64 [N, 2]."""
        spans = [np.add(medium.span, segments.stride[medium.sample]) for medium in self.of_kind(kind)]
        return np.asarray(spans, np.int64).reshape(-1, 2)

    def starts(self, segments: Segments) -> list[np.ndarray]:
        """Return the position in a row of the first placeholder of each image, of each video and of each audio."""
        return [self.spans(segments, kind)[:, 0] for kind in KINDS]

    def chosen(self, tree: PrefixTree) -> dict[int, np.ndarray]:
        """Return the indices of the media that a prefix tree computes, by kind, in the order of the tree."""
        return {kind: tree.taken(starts) for kind, starts in zip(KINDS, self.starts(tree.segments), strict=True)}

    def in_tree(self, tree: PrefixTree) -> MediaTable:
        """Return only the media that a prefix tree computes, each kind in the order of the tree."""
        chosen = [self.of_kind(kind)[number] for kind, numbers in self.chosen(tree).items() for number in numbers]
        return replace(self, media=tuple(chosen))

    def computed_as(self, tree: PrefixTree) -> dict[int, np.ndarray]:
        """Return for each medium, by kind, the index among those of `in_tree` of the one that is computed for it."""
        place, starts = tree.place().numpy(), dict(zip(KINDS, self.starts(tree.segments), strict=True))
        places = {kind: place[of_kind] for kind, of_kind in starts.items()}  # equal to that of a computed medium
        return {kind: np.searchsorted(at[tree.taken(starts[kind])], at) for kind, at in places.items()}


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


_REMEDY = (
    "every image, video and audio needs its values and its own run of placeholders (so does every frame from Qwen3-VL "
    "on), in one sample and in the order of samples (was the batch split on its way? accelerate: set "
    "dispatch_batches=False)"
)


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
            media += _placed(kind, of_kind, types_T, segments, by_number=kind in counted)
    return MediaTable(media=tuple(media))


def _placed(
    kind: int, expected: Sequence[Expected], types_T: np.ndarray, segments: Segments, *, by_number: bool
) -> list[Medium]:
    """Set samples and runs of media of one kind, which take the runs of placeholders one after the other."""
    name, waiting, media = KINDS[kind], _runs_of_kind(kind, types_T, segments)[::-1], list[Medium]()

    def refused(seen: str) -> LayoutError:
        tokens = sum(sum(each.tokens) for each in expected)
        return LayoutError(
            f"{seen}; the row has {np.count_nonzero(types_T == kind)} {name} placeholders, and its {len(expected)} "
            f"{name}s make {tokens} tokens: {_REMEDY}"
        )

    def cut_short(number: int, sample: int) -> LayoutError:
        end = segments.spans[sample][1]
        return refused(f"sample {sample} ends at place {end} of the row, in the middle of {name} {number}")

    for number, each in enumerate(expected):
        own: list[tuple[int, int]] = []
        of_sample = None
        for tokens in each.tokens:
            if tokens < 1:
                raise refused(f"{name} {number} of the row makes no token; leave it out of its sample")
            while tokens:
                if not waiting:
                    raise refused(f"{tokens} placeholders of {name} {number} of the row are missing")
                sample, start, stop = waiting.pop()
                if of_sample not in (None, sample):
                    raise cut_short(number, of_sample)
                of_sample, taken = sample, min(tokens, stop - start)
                if not by_number and stop - start != tokens:
                    if stop - start < tokens and stop == segments.lengths[sample]:
                        raise cut_short(number, sample)
                    raise refused(
                        f"sample {sample}: a run of {stop - start} {name} placeholders begins at place "
                        f"{segments.stride[sample] + start} of the row, but {name} {number}, which is next, makes "
                        f"{'runs' if len(each.tokens) > 1 else 'a run'} of {tokens}"
                    )
                own.append((start, start + taken))
                tokens -= taken
                if start + taken < stop:
                    waiting.append((sample, start + taken, stop))
        assert of_sample is not None, "a medium has at least one run"
        media.append(replace(each.medium, sample=of_sample, runs=tuple(own)))
    if waiting:
        sample, start, stop = waiting[-1]
        raise refused(f"sample {sample} has a run of {stop - start} {name} placeholders, but no {name} is left")
    return media


def _runs_of_kind(kind: int, types_T: np.ndarray, segments: Segments) -> list[tuple[int, int, int]]:
    """(sample, start, stop) of each run of placeholders, counted from its sample's start; none crosses a boundary."""
    is_kind_T = types_T == kind
    if segments.has_padding and (stray_T := is_kind_T & segments.padding_mask().numpy()).any():
        raise LayoutError(
            f"padding of the row has {stray_T.sum()} {KINDS[kind]} placeholders, the first at place "
            f"{stray_T.argmax()}; {_REMEDY}"
        )
    sample_T = segments.seq_idx().numpy()
    starts, stops = _edges_of_runs(np.where(is_kind_T, sample_T, -1))
    samples = sample_T[starts]
    first = np.asarray(segments.stride)[samples]
    return list(zip(samples.tolist(), (starts - first).tolist(), (stops - first).tolist(), strict=True))


def runs_of_equal(number_T: np.ndarray) -> Runs:
    """Find the runs of equal numbers that are not -1."""
    starts, stops = _edges_of_runs(number_T)
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))


def _edges_of_runs(number_T: np.ndarray) -> np.ndarray:
    """Return the starts and the stops of these runs: int64 [2, N]."""
    edges = np.flatnonzero(np.diff(number_T, prepend=-1, append=-1))
    is_run = number_T[edges[:-1]] >= 0
    return np.stack([edges[:-1][is_run], edges[1:][is_run]])


def image_counts(images: Sequence[Medium], *, in_tree: bool = False) -> list[int]:
    """Return the number of images of each sample with images.

    A model uses these counts only to tell whether an image is the only one of its sample (`Medium.context`). In a
    prefix tree, neighboring images that are not the only one of their sample are counted as images of one sample.
    """
    counts: list[int] = []
    for (_, is_single), group in groupby(images, lambda image: (None if in_tree else image.sample, image.context)):
        number = len([*group])
        counts += [1] * number if is_single else [number]
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
