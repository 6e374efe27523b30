"""Marks of prefixes: hashes of what samples begin with, from which groups are found without keeping their tokens.

    symbols    a b c d I I I e f g h            token ids; I: a number of the content of an image
    ends           3       7   9                some places: every few tokens, after media, around what is learnt
    hashes       abc  ..IIIe ..fg               of all symbols before each end

Samples that have a hash in common begin with the same symbols. A prefix is found to its last token where it ends beside
a medium or a turn, and else to within 16 tokens or 1/16 of its length, never beyond its end.
N samples, M marks in all, K groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vlmpack.plan.prefix_groups import ALONE, NOTHING, PrefixGroups

FINEST = 16
"""Tokens between two marks, in prefixes of less than 512 tokens ..."""
OCTAVE = 32
"""... and how many marks there are from each power of two to the next, in longer ones."""
LONGEST = 2**31


def _regular_ends() -> np.ndarray:
    ends = [FINEST]
    while ends[-1] < LONGEST:
        ends.append(ends[-1] + _spacing(ends[-1]))
    return np.array(ends)


def _spacing(end: int) -> int:
    return max(FINEST, (1 << end.bit_length() - 1) // OCTAVE)


REGULAR = _regular_ends()
"""Ends that every sample has, as far as it goes."""


class PrefixMarks(NamedTuple):
    """Marks of one sample."""

    ends: np.ndarray
    """int64 [m]: tokens before each mark, rising."""
    hashes: np.ndarray
    """int64 [m]: of the symbols before it."""
    media_ends: np.ndarray
    """int64 [v]: where each image and video ends, rising."""
    media_patches: np.ndarray
    """int64 [v]: patches of each."""

    @classmethod
    def of(
        cls, symbols: np.ndarray, turn_ends: np.ndarray, media_ends: np.ndarray, media_patches: np.ndarray
    ) -> PrefixMarks:
        """Mark a sample.

        Args:
            symbols: int64 [n]: token ids; in the place of each placeholder, a number of its medium's content.
            turn_ends: int64 [any] in 0 to n: where something begins or ends that many samples may share.
            media_ends: int64 [v] in 1 to n, rising.
            media_patches: int64 [v].
        """
        n = len(symbols)
        regular = REGULAR[: int(np.searchsorted(REGULAR, n, side="right"))]
        ends = np.unique(np.concatenate([regular, turn_ends, media_ends, [n]]))
        ends = ends[ends > 0]
        return cls(ends, prefix_hashes(symbols)[ends - 1], media_ends, media_patches)

    def to_bytes(self) -> bytes:
        """Return all four columns as bytes."""
        return np.concatenate([[len(self.media_ends)], *self[2:], *self[:2]]).astype("<i8").tobytes()

    @classmethod
    def from_bytes(cls, content: bytes) -> PrefixMarks:
        """Read what `to_bytes` made."""
        values = np.frombuffer(content, "<i8").astype(np.int64)
        media = int(values[0])
        media_ends, media_patches = np.split(values[1 : 1 + 2 * media], 2)
        ends, hashes = np.split(values[1 + 2 * media :], 2)
        return cls(ends, hashes, media_ends, media_patches)


def prefix_hashes(symbols: np.ndarray) -> np.ndarray:
    """int64 [n]: a hash of the first 1, 2, ... symbols: the sum of what splitmix64 makes of each symbol and place.

    Args:
        symbols: int64 [n].
    """
    places = np.arange(1, len(symbols) + 1, dtype=np.uint64)
    return np.cumsum(_mixed(_mixed(symbols.astype(np.uint64)) + places)).view(np.int64)


def _mixed(values: np.ndarray) -> np.ndarray:
    """uint64 [n]: Vigna's splitmix64, which wraps around."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


# ---------------------------------------------------------------------- from marks to groups


