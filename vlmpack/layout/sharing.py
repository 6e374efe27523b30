"""Find what the samples of a row begin with alike, and keep the media of it once: `share`, and `unshare`, its inverse.

Every token is a symbol: its id; for a placeholder, a number of the CONTENT of its image or video, with its grid. Ids
alone would merge different images of one grid. The samples' symbols make a compressed trie, the `PrefixTree`:

    samples      a b I I c      a b I I d e      a b J J c          I, J: two images of one grid
    trie         a b ─┬─ I I ─┬─ c
                      │       └─ d e
                      └─ J J c
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import final

import numpy as np
import torch

from vlmpack.errors import LayoutError, check_kind, check_whole_number
from vlmpack.layout.batch import IMAGE, VIDEO, Grid, HostMetadata, Media
from vlmpack.layout.device import on_host, outside_graph
from vlmpack.layout.prefix_tree import PrefixTree, check_without_padding
from vlmpack.layout.row import IGNORE, PackedRow, metadata_of_tree
from vlmpack.layout.segments import Segments
from vlmpack.layout.trie import compressed_trie

MIN_SHARED = 64
"""Tokens below which a shared beginning is not worth a node: chat templates share about ten of every sample."""

LOOKED_AT = 2**13
"""Values of a medium, spread over it, that have to agree with another's before both are compared whole."""
PIECE = 2**15
"""Values that are compared at a time, in the cache of a core."""


@outside_graph
def share(
    row: PackedRow,
    *,
    min_shared: int = MIN_SHARED,
    groups: Sequence[Hashable] | torch.Tensor | None = None,
    tree: PrefixTree | None = None,
) -> PackedRow:
    """Find the prefix tree of a row on the host, and keep every image and video of it once.

    Tokens, labels, extras and metadata stay those of every sample. Media are compared by their content.

    Args:
        row: without padding, on the host; one that has a tree gets a new one.
        min_shared: tokens of a shared beginning, from the last branching on, that make it worth a node; a shorter one
            is repeated in each of its branches, unless it stands behind another one and its samples together would
            repeat so many tokens. Equal samples are always shared.
        groups: a group of each sample; samples of different groups share nothing. None: all are compared.
        tree: the tree, where it is known; it is compared with the samples. None: it is found.

    Returns:
        The row with `tree`; the row itself if its samples share nothing.

    Raises:
        LayoutError: padding, labels that are not the tokens' own ids, a row on a device, media that do not fit their
            placeholders, or a tree that is not this row's. Names the sample and the remedy.
    """
    check_kind("row", row, PackedRow, "collator.collate(samples)")
    row = unshare(row)
    metadata, media = row.host_metadata(), row.media
    _check_media(media, metadata)
    images = content_numbers(_blocks(media.pixel_values, metadata.image_grids))
    videos = content_numbers(_blocks(media.pixel_values_videos, metadata.video_grids))
    whole = replace(row, metadata=metadata)
    if tree is None:
        tree = find_prefix_tree(whole, images=images, videos=videos, min_shared=min_shared, groups=groups)
    else:
        tree = _Symbols.of(whole, images, videos).compared(tree)
    if tree is None:
        return row
    return with_tree(replace(whole, media=_kept(media, metadata, tree.images, tree.videos)), tree)


def check_unshared(row: PackedRow, user: str) -> None:
    """Refuse a row with a tree where every sample has to be computed by itself.

    Raises:
        LayoutError: it has one; names `user`, which takes none.
    """
    if row.tree is not None:
        raise LayoutError(
            f"samples of this row share prefixes, and {user} computes every sample by itself: give it unshare(row), "
            "with the images of every sample, or collate without share_prefixes"
        )


def with_tree(row: PackedRow, tree: PrefixTree) -> PackedRow:
    """Return a row, whose media are the tree's already, with its tree, and its distinct targets counted."""
    metadata = replace(row.known_metadata, num_distinct_targets=_num_distinct_targets(row, tree))
    return replace(row, tree=tree, metadata=metadata)


@outside_graph
def unshare(row: PackedRow) -> PackedRow:
    """Return the row without its tree, with the media of every sample: the inverse of `share`.

    Raises:
        LayoutError: the row is on a device.
    """
    tree = row.tree
    if tree is None:
        return row
    _check_on_host(row)
    metadata = row.known_metadata
    starts = {kind: _media_starts(row, _grids(metadata, kind), kind) for kind in (IMAGE, VIDEO)}
    place = tree.place().numpy()
    # each medium of the row stands where one of the tree does
    images = np.searchsorted(place[starts[IMAGE][list(tree.images)]], place[starts[IMAGE]])
    videos = np.searchsorted(place[starts[VIDEO][list(tree.videos)]], place[starts[VIDEO]])
    media = _kept(row.media, metadata_of_tree(metadata, tree), images.tolist(), videos.tolist())
    return replace(row, tree=None, media=media, metadata=replace(metadata, num_distinct_targets=None))


