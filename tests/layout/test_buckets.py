"""Buckets: a row cut into right-padded batches of samples of like length, and put together again."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from layout.naive import naive_buckets, naive_cheapest

from vlmpack.layout import Segments, SlotRule
from vlmpack.layout.buckets import MAX_STRETCH, Buckets

WIDTH = 3
FREE, DEAR = 0.0, 1e9
"""What a call costs, in tokens: nothing, or more than any row holds."""
lengths_lists = st.lists(st.integers(0, 9), min_size=1, max_size=7).filter(sum)
rules = st.builds(SlotRule, multiple=st.integers(1, 5), row_multiple=st.sampled_from([1, 7]))
call_costs = st.sampled_from([FREE, 0.5, 2.0, 10.0, DEAR])


def random_row(segments, *, poison=0.0):
    """[1, T, D] float64, `poison` in gaps."""
    rng = torch.Generator().manual_seed(segments.total)
    row_1TD = torch.randn(1, segments.total, WIDTH, generator=rng, dtype=torch.float64)
    row_1TD[:, segments.padding_mask()] = poison
    return row_1TD.requires_grad_()


def members_of(buckets):
    return [bucket.members for bucket in buckets.buckets]


# ---------------------------------------------------------------------- there and back


@given(lengths=lengths_lists, rule=rules, call_cost=call_costs)
def test_split_is_what_plain_loops_over_samples_make(lengths, rule, call_cost):
    segments = Segments.from_lengths(lengths, rule)
    row_1TD = random_row(segments, poison=float("nan"))
    samples = [row_1TD[0, start:stop].tolist() for start, stop in segments.spans]
    buckets = Buckets.cheapest(segments, call_cost=call_cost)
    parts = buckets.split(row_1TD)
    assert [part.tolist() for part in parts] == naive_buckets(samples, members_of(buckets))


@given(lengths=lengths_lists, rule=rules, call_cost=call_costs)
def test_join_undoes_split_and_puts_zeros_on_padding(lengths, rule, call_cost):
    segments = Segments.from_lengths(lengths, rule)
    buckets = Buckets.cheapest(segments, call_cost=call_cost)
    row_1TD = random_row(segments, poison=float("nan"))
    back_1TD = buckets.join(buckets.split(row_1TD))
    real = ~segments.padding_mask()
    assert back_1TD.shape == row_1TD.shape
    assert torch.equal(back_1TD[:, real], row_1TD[:, real])
    assert (back_1TD[:, ~real] == 0).all()


@given(lengths=lengths_lists, rule=rules, call_cost=call_costs)
def test_gradients_go_the_same_way_back_and_none_to_padding(lengths, rule, call_cost):
    segments = Segments.from_lengths(lengths, rule)
    buckets = Buckets.cheapest(segments, call_cost=call_cost)
    row_1TD = random_row(segments, poison=float("nan"))
    out_1TD = buckets.join([part.sin() for part in buckets.split(row_1TD)])
    weights_1TD = torch.randn(out_1TD.shape, generator=torch.Generator().manual_seed(0), dtype=out_1TD.dtype)
    (out_1TD * weights_1TD).sum().backward()
    real = ~segments.padding_mask()
    torch.testing.assert_close(row_1TD.grad[:, real], (weights_1TD * row_1TD.detach().cos())[:, real])
    assert (row_1TD.grad[:, ~real] == 0).all()


@given(lengths=lengths_lists, call_cost=call_costs)
def test_each_sample_with_tokens_is_in_one_bucket(lengths, call_cost):
    buckets = Buckets.cheapest(Segments.from_lengths(lengths), call_cost=call_cost)
    assert sorted(i for members in members_of(buckets) for i in members) == [i for i, n in enumerate(lengths) if n]
    for bucket in buckets.buckets:
        assert bucket.width == max(lengths[i] for i in bucket.members)
        assert bucket.tokens == bucket.width * len(bucket.members)
    assert buckets.tokens == sum(bucket.tokens for bucket in buckets.buckets)


def test_many_samples_of_few_lengths_are_cut_in_as_many_steps_as_there_are_lengths(monkeypatch):
    steps = []
    least = np.argmin
    monkeypatch.setattr(np, "argmin", lambda costs: steps.append(len(costs)) or least(costs))
    buckets = Buckets.cheapest(Segments.from_lengths([2, 5, 3] * 700), call_cost=16.0)
    assert [(bucket.width, len(bucket.members)) for bucket in buckets.buckets] == [(2, 700), (3, 700), (5, 700)]
    assert steps == [1, 2, 3]


def test_the_example_of_the_docstring():
    segments = Segments.from_lengths([3, 5, 2, 5], SlotRule(multiple=4))
    buckets = Buckets.cheapest(segments, call_cost=DEAR)
    assert members_of(buckets) == [(2, 0), (1, 3)]
    row_1TD = torch.arange(segments.total)[None, :, None]
    assert [part.squeeze(-1).tolist() for part in buckets.split(row_1TD)] == [
        [[12, 13, 13], [0, 1, 2]],
        [[4, 5, 6, 7, 8], [16, 17, 18, 19, 20]],
    ]


def test_the_order_of_the_row_is_not_that_of_the_buckets():
    """Or the tests above would not notice a `join` that does not put samples back in their places."""
    segments = Segments.from_lengths([3, 5, 2, 5])
    buckets = Buckets.cheapest(segments, call_cost=DEAR)
    row_1TD = random_row(segments)
    laid_out = torch.cat([part.flatten(0, 1) for part in buckets.split(row_1TD)])
    assert len(laid_out) == 16 > segments.num_tokens
    assert not torch.equal(laid_out[:15], row_1TD[0])


def test_a_row_of_padding_alone_has_no_buckets():
    segments = Segments.from_boundaries([0, 0], [0, 8])
    buckets = Buckets.cheapest(segments, call_cost=16.0)
    assert buckets.buckets == ()
    assert buckets.tokens == 0
    assert buckets.split(torch.ones(1, segments.total, WIDTH)) == []


def test_samples_alone_are_slices_of_the_row_and_not_copies():
    segments = Segments.from_lengths([4, 2, 3])
    buckets = Buckets.cheapest(segments, call_cost=FREE)
    row_1TD = random_row(segments)
    parts = buckets.split(row_1TD)
    assert [part.data_ptr() for part in parts] == [row_1TD[:, start:].data_ptr() for start, _ in segments.spans]


# ---------------------------------------------------------------------- which cut


@given(
    lengths=st.lists(st.one_of(st.integers(1, 6), st.integers(1, 300)), min_size=1, max_size=6),
    call_cost=st.sampled_from([FREE, 1.0, 3.0, 16.0, 100.0, DEAR]),
)
def test_no_other_way_to_share_samples_out_costs_less(lengths, call_cost):
    buckets = Buckets.cheapest(Segments.from_lengths(lengths), call_cost=call_cost)
    cost = buckets.tokens + call_cost * len(buckets.buckets)
    assert cost == naive_cheapest(lengths, call_cost=call_cost, max_stretch=MAX_STRETCH)


def test_cutting_costs_something_and_so_does_not_cutting():
    """The guard of the test above: neither extreme is the answer."""
    segments = Segments.from_lengths([10, 10, 10, 40, 41, 42])
    cut = Buckets.cheapest(segments, call_cost=16.0)
    assert members_of(cut) == [(0, 1, 2), (3, 4, 5)]
    assert cut.tokens > segments.num_tokens


@given(lengths=lengths_lists)
def test_one_by_one_in_the_order_of_the_row_where_calls_are_free(lengths):
    buckets = Buckets.cheapest(Segments.from_lengths(lengths), call_cost=FREE)
    if len(set(lengths) - {0}) == sum(map(bool, lengths)):  # batches of equal lengths cost nothing either
        assert members_of(buckets) == [(i,) for i, n in enumerate(lengths) if n]
    assert buckets.tokens == sum(lengths)


@given(lengths=lengths_lists)
def test_the_dearer_a_call_the_fewer_there_are(lengths):
    segments = Segments.from_lengths(lengths)
    calls = [len(Buckets.cheapest(segments, call_cost=cost).buckets) for cost in (0.1, 1.0, 5.0, 20.0, DEAR)]
    assert calls == sorted(calls, reverse=True)


def test_samples_of_one_length_are_one_call_where_calls_are_dear():
    assert len(Buckets.cheapest(Segments.from_lengths([7] * 50), call_cost=DEAR).buckets) == 1


@given(lengths=st.lists(st.integers(1, 4096), min_size=1, max_size=64), call_cost=call_costs)
def test_no_bucket_computes_more_than_it_may_for_its_tokens(lengths, call_cost):
    for bucket in Buckets.cheapest(Segments.from_lengths(lengths), call_cost=call_cost).buckets:
        assert bucket.tokens <= MAX_STRETCH * sum(lengths[i] for i in bucket.members)


@given(
    lengths=st.integers(1, 400).flatmap(lambda n: st.lists(st.integers(n, 5 * n), min_size=1, max_size=64)),
    call_cost=st.sampled_from([FREE, 1.0, 16.0, 64.0, 256.0, 1024.0, 65536.0, DEAR]),
)
def test_lengths_of_5_to_1_waste_less_than_30_percent_whatever_a_call_costs(lengths, call_cost):
    buckets = Buckets.cheapest(Segments.from_lengths(lengths), call_cost=call_cost)
    assert buckets.tokens < 1.3 * sum(lengths)


def test_one_batch_of_lengths_of_5_to_1_would_waste_more():
    lengths = [128, 256, 384, 512, 640]
    assert len(lengths) * max(lengths) > 1.6 * sum(lengths)
    assert len(Buckets.cheapest(Segments.from_lengths(lengths), call_cost=DEAR).buckets) == 3
