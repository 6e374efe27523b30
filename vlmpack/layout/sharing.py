"""Find the shared prefixes of a row's samples, and keep their media once: `share`, and its inverse `unshare`.

Every token has a number: its id, or for a placeholder, one for the CONTENT of its medium with its grid. Token ids alone
would merge different images of the same grid. The numbers make a compressed trie, the `PrefixTree`:

    samples      a b I I c      a b I I d e      a b J J c          I, J: two images of the same grid
    trie         a b ─┬─ I I ─┬─ c
                      │       └─ d e
                      └─ J J c
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vlmpack.errors import LayoutError, check_kind, check_whole_number
from vlmpack.layout.batch import MEDIA_KEYS, Media, compare_media
from vlmpack.layout.device import on_host, outside_graph, require
from vlmpack.layout.media import KINDS, MediaTable, content_numbers, image_counts
from vlmpack.layout.prefix_tree import PrefixTree, check_without_padding, compressed_trie
from vlmpack.layout.row import IGNORE, PackedRow, shift_labels

MIN_SHARED = 64
"""Minimum length in tokens of a shared prefix to make a node; every sample shares about ten tokens of chat template."""


@outside_graph
def share(
    row: PackedRow,
    *,
    min_shared: int = MIN_SHARED,
    groups: Sequence[Hashable] | torch.Tensor | None = None,
    tree: PrefixTree | None = None,
    read_media: ReadMedia | None = None,
) -> PackedRow:
    """Find the prefix tree of a row on the host, and keep each of the tree's images, videos and audios once.

    Tokens, labels, extras and metadata still describe all samples in full. Media are compared by their content.

    Args:
        row: a row without padding, on the host; if it has a tree, the tree is replaced.
        min_shared: minimum length in tokens of a shared prefix, counted from the last branch. A shorter one is repeated
            in each of its branches, unless it follows another shared prefix and the repetitions would add up to at
            least this many tokens. Equal samples are always shared.
        groups: the group of each sample; samples of different groups share nothing. None: all are compared.
        tree: the tree, if it is known; it is checked against the samples. None: find it.
        read_media: function that reads the media of the row: `families.media_reader(family, config)`. None: images and
            videos have grids, and the row's metadata has their positions.

    Returns:
        The row with `tree`, or without one if its samples share nothing.

    Raises:
        LayoutError: the row has padding or is on a device, labels are not the tokens' own ids, media do not match their
            placeholders, or `tree` belongs to another row. Names the sample and the remedy.
    """
    check_kind("row", row, PackedRow, "collator.collate(samples)")
    check_without_padding(row.segments)
    check_on_host(row)
    row = unshare(row, read_media=read_media)
    whole, table = read_media_of_row(row, read_media)
    images, videos, audios = (_media_numbers(table, whole.media, kind) for kind in KINDS)
    if tree is not None:
        _check_tree(tree, whole, (images, videos, audios))
    else:
        found = {"images": images, "videos": videos, "audios": audios}
        tree = find_prefix_tree(whole, **found, min_shared=min_shared, groups=groups)
    if tree is None:
        return row
    media = take_media(table, whole.media, table.chosen(tree), table.in_tree(tree), in_tree=True)
    return with_tree(replace(whole, media=media), tree)


def check_unshared(row: PackedRow, user: str) -> None:
    """Refuse a row with a tree, for callers that compute every sample in full.

    Raises:
        LayoutError: the row has a tree. The message names `user`, the caller.
    """
    if row.tree is not None:
        raise LayoutError(
            f"samples of this row share prefixes, and {user} computes every sample by itself: give it unshare(row), "
            "with the images of every sample, or collate without share_prefixes"
        )


def with_tree(row: PackedRow, tree: PrefixTree) -> PackedRow:
    """Add a tree and the number of distinct targets to a row whose media are already the tree's."""
    metadata = replace(row.known_metadata, num_distinct_targets=_num_distinct_targets(row, tree))
    return replace(row, tree=tree, metadata=metadata)