@outside_graph
def find_prefix_tree(
    row: PackedRow,
    *,
    images: Sequence[int] = (),
    videos: Sequence[int] = (),
    min_shared: int = MIN_SHARED,
    groups: Sequence[Hashable] | torch.Tensor | None = None,
) -> PrefixTree | None:
    """Find the tree of a row whose media are known by numbers; its pixels are not read.

    Args:
        row: without padding, on the host, its metadata with the grids of all media.
        images: one number for each image, in row order; equal ones are equal images (`content_numbers`).
        videos: of each video, likewise.
        min_shared: as of `share`.
        groups: as of `share`.

    Returns:
        The tree; None: samples share nothing.

    Raises:
        LayoutError: as `share`.
    """
    check_whole_number("min_shared", min_shared)
    check_without_padding(row.segments)
    groups = _plain(groups, row.segments.num_samples)
    if row.segments.num_samples == 1:
        return None
    symbols = _Symbols.of(row, images, videos)
    trie = compressed_trie(symbols.of_samples, groups, min_shared)
    if sum(trie.lengths) == row.segments.total:
        return None
    tree = PrefixTree(segments=row.segments, parents=(*trie.parents,), lengths=(*trie.lengths,), leaves=(*trie.leaves,))
    return symbols.with_media(tree)


