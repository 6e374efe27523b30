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
from itertools import zip_longest
from math import prod
from typing import final

import numpy as np
import torch

from vlmpack.errors import LayoutError, check_kind, check_whole_number
from vlmpack.layout.batch import AUDIO, IMAGE, VIDEO, HostMetadata
from vlmpack.layout.device import on_host, outside_graph
from vlmpack.layout.media_units import FindMedia, grid_units
from vlmpack.layout.prefix_tree import PrefixTree, check_without_padding
from vlmpack.layout.row import IGNORE, PackedRow
from vlmpack.layout.segments import Segments
from vlmpack.layout.trie import compressed_trie

MIN_SHARED = 64
"""Tokens below which a shared beginning is not worth a node: chat templates share about ten of every sample."""


@outside_graph
def share(
    row: PackedRow,
    *,
    min_shared: int = MIN_SHARED,
    groups: Sequence[Hashable] | torch.Tensor | None = None,
    tree: PrefixTree | None = None,
    units: FindMedia = grid_units,
) -> PackedRow:
    """Find the prefix tree of a row on the host, and keep every image, video and audio of it once.

    Tokens, labels, extras and metadata stay those of every sample. Media are compared by their content.

    Args:
        row: without padding, on the host; one that has a tree gets a new one.
        min_shared: tokens of a shared beginning, from the last branching on, that make it worth a node; a shorter one
            is repeated in each of its branches, unless it stands behind another one and its samples together would
            repeat so many tokens. Equal samples are always shared.
        groups: a group of each sample; samples of different groups share nothing. None: all are compared.
        tree: the tree, where it is known; it is compared with the samples. None: it is found.
        units: finds the media of the row. By default by grids; of images without grids, of audio, and of models in
            which prompts see all of themselves: `Family.media_units(model.config)`.

    Returns:
        The row with `tree`; the row itself if its samples share nothing.

    Raises:
        LayoutError: padding, labels that are not the tokens' own ids, a row on a device, media that do not fit their
            placeholders, or a tree that is not this row's. Names the sample and the remedy.
    """
    check_kind("row", row, PackedRow, "collator.collate(samples)")
    row = unshare(row, units=units)
    of_row = units(row)
    numbers = [medium.numbers(row.media) for medium in of_row.by_kind]
    types = of_row.types if row.mm_token_type_ids is None else row.mm_token_type_ids
    whole = replace(row, metadata=of_row.metadata, mm_token_type_ids=types)
    if tree is None:
        images, videos, audios = numbers
        found = {"images": images, "videos": videos, "audios": audios}
        tree = find_prefix_tree(whole, **found, min_shared=min_shared, groups=groups)
    else:
        tree = _Symbols.of(whole, numbers).compared(tree)
    if tree is None:
        return row
    return with_tree(whole.with_media(of_row.take(row.media, (tree.images, tree.videos, tree.audios))), tree)


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
def unshare(row: PackedRow, *, units: FindMedia = grid_units) -> PackedRow:
    """Return the row without its tree, with the media of every sample: the inverse of `share`.

    Args:
        row: a row; without a tree it is returned as it is.
        units: as of `share`.

    Raises:
        LayoutError: the row is on a device, or `units` cannot find its media.
    """
    tree = row.tree
    if tree is None:
        return row
    _check_on_host(row)
    place, of_sample = tree.place().numpy(), row.segments.seq_idx().numpy()
    chosen, samples = [], []
    for kind, computed in zip(_KINDS, (tree.images, tree.videos, tree.audios), strict=True):
        starts = _media_spans(row, kind)[:, 0]
        # each medium of the row stands where one of the tree does
        chosen.append(np.searchsorted(place[starts[list(computed)]], place[starts]).tolist())
        samples.append(of_sample[starts].tolist())
    row = row.with_media(units(row).take(row.media, chosen, samples))
    return replace(row, tree=None, metadata=replace(row.known_metadata, num_distinct_targets=None))