@outside_graph
def unshare(row: PackedRow, *, read_media: ReadMedia | None = None) -> PackedRow:
    """Return the row without its tree and with the media of every sample: the inverse of `share`.

    Args:
        row: a row; without a tree, it is returned unchanged.
        read_media: see `share`.

    Raises:
        LayoutError: the row is on a device, or its media cannot be found.
    """
    tree = row.tree
    if tree is None:
        return row
    check_on_host(row)
    row, table = read_media_of_row(row, read_media)
    media = take_media(table.in_tree(tree), row.media, table.computed_as(tree), table)
    metadata = replace(row.known_metadata, num_distinct_targets=None)
    return replace(row, media=media, tree=None, metadata=metadata)


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
    """Find the tree of a row whose media are given as numbers, without reading pixels.

    Args:
        row: a row without padding, on the host; its metadata has the table of all media.
        images: one number for each image, in row order; equal images have equal numbers (`content_numbers`).
        videos: one number for each video, likewise.
        audios: one number for each audio, likewise.
        min_shared: see `share`.
        groups: see `share`.

    Returns:
        The tree; None if samples share nothing.

    Raises:
        LayoutError: see `share`.
        ConfigError: `min_shared` is not a whole number of at least 1.
    """
    check_whole_number("min_shared", min_shared)
    check_without_padding(row.segments)
    count = row.segments.num_samples
    groups = [0] * count if groups is None else groups
    if len(groups) != count:
        raise LayoutError(f"share: {len(groups)} groups for the {count} samples of the row")
    if count == 1:
        return None
    # two tensors with the same number would not compare as equal
    groups = [group.item() if isinstance(group, torch.Tensor) else group for group in groups]
    values, _ = _token_numbers(row, (images, videos, audios))
    samples = [values[start:stop] for start, stop in row.segments.spans]
    trie = compressed_trie(samples, groups, min_shared)
    if sum(trie.lengths) == row.segments.total:
        return None
    return PrefixTree(segments=row.segments, parents=(*trie.parents,), lengths=(*trie.lengths,), leaves=(*trie.leaves,))


# ---------------------------------------------------------------------- parts of the media tensors

ReadMedia = Callable[[PackedRow], PackedRow]
"""Function that adds the media table, with entries counted, to a row whose tensors hold the media of its samples, or of
its tree if it has one."""


def read_media_of_row(row: PackedRow, read_media: ReadMedia | None) -> tuple[PackedRow, MediaTable]:
    """Return the row with its media table, and that table; its entries match the tensors.

    Raises:
        LayoutError: `read_media` raises it, tensors are on a device, or tensors have another number of entries.
    """
    for tensor in row.media.to_hf().values():
        if not on_host(values := torch.as_tensor(tensor)):
            raise LayoutError(f"the pixels are on {values.device}; share the row before it is moved to a device")
    row = (read_media or _read_grids)(row)
    table = row.known_metadata.media
    assert table is not None, "a reader adds the table"
    held = table if row.tree is None else table.in_tree(row.tree)
    for name, tensor in row.media.to_hf().items():
        expected = sum(medium.entries_in(name) for medium in held.media)
        count = torch.as_tensor(tensor).shape[held.axes.get(name, 0)]
        if name != held.image_counts and count != expected:
            what = "patches" if name.startswith("pixel_values") else f"entries of {name}"
            raise LayoutError(f"the images describe {expected} {what}, the row has {count}; give every sample's media")
    return row, table


