"""Rows and trees laid out for recurrent layers: there and back, and each sample computed as if it were alone."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from layout.naive import naive_cheapest

from vlmpack.layout import Segments, SlotRule
from vlmpack.model.mechanisms.recurrent_rows import MAX_OVERHEAD, Buckets, VarlenCalls

WIDTH = 3
FREE, DEAR = 0.0, 1e9
"""What a call costs, in tokens: nothing, or more than any row holds."""
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


@given(
    segments=rows,
    lay_out=st.one_of(
        call_costs.map(lambda cost: lambda segments: Buckets.cheapest(segments, call_cost=cost)),
        tap_counts.map(lambda taps: lambda segments: VarlenCalls.of(segments, taps).levels[0]),
    ),
)
def test_join_undoes_split_and_gradients_go_the_same_way_back(segments, lay_out):
    laid, row_1TD = lay_out(segments), random_row(segments)
    assert torch.equal(laid.join(laid.split(row_1TD)), row_1TD)
    out_1TD = laid.join([part.sin() for part in laid.split(row_1TD)])
    weights_1TD = torch.randn(out_1TD.shape, generator=torch.Generator().manual_seed(0), dtype=out_1TD.dtype)
    (out_1TD * weights_1TD).sum().backward()
    torch.testing.assert_close(row_1TD.grad, weights_1TD * row_1TD.detach().cos())


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
