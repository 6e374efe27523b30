"""The picture of a prefix tree: every node once, behind its parent and among its branches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vlmpack.errors import LayoutError
from vlmpack.layout import PackedRow, PrefixTree, Segments
from vlmpack.plots import plot_tree, save
from vlmpack.plots.trees import branches_of

LENGTHS = (9, 12, 10, 5)
TREE = PrefixTree(
    segments=Segments.from_lengths(LENGTHS),
    parents=(-1, 0, 0, 2, -1),
    lengths=(6, 3, 4, 2, 5),
    leaves=(1, 3, 2, 4),
    images=(0,),
    videos=(),
)
"""Samples P A, P B C, P B and Q; P has an image of 4 tokens."""
TYPES = np.zeros(sum(LENGTHS), np.int64)
for start in (0, 9, 21):
    TYPES[start + 2 : start + 6] = 1


def row_of(tree: PrefixTree | None) -> PackedRow:
    ids = torch.ones(1, sum(LENGTHS), dtype=torch.long)
    types = torch.from_numpy(TYPES)[None]
    return PackedRow(input_ids=ids, segments=Segments.from_lengths(LENGTHS), mm_token_type_ids=types, tree=tree)


def test_a_node_stands_behind_its_parent_and_in_the_middle_of_its_branches() -> None:
    nodes = branches_of(TREE, TYPES)
    assert [(node.start, node.stop) for node in nodes] == [(0, 6), (6, 9), (6, 10), (10, 12), (0, 5)]
    assert [node.line for node in nodes] == [0.5, 0.0, 1.0, 1.0, 2.0]
    assert [node.samples for node in nodes] == [(0, 1, 2), (0,), (1, 2), (1,), (3,)]
    assert [node.ends for node in nodes] == [(), (0,), (2,), (1,), (3,)]
    assert nodes[0].media == ((0, 2, False), (2, 6, True))


def test_bars_have_the_length_of_what_is_computed() -> None:
    nodes = branches_of(TREE, TYPES)
    assert sum(stop - start for node in nodes for start, stop, _ in node.media) == TREE.num_tokens == 20


def test_its_head_has_the_tokens_and_each_sample_its_number(tmp_path) -> None:
    figure = plot_tree(row_of(TREE), title="mine")
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "Prefix tree: 44% shared"
    assert axes.get_title(loc="right") == "4 samples of 36 tokens  =  20 tokens computed"
    assert sorted(text.get_text() for text in axes.texts) == ["0", "1", "2", "2 ×", "3", "3 ×"]
    assert save(figure, tmp_path / "tree.png", dpi=40).stat().st_size > 1000


def test_a_row_without_a_tree_is_refused() -> None:
    with pytest.raises(LayoutError, match="the row has no tree: its samples share nothing"):
        plot_tree(row_of(None))
