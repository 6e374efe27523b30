"""Prefix trees: found and mapped as a plain walk along every sample does it."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layout.naive import naive_maps, naive_tree

from vlmpack.errors import LayoutError
from vlmpack.layout import PrefixTree, Segments, SlotRule
from vlmpack.layout.prefix_tree import compressed_trie


@st.composite
def texts(draw: st.DrawFn) -> list[list[int]]:
    """Samples of two symbols: some go on where another one ends, or is cut, some are its twins, some are strangers."""
    samples: list[list[int]] = []
    for _ in range(draw(st.integers(1, 9))):
        before = draw(st.sampled_from(samples)) if samples and draw(st.booleans()) else []
        kept = before[: draw(st.integers(0, len(before)))]
        more = draw(st.lists(st.integers(0, 1), min_size=0 if kept else 1, max_size=6))
        samples.append(kept + more)
    return samples


def tree_of(samples: list[list[int]], *, min_shared: int = 1) -> PrefixTree:
    trie = compressed_trie([np.asarray(sample, np.int64) for sample in samples], [0] * len(samples), min_shared)
    return PrefixTree(
        segments=Segments.from_lengths([len(sample) for sample in samples]),
        parents=tuple(trie.parents),
        lengths=tuple(trie.lengths),
        leaves=tuple(trie.leaves),
    )


DRAWN = PrefixTree(
    segments=Segments.from_lengths([2, 3, 3]), parents=(-1, 0, 0, 2, 2), lengths=(1,) * 5, leaves=(1, 3, 4)
)
"""The drawing in the module's docstring, with one token a node."""


@given(texts(), st.integers(1, 5))
def test_maps_are_those_of_a_walk(samples, min_shared):
    tree = tree_of(samples, min_shared=min_shared)
    truth = naive_maps(naive_tree(samples, min_shared=min_shared, groups=[0] * len(samples)), samples)
    assert tree.source().tolist() == truth.source
    assert tree.place().tolist() == truth.place
    assert tree.predecessor().tolist() == truth.predecessor
    assert tree.key_index().tolist() == [token for keys in truth.keys for token in keys]
    assert list(tree.keys.lengths) == [len(keys) for keys in truth.keys]
    assert tree.attended_pairs == truth.pairs
    assert tree.place()[tree.source()].tolist() == list(range(tree.num_tokens))


def test_a_chain_as_deep_as_the_row_is_long_needs_no_recursion():
    tree = tree_of([[0] * n for n in range(1, 1500)])
    assert tree.num_tokens == 1499
    assert max(tree.depths) == 1498


def test_what_is_derived_is_made_once_a_device_and_does_not_travel():
    assert DRAWN.source() is DRAWN.source()
    assert DRAWN.source("meta").device.type == "meta"
    travelled = pickle.loads(pickle.dumps(DRAWN))
    assert travelled == DRAWN
    assert hash(travelled) == hash(DRAWN)
    assert travelled.__dict__.keys() == {"segments", "parents", "lengths", "leaves", "kept"}
    assert torch.equal(travelled.place(), DRAWN.place())


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"parents": (-1, 0, 0, 1, 2)}, "node 3 comes after its parent 1, but not among its descendants"),
        ({"parents": (-1, 2, 0, 2, 2)}, "node 1 comes after its parent 2"),
        ({"parents": (), "lengths": ()}, "at least one node"),
        ({"lengths": (1, 1, 1, 1)}, "5 nodes need one length each"),
        ({"lengths": (1, 1, 1, 1, 0)}, "at least 1"),
        ({"leaves": (1, 3)}, "each of 3 samples ends in a node"),
        ({"leaves": (1, 3, 5)}, "each of 3 samples ends in a node"),
        ({"lengths": (1, 1, 1, 1, 2)}, r"sample 2 has 3 tokens, but the nodes of its path have 1 \+ 1 \+ 2"),
        ({"leaves": (1, 3, 3)}, "no sample goes through node 4"),
        (
            {"segments": Segments.from_lengths([2, 3, 3], SlotRule(row_multiple=3))},
            "has no padding.*8 real tokens in 9",
        ),
        ({"segments": Segments.from_lengths([2, 3, 3], SlotRule(max_segments=4))}, "3 samples in 4 segments"),
        ({"segments": Segments.from_lengths([2, 0, 3])}, "sample 1 has no tokens"),
    ],
)
def test_a_tree_that_is_none_is_refused(changes, fault):
    with pytest.raises(LayoutError, match=fault):
        replace(DRAWN, **changes)
