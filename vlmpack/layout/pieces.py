"""Cut the prefix tree of a group that is larger than a row into pieces; each token is in one of them (`cut_group`).

    tree      P ─┬─ A            piece 0   P                 kept: three pieces start from its end
                 ├─ B            piece 1   A B               rows of at most `capacity` new tokens
                 └─ Q ─┬─ C      piece 2   Q                 kept: one piece starts from its end
                       └─ D      piece 3   C D

A piece that others start from is one node, or a part of a node that is longer than a row. So one run of tokens precedes
each piece, and the piece is a row like any other: its samples from their first token on, with a prefix tree whose first
node, the kept prefix, does not go through the model again.

Pieces are in depth-first order: behind the last piece that starts from a kept one, nothing needs that one any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, final

import numpy as np
import torch

from vlmpack.errors import LayoutError, check_kind, check_whole_number
from vlmpack.layout.device import outside_graph
from vlmpack.layout.media import KINDS, MediaTable
from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.row import IGNORE, PackedRow, columns_at
from vlmpack.layout.segments import Segments, ranges
from vlmpack.layout.sharing import ReadMedia, check_on_host, indivisible_runs, read_media_of_row, take_media, with_tree


@final
@dataclass(frozen=True, kw_only=True)
class GroupPiece:
    """One piece of a group: some samples, from their first token to the end of the piece."""

    samples: tuple[int, ...]
    """The samples of the group that go through the piece, ascending."""
    nodes: tuple[int, ...]
    """The nodes of `Cut.tree` that the piece computes, in depth-first order."""
    kept: int
    """Number of tokens before the piece, which earlier pieces computed."""
    parent: int | None
    """The piece that computed the last of these tokens; None: there are none."""
    is_kept: bool
    """Whether later pieces start from the end of this one. It then has one node."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class CutGroup:
    """A group cut into pieces."""

    group: PackedRow
    """The row of the whole group, with its tree."""
    table: MediaTable
    """Its media, with their entries counted."""
    tree: PrefixTree
    """The group's tree, with nodes longer than a row cut in several."""
    pieces: tuple[GroupPiece, ...]
    """The pieces in depth-first order."""

    def row(self, piece: GroupPiece) -> PackedRow:
        """Return the row of a piece. The kept tokens are the first node of its tree. It has only the targets that the
        piece computes, and only the media that the vision and audio towers compute with it."""
        row, table, tree = self.group, self.table, self.tree
        assert row.tree is not None
        first, lengths = int(piece.kept > 0), self.lengths(piece)
        number = {node: first + at for at, node in enumerate(piece.nodes)}
        segments = Segments.from_lengths(lengths.tolist())
        own_table, of_table = _table(table, piece.samples, lengths)
        part = PrefixTree(
            segments=segments,
            parents=(*[-1] * first, *(number.get(tree.parents[node], first - 1) for node in piece.nodes)),
            lengths=(*[piece.kept] * first, *(tree.lengths[node] for node in piece.nodes)),
            leaves=tuple(number.get(tree.leaves[sample], first) for sample in piece.samples),  # or behind a kept piece
            kept=piece.kept,
        )
        index, known = torch.from_numpy(self.index(piece)), row.known_metadata
        columns, num_targets = columns_at(row, lambda _: index), None
        if row.shift_labels is not None:
            at = segments.position_in_segment()
            is_own = (at >= piece.kept - 1) & (at + 1 < torch.from_numpy(lengths)[segments.seq_idx().long()])
            columns["shift_labels"] = columns["shift_labels"].where(is_own, IGNORE)
            num_targets = int((columns["shift_labels"] != IGNORE).sum())

        def of_samples(values: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(values[sample] for sample in piece.samples) if values else ()

        metadata = replace(
            known,
            lengths=segments.lengths,
            offsets=(),
            media=own_table,
            prefixes=tuple(map(min, of_samples(known.prefixes), lengths.tolist())),
            num_targets=num_targets,
            sample_ids=of_samples(known.sample_ids),
            channels=of_samples(known.channels),
        )
        computed = own_table.in_tree(part)
        _check_counts(computed, piece)
        held, own = table.computed_as(row.tree), own_table.chosen(part)
        chosen = {kind: held[kind][np.asarray(of_table[kind], int)[own[kind]]] for kind in KINDS}
        media = take_media(table.in_tree(row.tree), row.media, chosen, computed, in_tree=True)
        return with_tree(replace(row, **columns, segments=segments, media=media, metadata=metadata, tree=None), part)

    def lengths(self, piece: GroupPiece) -> np.ndarray:
        """int64 [B of the piece]: number of tokens of each sample in a piece's row."""
        whole = np.asarray(self.tree.segments.lengths, np.int64)[list(piece.samples)]
        return np.full_like(whole, piece.kept + self.tree.lengths[piece.nodes[0]]) if piece.is_kept else whole

    def index(self, piece: GroupPiece) -> np.ndarray:
        """int64 [T of the piece]: position in the group's row of each token of a piece's row."""
        starts = np.asarray(self.tree.segments.stride, np.int64)[list(piece.samples)]
        return ranges(starts, self.lengths(piece))


@outside_graph
def cut_group(row: PackedRow, capacity: int, *, read_media: ReadMedia | None = None) -> CutGroup:
    """Cut a group into pieces of at most `capacity` new tokens.

    Args:
        row: the group on the host, with its prefix tree, of any size. Without a tree, samples share nothing.
        capacity: maximum number of tokens of a piece that go through the model.
        read_media: see `share`.

    Raises:
        LayoutError: the row is on a device or has padding; an image, a video, an audio or a run of tokens that attend
            to each other in both directions is longer than `capacity`; or the images of a sample, which the model
            counts, are in several pieces.
        ConfigError: `row` is no row, or `capacity` is not a whole number of at least 1.
    """
    check_kind("row", row, PackedRow, "collator.collate(samples)")
    check_whole_number("capacity", capacity)
    check_on_host(row)
    row, table = read_media_of_row(row, read_media)
    if row.tree is None:
        samples = range(row.segments.num_samples)
        parents, lengths = (-1,) * len(samples), row.segments.lengths
        roots = PrefixTree(segments=row.segments, parents=parents, lengths=lengths, leaves=tuple(samples))
        row = with_tree(row, roots)
    assert row.tree is not None
    tree = _split_nodes(row.tree, indivisible_runs(row, table), capacity)
    cut = CutGroup(group=row, table=table, tree=tree, pieces=tuple(_pieces(tree, capacity)))
    if table.image_counts is not None:
        for piece in cut.pieces:
            cut.row(piece)  # raises for images that are counted
    return cut


# ---------------------------------------------------------------------- the tree in pieces


def _split_nodes(tree: PrefixTree, runs: Sequence[Sequence[int]], capacity: int) -> PrefixTree:
    """Cut nodes that are longer than `capacity`. `runs`: (start, stop) in the row of tokens that stay together."""
    if max(tree.lengths) <= capacity:
        return tree
    can_cut = np.ones(tree.num_tokens, bool)  # whether the tree can be cut before a token
    place = tree.place().numpy()
    for start, stop in runs:
        can_cut[place[start + 1 : stop]] = False
    starts = np.flatnonzero(can_cut)
    together = np.diff(starts, append=tree.num_tokens)
    if (longest := int(together.max())) > capacity:
        sample = int(tree.segments.seq_idx()[tree.source()[starts[together.argmax()]]])
        raise LayoutError(
            f"sample {sample} has {longest} tokens that stay together (an image, a video, an audio, or tokens that all "
            f"see each other), more than the capacity of {capacity}: give a capacity of {longest}"
        )
    parents: list[int] = []
    lengths: list[int] = []
    last: list[int] = []  # the last part of each node
    for (start, stop), parent in zip(tree.nodes.spans, tree.parents, strict=True):
        before = -1 if parent < 0 else last[parent]
        while start < stop:
            end = stop
            if start + capacity < stop:
                end = int(starts[np.searchsorted(starts, start + capacity, side="right") - 1])
            parents.append(before)
            lengths.append(end - start)
            before, start = len(lengths) - 1, end
        last.append(before)
    leaves = tuple(last[leaf] for leaf in tree.leaves)
    return replace(tree, parents=tuple(parents), lengths=tuple(lengths), leaves=leaves)


def _pieces(tree: PrefixTree, capacity: int) -> Iterator[GroupPiece]:
    """Yield the pieces: subtrees that fit are packed together; the node above others becomes a kept piece."""
    children: list[list[int]] = [[] for _ in tree.lengths]
    totals, sizes = [*tree.lengths], [1] * len(tree.lengths)  # tokens and nodes of each subtree
    for node in reversed(range(len(tree.lengths))):
        if (parent := tree.parents[node]) >= 0:
            children[parent].insert(0, node)
            totals[parent] += totals[node]
            sizes[parent] += sizes[node]

    def piece(nodes: Sequence[int], below: Sequence[int], kept: int, parent: int | None, is_kept: bool) -> GroupPiece:
        """Return a piece of these nodes, with the samples that end in the nodes `below`."""
        within = {*below}
        samples = tuple(sample for sample, leaf in enumerate(tree.leaves) if leaf in within)
        return GroupPiece(samples=samples, nodes=tuple(nodes), kept=kept, parent=parent, is_kept=is_kept)

    count = 0
    stack: list[tuple[int | None, int, list[int], int | None]] = [
        (None, 0, [node for node, parent in enumerate(tree.parents) if parent < 0], None)
    ]
    while stack:
        parent, kept, siblings, node = stack.pop()
        if node is not None:
            yield piece([node], range(node, node + sizes[node]), kept, parent, is_kept=True)
            parent, kept, count = count, kept + tree.lengths[node], count + 1
        for roots in _first_fit([child for child in siblings if totals[child] <= capacity], totals, capacity):
            nodes = [each for root in roots for each in range(root, root + sizes[root])]
            yield piece(nodes, nodes, kept, parent, is_kept=False)
            count += 1
        large = [child for child in siblings if totals[child] > capacity]
        stack += [(parent, kept, children[child], child) for child in reversed(large)]


def _first_fit(nodes: Sequence[int], totals: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack subtrees into pieces by first fit, the largest first; nodes of a piece are ascending."""
    bins: list[list[int]] = []
    free: list[int] = []
    for node in sorted(nodes, key=lambda each: -totals[each]):
        at = next((i for i, left in enumerate(free) if left >= totals[node]), len(bins))
        if at == len(bins):
            bins.append([])
            free.append(capacity)
        bins[at].append(node)
        free[at] -= totals[node]
    return [sorted(each) for each in bins]


# ---------------------------------------------------------------------- the media of a piece


def _check_counts(computed: MediaTable, piece: GroupPiece) -> None:
    """Refuse an image that a model would take for the only one of its sample, because others are in other pieces."""
    if computed.image_counts is None:
        return
    for is_single, group in groupby(computed.images, lambda image: image.context):
        images = [*group]
        if len(images) == 1 and not is_single:
            raise LayoutError(
                f"the images of sample {piece.samples[images[0].sample]} are in several pieces, and this model encodes "
                "an image in another way if it is the only one: give a capacity that the sample fits"
            )


def _table(table: MediaTable, samples: Sequence[int], lengths: np.ndarray) -> tuple[MediaTable, dict[int, list[int]]]:
    """Return (the media of these samples within these lengths; for each kind, their indices in `table`)."""
    number = {sample: at for at, sample in enumerate(samples)}
    media, of_table = [], {}
    for kind in KINDS:
        of_kind = table.of_kind(kind)
        found = [i for i, m in enumerate(of_kind) if m.sample in number and m.span[1] <= lengths[number[m.sample]]]
        media += [replace(of_kind[i], sample=number[of_kind[i].sample]) for i in found]
        of_table[kind] = found
    return replace(table, media=tuple(media)), of_table
