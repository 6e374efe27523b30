"""A prefix tree over the samples of a packed row: shared prefixes go through the model once (`PrefixTree`).

Three samples, two images in them:

    samples      P A      P B C      P B D
    row    [T]   P A P B C P B D     the PackedRow, with all samples in full
    nodes  [t]   P A B C D           the tokens that go through the model, nodes in depth-first order

                 P ─┬─ A             node        0   1   2   3   4
                    └─ B ─┬─ C       parents    -1   0   0   2   2
                          └─ D       leaves      1   3   4         the node in which each sample ends

    source [t]   position in the row of each token of the tree: 0 1 3 4 7     (if every node has one token)
    place  [T]   position in the tree of each token of the row: 0 1 0 2 3 0 2 4
    keys         P  P A  P B  P B C  P B D: each node's queries attend to its ancestors and itself

T row tokens, t tree tokens, n nodes, B samples.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any, final

import numpy as np
import torch

from vlmpack.errors import LayoutError
from vlmpack.layout.segments import Segments, ranges


@final
@dataclass(frozen=True, kw_only=True)
class PrefixTree:
    """The nodes of shared prefixes and the path of each sample: Python ints on the host.

    Index tensors are derived from them once per device. Samples may end in inner nodes, and several samples may end in
    the same node. A sample that shares nothing is its own root.

    Raises:
        LayoutError: the nodes are not in depth-first order, or their paths do not match the samples of the row.
    """

    segments: Segments
    """The row's boundaries: all samples in full, without padding."""
    parents: tuple[int, ...]
    """Parent of each node; -1: a root. A node comes before its children, and its descendants are contiguous."""
    lengths: tuple[int, ...]
    """Number of tokens of each node, at least 1."""
    leaves: tuple[int, ...]
    """The node in which each sample ends."""
    kept: int = 0
    """Number of its first tokens that do not go through the model again, nor do their media: those of a kept prefix."""

    def __post_init__(self) -> None:
        check_without_padding(self.segments)
        if not self.parents:
            raise LayoutError("a tree has at least one node")
        for node, parent in enumerate(self.parents):
            if parent != -1 and (not node or parent not in self.path(node - 1)):
                raise LayoutError(
                    f"node {node} comes after its parent {parent}, but not among its descendants: nodes are in "
                    "depth-first order, each before its children"
                )
        if len(self.lengths) != len(self.parents) or min(self.lengths) < 1:
            raise LayoutError(f"{len(self.parents)} nodes need one length each, at least 1: got {list(self.lengths)}")
        if len(self.leaves) != self.segments.num_samples or not {*self.leaves} <= {*range(len(self.parents))}:
            raise LayoutError(f"each of {self.segments.num_samples} samples ends in a node: got {list(self.leaves)}")
        for sample, (leaf, length) in enumerate(zip(self.leaves, self.segments.lengths, strict=True)):
            if self.keys.lengths[leaf] != length:
                path = " + ".join(str(self.lengths[node]) for node in self.path(leaf))
                raise LayoutError(f"sample {sample} has {length} tokens, but the nodes of its path have {path}")
        if unused := {*range(len(self.parents))} - {*self.parents, *self.leaves}:
            raise LayoutError(f"no sample goes through node {min(unused)}; leave it out")

    def __repr__(self) -> str:
        samples, tokens = self.segments.num_samples, self.segments.total
        shape = f"{len(self.lengths)} nodes, depth {max(self.depths) + 1}"
        return f"PrefixTree({samples} samples, {tokens} tokens in {self.num_tokens}, {shape})"

    # ------------------------------------------------------------------ on the host

    def path(self, node: int) -> tuple[int, ...]:
        """Return the nodes from the root to `node`."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    def taken(self, starts: np.ndarray) -> np.ndarray:
        """Return the indices of the media that go through the model, in the order of the tree: int64.

        `starts`: position in the row of the first placeholder of each medium. The tree takes it from one sample.
        """
        at = self._place[starts]
        numbers = np.flatnonzero((self._source[at] == starts) & (at >= self.kept))
        return numbers[np.argsort(at[numbers])]

    @cached_property
    def nodes(self) -> Segments:
        """Boundaries of the nodes in the [1, t] sequence that goes through the model."""
        return Segments.from_lengths(self.lengths)

    @cached_property
    def keys(self) -> Segments:
        """Boundaries of each node's keys (its ancestors' tokens and its own), concatenated node by node.

        Causal attention of a node's queries to these keys is aligned at the lower right: the last query sees all keys.
        """
        totals: list[int] = []
        for parent, length in zip(self.parents, self.lengths, strict=True):
            totals.append(length + (totals[parent] if parent >= 0 else 0))
        return Segments.from_lengths(totals)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Number of ancestors of each node."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 + depths[parent] if parent >= 0 else 0)
        return tuple(depths)

    @property
    def num_tokens(self) -> int:
        """Number t of tokens that go through the model."""
        return self.nodes.total

    @property
    def attended_pairs(self) -> int:
        """Number of query-key pairs of causal attention along the paths, over all tokens of the tree."""
        return sum(n * k - n * (n - 1) // 2 for n, k in zip(self.lengths, self.keys.lengths, strict=True))

    # ------------------------------------------------------------------ on a device

    def source(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """int64 [t]: position in the row of each token of the tree, in the first sample that has it."""
        return self._derived("source", device, lambda: self._source)

    def place(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """int64 [T]: position in the tree of each token of the row; `place[source]` is 0, 1, 2, ..."""
        return self._derived("place", device, lambda: self._place)

    def key_index(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """int64 [sum of `keys`]: positions in the tree of each node's keys, node by node."""
        return self._derived("key_index", device, lambda: self._along(range(len(self.lengths))))

    def predecessor(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """int64 [t]: position in the tree of the token before each token on its path; -1 for a root's first token."""
        return self._derived("predecessor", device, self._predecessor)

    def _derived(self, name: str, device: torch.device | str, make: Callable[[], np.ndarray]) -> torch.Tensor:
        return self.nodes.derived(("prefix tree", name), device, make)

    @cached_property
    def _place(self) -> np.ndarray:
        return self._along(self.leaves)

    @cached_property
    def _source(self) -> np.ndarray:
        source = np.empty(self.num_tokens, np.int64)
        row = np.arange(self.segments.total)
        source[self._place[::-1]] = row[::-1]  # reversed, so that the first sample wins
        return source

    def _along(self, nodes: Sequence[int]) -> np.ndarray:
        """Positions in the tree of all tokens on the path of each of these nodes."""
        steps = [step for node in nodes for step in self.path(node)]
        starts, lengths = np.asarray(self.nodes.stride, np.int64), np.asarray(self.lengths, np.int64)
        return ranges(starts[steps], lengths[steps])

    def _predecessor(self) -> np.ndarray:
        before = np.arange(self.num_tokens) - 1
        for (start, _), parent in zip(self.nodes.spans, self.parents, strict=True):
            before[start] = self.nodes.spans[parent][1] - 1 if parent >= 0 else -1
        return before

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the fields only; derived values are recomputed."""
        return {field.name: self.__dict__[field.name] for field in fields(self)}


def check_without_padding(segments: Segments) -> None:
    """Check that the row has no padding, no repeated boundaries and no empty samples.

    Raises:
        LayoutError: it has some.
    """
    if segments.has_padding or len(segments.lengths) != segments.num_samples:
        raise LayoutError(
            f"a row whose samples share prefixes has no padding, but this one has {segments.num_tokens} real tokens in "
            f"{segments.total}, {segments.num_samples} samples in {len(segments.lengths)} segments: what goes through "
            "the model is shorter than the row anyway; pack it with SlotRule(), or do not share"
        )
    if not min(segments.lengths):
        empty = segments.lengths.index(0)
        raise LayoutError(f"sample {empty} has no tokens, so it is no part of a tree; leave it out, or do not share")


# ---------------------------------------------------------------------- the compressed trie


@final
@dataclass(frozen=True, kw_only=True)
class CompressedTrie:
    """Nodes in depth-first order; siblings in the order of their first samples."""

    parents: list[int]
    """Parent of each node; -1 for a root."""
    lengths: list[int]
    """Number of symbols of each node."""
    leaves: list[int]
    """The node in which each sample ends."""


@final
@dataclass(frozen=True, kw_only=True)
class _Run:
    """Sorted samples [low, high); the path to `parent` has their first `start` symbols."""

    low: int
    high: int
    start: int = 0
    parent: int = -1


def compressed_trie(samples: Sequence[np.ndarray], groups: Sequence[Hashable], min_shared: int) -> CompressedTrie:
    """Build the compressed trie of samples by sorting, without recursion; samples of different groups share nothing.

        samples      a b c      a b d e f      a b d e g
        sorted       a b c
                     a b d e f      2 symbols shared with the line above
                     a b d e g      4
        trie         a b ─┬─ c
                          └─ d e ─┬─ f
                                  └─ g

    All samples of a sorted run share as many symbols as the least that two neighbors share. The run is split where
    neighbors share no more than that, and each piece becomes a child.

    A root with children and fewer than `min_shared` symbols is left out, and its symbols are repeated in each child.
    The same applies to other inner nodes, unless the repetitions would add up to at least `min_shared` symbols.

    Args:
        samples: symbols of each sample, int64 [any], at least one symbol.
        groups: the group of each sample.
        min_shared: at least 1; 1 keeps every node.
    """
    trie = CompressedTrie(parents=[], lengths=[], leaves=[-1] * len(samples))
    # sort by group, then by bytes: any order of symbols makes neighbors of samples with a shared prefix
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    keys = [(numbers[group], sample.tobytes()) for group, sample in zip(groups, samples, strict=True)]
    order = np.asarray(sorted(range(len(keys)), key=keys.__getitem__))
    lengths = np.asarray([len(samples[sample]) for sample in order])
    # number of first symbols that each sample shares with the one before it; -1 at the start of a group
    neighbors = [_num_alike(samples[a], samples[b]) if keys[a][0] == keys[b][0] else -1 for a, b in pairwise(order)]
    shared = np.asarray([-1, *neighbors])

    def pushed(runs: Iterable[_Run]) -> None:
        """Push runs so that they are popped in the order of their first samples."""
        stack.extend(sorted(runs, key=lambda run: -int(order[run.low : run.high].min())))

    def pieces_of(low: int, high: int, depth: int) -> list[tuple[int, int]]:
        """Split [low, high) where neighbors share no more than `depth` symbols."""
        return list(pairwise(sorted({low, *(np.flatnonzero(shared[low:high] == depth) + low).tolist(), high})))

    stack: list[_Run] = []
    pushed(_Run(low=low, high=high) for low, high in pieces_of(0, len(order), -1))
    while stack:
        run = stack.pop()
        depth = int(shared[run.low + 1 : run.high].min(initial=lengths[run.high - 1]))  # shared by all of the run
        ended = run.low + int(np.count_nonzero(lengths[run.low : run.high] == depth))  # the shortest are first
        start, node = run.start, run.parent
        pieces = pieces_of(ended, run.high, depth) if ended < run.high else []
        saved = (depth - start) * (run.high - run.low - 1) if run.parent >= 0 else 0
        if not pieces or max(depth - start, saved) >= min_shared:
            node = len(trie.parents)
            trie.parents.append(run.parent)
            trie.lengths.append(depth - start)
            for sample in order[run.low : ended].tolist():
                trie.leaves[sample] = node
            start = depth
        elif ended > run.low:
            pieces.append((run.low, ended))
        pushed(_Run(low=low, high=high, start=start, parent=node) for low, high in pieces)
    return trie


def _num_alike(sample: np.ndarray, other: np.ndarray) -> int:
    """Number of symbols before the first difference; the shorter length if there is none."""
    length = min(len(sample), len(other))
    differs = sample[:length] != other[:length]
    first = int(differs.argmax())
    return first if differs[first] else length