@outside_graph
def find_prefix_tree(
    row: PackedRow,
    *,
    images: Sequence[int] = (),
    videos: Sequence[int] = (),
    audios: Sequence[int] = (),
    min_shared: int = MIN_SHARED,
    groups: Sequence[Hashable] | torch.Tensor | None = None,
) -> PrefixTree | None:
    """Find the tree of a row whose media are known by numbers; its pixels are not read.

    Args:
        row: without padding, on the host, its metadata with the grids, or the tokens, of all media.
        images: one number for each image, in row order; equal ones are equal images (`content_numbers`).
        videos: of each video, likewise.
        audios: of each audio, likewise.
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
    symbols = _Symbols.of(row, (images, videos, audios))
    trie = compressed_trie(symbols.of_samples, groups, min_shared)
    if sum(trie.lengths) == row.segments.total:
        return None
    tree = PrefixTree(segments=row.segments, parents=(*trie.parents,), lengths=(*trie.lengths,), leaves=(*trie.leaves,))
    return symbols.with_media(tree)


def _plain(groups: Sequence[Hashable] | torch.Tensor | None, count: int) -> list[Hashable]:
    """Groups that are equal where they say the same: two tensors of one number are not."""
    if groups is None:
        return [0] * count
    if len(groups) != count:
        raise LayoutError(f"share: {len(groups)} groups for the {count} samples of the row")
    return [group.item() if isinstance(group, torch.Tensor) else group for group in groups]


# ---------------------------------------------------------------------- symbols

_KINDS = (IMAGE, VIDEO, AUDIO)
_NAMES = {IMAGE: "image", VIDEO: "video", AUDIO: "audio"}


@final
@dataclass(frozen=True, kw_only=True)
class _Symbols:
    """The row as numbers that are equal where tokens, and the media that they stand for, are.

    No branch begins inside an atom: a medium with the text between its frames, or a run of tokens that see each other
    in both directions. All tokens of an atom have the number of its whole content.
    """

    values: np.ndarray
    """int64 [T]."""
    atoms: np.ndarray
    """int64 [T]: where in the row the atom of each token begins; other tokens are their own."""
    segments: Segments
    """Of the row."""
    starts: Sequence[np.ndarray]
    """int64 each: where in the row the first placeholder of each image, each video and each audio is."""

    @classmethod
    def of(cls, row: PackedRow, numbers: Sequence[Sequence[int]]) -> _Symbols:
        """Check that the row can be shared, and number its tokens; `numbers`: of images, videos and audios.

        Raises:
            LayoutError: see `share`.
        """
        _check_on_host(row)
        _check_targets(row)
        metadata = row.known_metadata
        values, atoms = row.input_ids[0].numpy().copy(), np.arange(row.segments.total)
        contents: dict[Hashable, int] = {}

        def write(start: int, stop: int, content: Hashable) -> None:
            values[start:stop] = -1 - contents.setdefault(content, len(contents))
            atoms[start:stop] = start

        spans = [_media_spans(row, kind) for kind in _KINDS]
        details = (metadata.image_grids, zip_longest(metadata.video_grids, metadata.seconds_per_grid), ())
        for kind, of_kind, spans_N2, detail in zip(_KINDS, numbers, spans, details, strict=True):
            assert len(of_kind) == len(spans_N2), "one number for each medium"
            for number, (start, stop), more in zip_longest(of_kind, spans_N2.tolist(), detail):
                write(start, stop, (kind, number, more, values[start:stop].tobytes()))
        for (first, _), runs in zip(row.segments.spans, metadata.media_runs, strict=False):
            for start, stop in runs:
                begin, last = atoms[first + start], atoms[first + stop - 1]
                if begin != last:  # an atom may reach beyond the run
                    end = last + np.count_nonzero(atoms == last)
                    write(begin, end, values[begin:end].tobytes())
        return cls(values=values, atoms=atoms, segments=row.segments, starts=[s[:, 0] for s in spans])

    @property
    def of_samples(self) -> list[np.ndarray]:
        """int64 of each sample."""
        return [self.values[start:stop] for start, stop in self.segments.spans]

    def compared(self, tree: PrefixTree) -> PrefixTree:
        """A caller's tree, with the media that are computed.

        Raises:
            LayoutError: it is of another row; samples differ where it says that they are alike; or a node ends
                inside an atom.
        """
        if tree.segments != self.segments:
            raise LayoutError(
                f"the tree is of samples of {list(tree.segments.lengths)[:9]} tokens, the row of "
                f"{list(self.segments.lengths)[:9]}"
            )
        first = tree.source().numpy()[tree.place().numpy()]  # where in the row each token is taken from
        self._require(self.values == self.values[first], "is another one there, or stands for other media")
        whole = self.atoms[first] == self.atoms[first[self.atoms]]  # as the atom's first token is
        self._require(whole, "is inside an image or video there, or inside tokens that all see each other")
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
        images, videos, audios = (_computed(tree, starts) for starts in self.starts)
        return replace(tree, images=images, videos=videos, audios=audios)


def _computed(tree: PrefixTree, starts: np.ndarray) -> tuple[int, ...]:
    """The media that the tree takes from the row, in its own order."""
    place, source = tree.place().numpy(), tree.source().numpy()
    computed = np.flatnonzero(source[place[starts]] == starts)
    return tuple(computed[np.argsort(place[starts[computed]])].tolist())


def _media_spans(row: PackedRow, kind: int) -> np.ndarray:
    """int64 [N, 2]: where in the row each image, video or audio begins and ends, from first to last placeholder.

    Raises:
        LayoutError: there are not as many placeholders as its media need, or those of one lie in two samples.
    """
    placeholders = _placeholders(row, kind)
    samples = row.segments.seq_idx().numpy()
    if kind == AUDIO:
        return _run_spans(placeholders, samples, len(row.known_metadata.audio_frames))
    tokens = _tokens_of_media(row.known_metadata, kind, len(placeholders))
    stops = tokens.cumsum()
    first, last = placeholders[stops - tokens], placeholders[stops - 1]
    torn = np.flatnonzero(samples[first] != samples[last])
    if len(torn):
        raise LayoutError(
            f"the placeholders of {_NAMES[kind]} {torn[0]} lie in sample {samples[first[torn[0]]]} and in the next; "
            "media have to be in the order of the samples"
        )
    return np.stack((first, last + 1), 1)


def _tokens_of_media(metadata: HostMetadata, kind: int, count: int) -> np.ndarray:
    """int64 [N]: placeholders of each image or video, `count` together."""
    name = _NAMES[kind]
    tokens = np.asarray(metadata.image_tokens if kind == IMAGE else metadata.video_tokens, np.int64)
    if len(tokens):
        if tokens.sum() != count:
            raise LayoutError(
                f"the row has {count} {name} placeholders for {len(tokens)} {name}s of {tokens.tolist()[:8]} tokens; "
                "give the media of every sample, and mm_token_type_ids (1 on image, 2 on video placeholders)"
            )
        return tokens
    patches = np.asarray(
        [prod(grid) for grid in (metadata.image_grids if kind == IMAGE else metadata.video_grids)], int
    )
    per_token, rest = divmod(int(patches.sum()), max(count, 1))
    if bool(len(patches)) != bool(count) or rest or (per_token and (patches % per_token).any()):
        raise LayoutError(
            f"the row has {count} {name} placeholders for {len(patches)} {name}s of {patches.tolist()[:8]} "
            "patches, which do not divide; give the media of every sample, and mm_token_type_ids (1 on image, 2 on "
            "video placeholders)"
        )
    return patches // max(per_token, 1)


def _run_spans(placeholders: np.ndarray, samples: np.ndarray, count: int) -> np.ndarray:
    """int64 [N, 2]: begin and end of each audio, which has a run of placeholders of its own in its sample."""
    ends = np.flatnonzero((np.diff(placeholders) > 1) | (np.diff(samples[placeholders]) > 0))
    edges = np.append(np.append(-1, ends), len(placeholders) - 1) if len(placeholders) else np.zeros(1, np.int64)
    if len(edges) - 1 != count:
        raise LayoutError(
            f"the row has {len(edges) - 1} runs of audio placeholders for {count} audios; give the audios of every "
            "sample, and mm_token_type_ids (3 on audio placeholders)"
        )
    return np.stack((placeholders[edges[:-1] + 1], placeholders[edges[1:]] + 1), 1)


def _placeholders(row: PackedRow, kind: int) -> np.ndarray:
    """int64: where in the row the placeholders of images, videos or audios are."""
    if row.mm_token_type_ids is None:
        return np.zeros(0, np.int64)
    return np.flatnonzero(row.mm_token_type_ids[0].numpy() == kind)


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