def content_numbers(blocks: Sequence[torch.Tensor]) -> list[int]:
    """Number media by their content: equal numbers if and only if shape, type and every value are the same bits.

    Some values of each find those that may be equal; these are then compared whole.

    Args:
        blocks: [P, C] of each, on the host.
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


def _plain(groups: Sequence[Hashable] | torch.Tensor | None, count: int) -> list[Hashable]:
    """Groups that are equal where they say the same: two tensors of one number are not."""
    if groups is None:
        return [0] * count
    if len(groups) != count:
        raise LayoutError(f"share: {len(groups)} groups for the {count} samples of the row")
    return [group.item() if isinstance(group, torch.Tensor) else group for group in groups]


# ---------------------------------------------------------------------- symbols


@final
@dataclass(frozen=True, kw_only=True)
class _Symbols:
    """The row as numbers that are equal where tokens, and the media that they stand for, are."""

    values: np.ndarray
    """int64 [T]."""
    segments: Segments
    """Of the row."""
    image_starts: np.ndarray
    """int64: where in the row the first placeholder of each image is."""
    video_starts: np.ndarray
    """The same of videos."""

    @classmethod
    def of(cls, row: PackedRow, images: Sequence[int], videos: Sequence[int]) -> _Symbols:
        """Check that the row can be shared, and number its tokens.

        Raises:
            LayoutError: see `share`.
        """
        _check_on_host(row)
        _check_targets(row)
        values, starts = row.input_ids[0].numpy().copy(), {}
        for kind, numbers in ((IMAGE, images), (VIDEO, videos)):
            metadata = row.known_metadata
            seconds = metadata.seconds_per_grid if kind == VIDEO else ()
            grids = _grids(metadata, kind)
            starts[kind] = _media_starts(row, grids, kind)
            assert len(numbers) == len(grids), "one number for each medium"
            contents = zip(numbers, grids, seconds or [None] * len(grids), strict=True)
            _write_media(values, row, list(contents), starts[kind], kind)
        return cls(values=values, segments=row.segments, image_starts=starts[IMAGE], video_starts=starts[VIDEO])

    @property
    def of_samples(self) -> list[np.ndarray]:
        """int64 of each sample."""
        return [self.values[start:stop] for start, stop in self.segments.spans]

    def compared(self, tree: PrefixTree) -> PrefixTree:
        """A caller's tree, with the media that are computed.

        Raises:
            LayoutError: it is of another row; samples differ where it says that they are alike; or a node ends
                inside an image or a video.
        """
        if tree.segments != self.segments:
            raise LayoutError(
                f"the tree is of samples of {list(tree.segments.lengths)[:9]} tokens, the row of "
                f"{list(self.segments.lengths)[:9]}"
            )
        first = tree.source().numpy()[tree.place().numpy()]  # where in the row each token is taken from
        self._require(self.values == self.values[first], "is another one there, or stands for other media")
        for starts, parity in ((self.image_starts, 1), (self.video_starts, 0)):
            before = np.append(0, starts)
            medium = np.searchsorted(starts, np.arange(self.segments.total), side="right")
            whole = medium[first] == medium[first[before[medium]]]  # as the medium's first placeholder is
            self._require(whole | (self.values >= 0) | (self.values % 2 != parity), "is inside an image or video there")
        return self.with_media(tree)

    def _require(self, agree: np.ndarray, fault: str) -> None:
        if not agree.all():
            place = int(agree.argmin())
            sample = int(self.segments.seq_idx()[place])
            raise LayoutError(
                f"sample {sample}: the tree takes its token {place - self.segments.stride[sample]} from a sample "
                f"before it, but it {fault}; leave the tree out, and it is found"
            )

    def with_media(self, tree: PrefixTree) -> PrefixTree:
        """The tree with the media that are computed: those whose placeholders it takes from the row."""
        return replace(tree, images=_computed(tree, self.image_starts), videos=_computed(tree, self.video_starts))


def _computed(tree: PrefixTree, starts: np.ndarray) -> tuple[int, ...]:
    """The media that the tree takes from the row, in its own order."""
    place, source = tree.place().numpy(), tree.source().numpy()
    computed = np.flatnonzero(source[place[starts]] == starts)
    return tuple(computed[np.argsort(place[starts[computed]])].tolist())


def _write_media(
    values: np.ndarray, row: PackedRow, contents: Sequence[Hashable], starts: np.ndarray, kind: int
) -> None:
    """Replace the placeholders of each medium by a negative number of its content.

    Of a video whose frames are written apart, what stands between them is part of its content: no branch begins there.
    """
    if not len(starts):
        return
    placeholders = _placeholders(row, kind)
    bounds = np.append(np.searchsorted(placeholders, starts), len(placeholders))
    numbers: dict[Hashable, int] = {}
    for at, content in enumerate(contents):
        hits = placeholders[bounds[at] : bounds[at + 1]]
        written = row.input_ids[0, starts[at] : hits[-1] + 1].numpy().tobytes()
        number = numbers.setdefault((content, written), len(numbers))
        values[hits] = -1 - (2 * number + (kind == VIDEO))


def _media_starts(row: PackedRow, grids: Sequence[Grid], kind: int) -> np.ndarray:
    """int64 [N]: where in the row the first placeholder of each image or video is.

    Raises:
        LayoutError: there are not as many placeholders as the grids need, or those of one lie in two samples.
    """
    placeholders = _placeholders(row, kind)
    name = "image" if kind == IMAGE else "video"
    patches = np.asarray([prod(grid) for grid in grids], np.int64)
    per_token, rest = divmod(int(patches.sum()), max(len(placeholders), 1))
    if bool(len(patches)) != bool(len(placeholders)) or rest or (per_token and (patches % per_token).any()):
        raise LayoutError(
            f"the row has {len(placeholders)} {name} placeholders for {len(patches)} {name}s of {patches.tolist()[:8]} "
            "patches, which do not divide; give the media of every sample, and mm_token_type_ids (1 on image, 2 on "
            "video placeholders)"
        )
    if not len(patches):
        return np.zeros(0, np.int64)
    tokens = patches // per_token
    stops = np.cumsum(tokens)
    samples = row.segments.seq_idx().numpy()[placeholders]
    torn = np.flatnonzero(samples[stops - tokens] != samples[stops - 1])
    if len(torn):
        raise LayoutError(
            f"the placeholders of {name} {torn[0]} lie in sample {samples[stops - tokens][torn[0]]} and in the next; "
            "grids have to be in the order of the samples"
        )
    return placeholders[stops - tokens]


def _placeholders(row: PackedRow, kind: int) -> np.ndarray:
    """int64: where in the row the placeholders of images, or of videos, are."""
    if row.mm_token_type_ids is None:
        return np.zeros(0, np.int64)
    return np.flatnonzero(row.mm_token_type_ids[0].numpy() == kind)


def _grids(metadata: HostMetadata, kind: int) -> tuple[Grid, ...]:
    return metadata.image_grids if kind == IMAGE else metadata.video_grids


def _check_on_host(row: PackedRow) -> None:
    if not on_host(row.input_ids):
        raise LayoutError(
            f"the row is on {row.input_ids.device}, where its tokens cannot be compared without a host-device sync; "
            "share it before it is moved: VLMCollator(share_prefixes=True), or share(row).to(device)"
        )


def _check_targets(row: PackedRow) -> None:
    """A shared token is predicted once, whoever learns it, so its label can be nothing but its id.

    Raises:
        LayoutError: a sample has another label.
    """
    if row.shift_labels is None:
        return
    ids, labels = row.input_ids[0].numpy(), row.shift_labels[0].numpy()
    foreign = np.flatnonzero((labels != IGNORE) & (labels != np.append(ids[1:], IGNORE)))
    last = np.asarray(row.segments.stride[1:], np.int64) - 1
    foreign = np.union1d(foreign, last[labels[last] != IGNORE])
    if len(foreign):
        sample = int(row.segments.seq_idx()[foreign[0]])
        place = int(foreign[0]) - row.segments.stride[sample]
        raise LayoutError(
            f"sample {sample}: token {place + 1} has the label {labels[foreign[0]]}, which is not its own id; a prefix "
            "that samples share is predicted once, so labels are token ids or -100: leave this row unshared"
        )


def _num_distinct_targets(row: PackedRow, tree: PrefixTree) -> int | None:
    """Tokens of the tree that are a target of at least one sample; None: the row has no labels."""
    if row.shift_labels is None:
        return None
    predictions = np.flatnonzero(row.shift_labels[0].numpy() != IGNORE)
    return len(np.unique(tree.place().numpy()[predictions + 1]))


# ---------------------------------------------------------------------- media


def _check_media(media: Media, metadata: HostMetadata) -> None:
    if media.audio_mask is not None:
        raise LayoutError(
            "the row has audio, whose content is not compared, so that no prefix is shared: leave share_prefixes off "
            "for samples with audio"
        )
    if media.tensors or (media.pixel_values is not None and media.image_grid_thw is None and not metadata.image_grids):
        raise LayoutError(
            "media of this row are not images and videos with grids alone (image_grid_thw, video_grid_thw), so that "
            "those of one sample cannot be found among its pixels, and no prefix is shared: leave share_prefixes off "
            "for this model"
        )
    for pixels, grids in (
        (media.pixel_values, metadata.image_grids),
        (media.pixel_values_videos, metadata.video_grids),
    ):
        count, expected = 0 if pixels is None else len(pixels), sum(map(prod, grids))
        if count != expected:
            raise LayoutError(f"the grids describe {expected} patches, the row has {count}; give every sample's media")
        if pixels is not None and not on_host(pixels):
            raise LayoutError(f"the pixels are on {pixels.device}; share the row before it is moved to a device")


def _blocks(pixels: torch.Tensor | None, grids: Sequence[Grid]) -> tuple[torch.Tensor, ...]:
    """[P, C] of each medium: views."""
    return () if pixels is None else pixels.detach().split([prod(grid) for grid in grids])


def _kept(media: Media, metadata: HostMetadata, images: Sequence[int], videos: Sequence[int]) -> Media:
    """Images and videos of these numbers, in this order."""
    seconds = media.second_per_grid_ts
    return Media(
        pixel_values=_chosen(media.pixel_values, metadata.image_grids, images),
        image_grid_thw=None if media.image_grid_thw is None else media.image_grid_thw[list(images)],
        pixel_values_videos=_chosen(media.pixel_values_videos, metadata.video_grids, videos),
        video_grid_thw=None if media.video_grid_thw is None else media.video_grid_thw[list(videos)],
        second_per_grid_ts=None if seconds is None else seconds[list(videos)],
    )


def _chosen(pixels: torch.Tensor | None, grids: Sequence[Grid], kept: Sequence[int]) -> torch.Tensor | None:
    if pixels is None or list(kept) == list(range(len(grids))):
        return pixels
    blocks = pixels.split([prod(grid) for grid in grids])
    return torch.cat([blocks[at] for at in kept])


_OF_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(block: torch.Tensor) -> np.ndarray:
    """Every value as a whole number of the same bits: NaN equals itself, and no type is missing in numpy."""
    return block.detach().contiguous().view(_OF_WIDTH[block.element_size()]).numpy().reshape(-1)


def _are_equal(values: np.ndarray, others: np.ndarray) -> bool:
    """Compare piece by piece, up to the first difference."""
    pieces = range(0, len(values), PIECE)
    return all(np.array_equal(values[at : at + PIECE], others[at : at + PIECE]) for at in pieces)