def _read_grids(row: PackedRow) -> PackedRow:
    """Count the entries of images and videos with grids, whose positions are in the row's metadata."""
    tensors, table = row.media.to_hf(), row.known_metadata.media
    seen = None if table is not None or not tensors else "media, and no host metadata of their places"
    if {*tensors} - {*MEDIA_KEYS, "video_second_per_grid"}:
        seen = "media that are not images and videos with grids alone"
    if row.media.audio_mask is not None:
        seen = "audio"
    table = table or MediaTable()
    if seen is not None or not all(medium.grid for medium in table.media):
        raise LayoutError(
            f"the row has {seen or 'images without grids'}, so that those of one sample cannot be found without the "
            "model's family: give read_media=media_reader(family_of(model), model.config), both of vlmpack.families; "
            "VLMCollator(share_prefixes=True) needs nothing"
        )
    compare_media(table if row.tree is None else table.in_tree(row.tree), row.media)
    return replace(row, metadata=replace(row.known_metadata, media=table))


def _parts(table: MediaTable, tensors: Mapping[str, Any], kind: int) -> dict[str, list[torch.Tensor]]:
    """Split each tensor of one kind of media into the parts of each medium."""
    media = table.of_kind(kind)
    counts = {name: [medium.entries_in(name) for medium in media] for name in tensors}
    return {
        name: [*torch.as_tensor(tensors[name]).split_with_sizes(of_media, table.axes.get(name, 0))]
        for name, of_media in counts.items()
        if any(of_media)
    }


def _media_numbers(table: MediaTable, media: Media, kind: int) -> list[int]:
    """One number for each medium of one kind; media with equal numbers have equal features."""
    parts = _parts(table, media.to_hf(), kind)
    contents: list[Sequence[Hashable]] = [content_numbers(blocks) for blocks in parts.values()]
    numbers: dict[Hashable, int] = {}
    contexts = [medium.context for medium in table.of_kind(kind)]
    return [numbers.setdefault(content, len(numbers)) for content in zip(contexts, *contents, strict=True)]


def take_media(
    table: MediaTable,
    media: Media,
    chosen: Mapping[int, Sequence[int] | np.ndarray],
    target: MediaTable,
    *,
    in_tree: bool = False,
) -> Media:
    """Select media by index, in this order.

    Args:
        table: records of the media that the tensors hold.
        media: the tensors.
        chosen: indices of the selected media among the held ones of their kind, by kind.
        target: records of the selected media.
        in_tree: True if the selected media belong to a prefix tree, False if they belong to samples in row order.
    """
    tensors, taken = media.to_hf(), {}
    for kind, numbers in chosen.items():
        for name, parts in _parts(table, tensors, kind).items():
            if [*numbers] == [*range(len(parts))]:
                taken[name] = tensors[name]
            elif len(numbers):
                taken[name] = torch.cat([parts[at] for at in numbers], table.axes.get(name, 0))
    if (name := table.image_counts) in tensors and target.images:
        taken[name] = torch.tensor(image_counts(target.images, in_tree=in_tree), dtype=tensors[name].dtype)
    taken = {name: tensor for name, tensor in taken.items() if torch.as_tensor(tensor).numel()}  # none may have tiles
    return Media.from_hf(taken, names=[name for name in taken if name not in MEDIA_KEYS])


# ---------------------------------------------------------------------- numbers of tokens


