"""The compressed trie of samples, which are sequences of symbols: built by sorting, without recursion.

    samples      a b c      a b d e f      a b d e g
    sorted       a b c
                 a b d e f      2 symbols shared with the line above
                 a b d e g      4
    trie         a b ─┬─ c
                      └─ d e ─┬─ f
                              └─ g

All samples of a sorted run share as many symbols as the least that two neighbors share. The run is split where
neighbors share no more than that, and each piece becomes a child.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import numpy as np


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
    """Build the compressed trie of samples; samples of different groups share nothing.

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