def groups_of_marks(samples: Sequence[PrefixMarks], *, min_shared: int) -> PrefixGroups:
    """Find the groups of N samples.

    A group in another one begins where two samples of the outer one go different ways, and goes on for at least
    `min_shared` tokens, and as many more as the end of the outer one is uncertain by: the tree of a row shares as much.

    Args:
        samples: marks of each.
        min_shared: tokens of the shortest prefix that is worth sharing, counted from the end of the one before it.
    """
    counts = np.array([len(marks.ends) for marks in samples], np.int64)
    sample = np.repeat(np.arange(len(samples)), counts)
    ends = np.concatenate([NOTHING, *(marks.ends for marks in samples)])
    _, first, node, times = np.unique(
        np.concatenate([NOTHING, *(marks.hashes for marks in samples)]),
        return_index=True,
        return_inverse=True,
        return_counts=True,
    )
    node = node.reshape(-1)
    is_shared = (times[node] > 1) & (ends >= min_shared)
    sample, node = sample[is_shared], node[is_shared]
    used = np.unique(node)
    number = np.full(len(first), ALONE)
    number[used] = np.arange(len(used))
    parents, of_samples = _chains(sample, number[node], len(samples), len(used))
    tokens = ends[first[used]]
    holder = np.repeat(np.arange(len(samples)), counts)[first[used]]
    order = np.lexsort((tokens, holder))  # by first sample; a parent before its children
    parents, of_samples, kept = _branching(parents, of_samples, tokens, order.tolist(), min_shared)
    patches, images = _media(samples, holder[kept], tokens[kept])
    return PrefixGroups(of_samples=of_samples, parents=parents, tokens=tokens[kept], patches=patches, images=images)


def _chains(sample: np.ndarray, node: np.ndarray, samples: int, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """(parent of each node, last node of each sample): a sample's nodes are a chain, its marks rise.

    Args:
        sample: int64 [M'] of each shared mark, rising.
        node: int64 [M'].
        samples: N.
        nodes: how many there are.
    """
    begins = np.diff(sample, prepend=-1) > 0
    before = np.where(begins, ALONE, np.concatenate([[ALONE], node[:-1]])[: len(node)])
    parents = np.full(nodes, ALONE)
    parents[node[::-1]] = before[::-1]  # of the first sample that has the node
    of_samples = np.full(samples, ALONE)
    of_samples[sample] = node  # the last of its marks
    return parents, of_samples


def _branching(
    parents: np.ndarray, of_samples: np.ndarray, tokens: np.ndarray, order: Sequence[int], min_shared: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(parents, of_samples, kept): nodes where samples end or go different ways, and that are long enough.

    Returns:
        Parents int64 [K] and groups of samples int64 [N] by their new numbers, and int64 [K] nodes of `parents`.
    """
    children = np.bincount(parents[parents >= 0], minlength=len(parents))
    ends = np.bincount(of_samples[of_samples >= 0], minlength=len(parents))
    splits = ((children > 1) | (ends > 0)).tolist()
    around, kept = np.full(len(parents), ALONE), []
    """The nearest node that is kept, itself included."""
    of_parent, lengths = parents.tolist(), tokens.tolist()
    for node in order:
        outer = int(around[of_parent[node]]) if of_parent[node] >= 0 else ALONE
        start = lengths[outer] if outer >= 0 else 0
        least = min_shared + (_spacing(start) if outer >= 0 else 0)
        is_kept = splits[node] and lengths[node] - start >= least
        around[node] = node if is_kept else outer
        kept += [node] * is_kept
    return _numbered(parents, of_samples, around, np.array(kept, np.int64))


def _numbered(
    parents: np.ndarray, of_samples: np.ndarray, around: np.ndarray, kept: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    number = np.full(len(parents) + 1, ALONE)  # the last one: of no node
    number[kept] = np.arange(len(kept))
    nearest = np.append(around, ALONE)
    return number[nearest[parents[kept]]], number[nearest[of_samples]], kept


def _media(samples: Sequence[PrefixMarks], holders: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(patches, images): of the media in prefixes of so many tokens, each of a sample that has it."""
    patches, images = np.zeros((2, len(tokens)), np.int64)
    for at, (holder, end) in enumerate(zip(holders.tolist(), tokens.tolist(), strict=True)):
        marks = samples[holder]
        images[at] = np.searchsorted(marks.media_ends, end, side="right")
        patches[at] = marks.media_patches[: images[at]].sum()
    return patches, images