def _token_numbers(row: PackedRow, numbers: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Check that the row can be shared, and number its tokens.

    Two numbers are equal if the tokens and the media behind them are equal. An indivisible run is a medium with the
    text between its frames, or tokens that attend to each other in both directions. No branch begins inside such a run,
    because all its tokens have the number of its whole content.

    Args:
        row: the row.
        numbers: content numbers of images, of videos and of audios.

    Returns:
        (int64 [T]: the number of each token; int64 [T]: position in the row where the indivisible run of each token
        begins, for other tokens their own).

    Raises:
        LayoutError: see `share`.
    """
    _check_targets(row)
    table = row.known_metadata.media or MediaTable()
    values, run_starts = row.input_ids[0].numpy().copy(), np.arange(row.segments.total)
    contents: dict[Hashable, int] = {}

    def write(start: int, stop: int, content: Hashable) -> None:
        values[start:stop] = -1 - contents.setdefault(content, len(contents))
        run_starts[start:stop] = start

    for kind, of_kind in zip(KINDS, numbers, strict=True):
        spans = table.spans(row.segments, kind).tolist()
        for number, medium, (start, stop) in zip(of_kind, table.of_kind(kind), spans, strict=True):
            write(start, stop, (kind, number, medium.grid, medium.seconds, values[start:stop].tobytes()))
    for start, stop in _two_way_runs(row, table):
        begin, last = int(run_starts[start]), int(run_starts[stop - 1])
        if begin != last:  # the last run may extend beyond this one
            end = last + int(np.count_nonzero(run_starts == last))
            write(begin, end, values[begin:end].tobytes())
    return values, run_starts


def _check_tree(tree: PrefixTree, row: PackedRow, numbers: Sequence[Sequence[int]]) -> None:
    """Check a caller's tree.

    Raises:
        LayoutError: the tree belongs to another row, it shares tokens that differ between samples, or a node ends
            inside an indivisible run.
    """
    values, run_starts = _token_numbers(row, numbers)
    segments = row.segments
    if tree.segments != segments:
        raise LayoutError(
            f"the tree is of samples of {list(tree.segments.lengths)[:9]} tokens, the row of "
            f"{list(segments.lengths)[:9]}"
        )
    first = tree.source().numpy()[tree.place().numpy()]  # position in the row that each token is taken from
    # each token of a run is taken from the same sample as the start of the run
    is_whole = run_starts[first] == run_starts[first[run_starts]]
    for agree, fault in (
        (values == values[first], "is another one there, or stands for other media"),
        (is_whole, "is inside an image or video there, or inside tokens that all see each other"),
    ):
        message = f"the tree takes it from a sample before, but it {fault}; leave the tree out: share finds it"
        require(torch.from_numpy(agree), message, LayoutError, where=segments.where)


def _two_way_runs(row: PackedRow, table: MediaTable) -> list[tuple[int, int]]:
    """(start, stop) in the row of the runs of tokens that attend to each other in both directions."""
    bidirectional = MediaTable(media=tuple(medium for medium in table.media if medium.bidirectional))
    prefixes = zip(row.segments.spans, row.known_metadata.prefixes, strict=False)
    return [*bidirectional.runs(row.segments), *((start, start + n) for (start, _), n in prefixes if n)]


def indivisible_runs(row: PackedRow, table: MediaTable) -> list[Sequence[int]]:
    """Return (start, stop) in the row of the runs of tokens inside which no branch begins."""
    media = [span for kind in KINDS for span in table.spans(row.segments, kind).tolist()]
    return [*media, *_two_way_runs(row, table)]


def check_on_host(row: PackedRow) -> None:
    if not on_host(row.input_ids):
        raise LayoutError(
            f"the row is on {row.input_ids.device}, where its tokens cannot be compared without a host-device sync; "
            "share it before it is moved: VLMCollator(share_prefixes=True), or share(row).to(device)"
        )


def _check_targets(row: PackedRow) -> None:
    """Check that every label is its token's id: a shared token is predicted once for all samples that train on it.

    Raises:
        LayoutError: a sample has another label.
    """
    if row.shift_labels is None:
        return
    own = (row.shift_labels == IGNORE) | (row.shift_labels == shift_labels(row.input_ids, row.segments))
    message = (
        "the label of the token behind it is not that token's own id; a prefix that samples share is predicted once, "
        "so labels are token ids or -100: leave this row unshared"
    )
    require(own, message, LayoutError, where=row.segments.where)


def _num_distinct_targets(row: PackedRow, tree: PrefixTree) -> int | None:
    """Number of tokens of the tree that are a target of at least one sample; None: the row has no labels."""
    if row.shift_labels is None:
        return None
    predictions = np.flatnonzero(row.shift_labels[0].numpy() != IGNORE)
    return len(np.unique(tree.place().numpy()[predictions + 1]))
