"""Rows and trees laid out for recurrent layers: there and back, and each sample computed as if it were alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from layout.naive import naive_cheapest

from vlmpack.layout import PrefixTree, Segments, SlotRule
from vlmpack.model.mechanisms.recurrent_rows import MAX_OVERHEAD, Buckets, ConvLayout

WIDTH = 3
FREE, DEAR = 0.0, 1e9
"""What a call costs, in tokens: nothing, or more than any row holds."""
lengths_lists = st.lists(st.integers(0, 9), min_size=1, max_size=7).filter(sum)
call_costs = st.sampled_from([FREE, 0.5, 2.0, 10.0, DEAR])
rows = st.builds(
    lambda lengths, tail: Segments.from_lengths(lengths, SlotRule(row_multiple=tail)).without_gaps(),
    st.lists(st.integers(0, 11), min_size=1, max_size=6).filter(sum),
    st.integers(1, 9),
)
tap_counts = st.integers(0, 4)


def random_row(segments, *, channels=WIDTH):
    """[1, T, D] float64."""
    rng = torch.Generator().manual_seed(segments.total)
    return torch.randn(1, segments.total, channels, generator=rng, dtype=torch.float64).requires_grad_()


# ---------------------------------------------------------------------- there and back


@given(
    segments=rows,
    lay_out=st.one_of(
        call_costs.map(lambda cost: lambda segments: Buckets.cheapest(segments, call_cost=cost)),
        tap_counts.map(lambda taps: lambda segments: ConvLayout.every(segments, taps)),
    ),
)
def test_join_undoes_split_and_gradients_go_the_same_way_back(segments, lay_out):
    laid, row_1TD = lay_out(segments), random_row(segments)
    assert torch.equal(laid.join(laid.split(row_1TD)), row_1TD)
    out_1TD = laid.join([part.sin() for part in laid.split(row_1TD)])
    weights_1TD = torch.randn(out_1TD.shape, generator=torch.Generator().manual_seed(0), dtype=out_1TD.dtype)
    (out_1TD * weights_1TD).sum().backward()
    torch.testing.assert_close(row_1TD.grad, weights_1TD * row_1TD.detach().cos())


# ---------------------------------------------------------------------- which cut


@given(
    lengths=st.lists(st.one_of(st.integers(1, 6), st.integers(1, 300)), min_size=1, max_size=6),
    call_cost=st.sampled_from([FREE, 1.0, 3.0, 16.0, 100.0, DEAR]),
)
def test_no_other_way_to_share_samples_out_costs_less(lengths, call_cost):
    buckets = Buckets.cheapest(Segments.from_lengths(lengths), call_cost=call_cost)
    cost = buckets.tokens + call_cost * len(buckets.buckets)
    assert cost == naive_cheapest(lengths, call_cost=call_cost, max_stretch=MAX_OVERHEAD)


def test_cutting_costs_something_and_so_does_not_cutting():
    """The guard of the test above: neither extreme is the answer."""
    segments = Segments.from_lengths([10, 10, 10, 40, 41, 42])
    cut = Buckets.cheapest(segments, call_cost=16.0)
    assert [bucket.members for bucket in cut.buckets] == [(0, 1, 2), (3, 4, 5)]
    assert cut.tokens > segments.num_tokens


@given(
    lengths=st.integers(1, 400).flatmap(lambda n: st.lists(st.integers(n, 5 * n), min_size=1, max_size=64)),
    call_cost=st.sampled_from([FREE, 1.0, 16.0, 64.0, 256.0, 1024.0, 65536.0, DEAR]),
)
def test_lengths_of_5_to_1_waste_less_than_30_percent_whatever_a_call_costs(lengths, call_cost):
    buckets = Buckets.cheapest(Segments.from_lengths(lengths), call_cost=call_cost)
    assert buckets.tokens < 1.3 * sum(lengths)


# ---------------------------------------------------------------------- one call for all

CHANNELS = 7


def of_segments(row: torch.Tensor, segments: Segments) -> list[torch.Tensor]:
    """[L, D] of each segment that has tokens."""
    return [row[0, start:stop] for start, stop in segments.spans if stop > start]


def convolved(x_1TD: torch.Tensor, width: int) -> torch.Tensor:
    """A causal convolution, zeros before the first token."""
    weight = torch.linspace(1, 2, CHANNELS * width, dtype=torch.float64).view(CHANNELS, 1, width)
    return F.conv1d(F.pad(x_1TD.transpose(1, 2), (width - 1, 0)), weight, groups=CHANNELS).transpose(1, 2)


@given(segments=rows, width=st.integers(1, 5))
def test_a_convolution_over_all_of_it_is_that_of_each_segment_alone(segments, width):
    row = random_row(segments, channels=CHANNELS)
    layout = ConvLayout.every(segments, width - 1)
    out = layout.join([convolved(part, width) for part in layout.split(row)])
    for packed, segment in zip(of_segments(out, segments), of_segments(row, segments), strict=True):
        torch.testing.assert_close(packed, convolved(segment[None], width)[0])


def test_one_zero_too_few_lets_the_convolution_reach_over():
    segments = Segments.from_lengths([5, 4])
    row = random_row(segments, channels=CHANNELS)
    short = ConvLayout.every(segments, 2)
    out = short.join([convolved(part, 4) for part in short.split(row)])
    assert (out[:, 5] - convolved(row[:, 5:], 4)[:, 0]).abs().max() > 0.01


# ---------------------------------------------------------------------- trees


@st.composite
def trees(draw: st.DrawFn) -> PrefixTree:
    """Nodes of 1 to 6 tokens, each a root or a child of one on the path to the node before it."""
    parents, path = [-1], [0]
    for node in range(1, draw(st.integers(1, 9))):
        path = path[: draw(st.integers(0, len(path)))]
        parents.append(path[-1] if path else -1)
        path.append(node)
    lengths = draw(st.lists(st.integers(1, 6), min_size=len(parents), max_size=len(parents)))
    leaves = [node for node in range(len(parents)) if node not in parents]
    return tree_of(parents, lengths, leaves)


def tree_of(parents: Sequence[int], lengths: Sequence[int], leaves: Sequence[int]) -> PrefixTree:
    totals: list[int] = []
    for parent, length in zip(parents, lengths, strict=True):
        totals.append(length + (totals[parent] if parent >= 0 else 0))
    samples = Segments.from_lengths([totals[leaf] for leaf in leaves])
    return PrefixTree(segments=samples, parents=tuple(parents), lengths=tuple(lengths), leaves=tuple(leaves))


def tokens_of(tree: PrefixTree) -> torch.Tensor:
    return torch.randn(1, tree.num_tokens, CHANNELS, dtype=torch.float64)


def path_of(tree: PrefixTree, node: int, tokens: torch.Tensor) -> torch.Tensor:
    """[1, L, D]: the tokens from the root to the end of `node`."""
    return torch.cat([tokens[:, slice(*tree.nodes.spans[step])] for step in tree.path(node)], 1)


@given(tree=trees(), width=st.integers(1, 5))
def test_a_convolution_of_every_node_is_that_of_its_path(tree, width):
    nodes, tokens = ConvLayout.every(tree.nodes, width - 1, tree), tokens_of(tree)
    out = nodes.join([convolved(part, width)[:, : nodes.tokens] for part in nodes.split(tokens)])
    for node, (start, stop) in enumerate(tree.nodes.spans):
        alone = convolved(path_of(tree, node, tokens), width)[:, start - stop :]
        torch.testing.assert_close(out[:, start:stop], alone)
