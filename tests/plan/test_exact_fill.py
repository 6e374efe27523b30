"""Exact fill: the best subset there is, rows full to the last token, never more rows than best fit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan.naive import naive_best_sum, naive_fewest_bins, naive_lower_bound

from benchmarks.cases.planning import LENGTH_SETS
from vlmpack.plan.exact_fill import Stock, best_fit_decreasing, best_subset, exact_fill, lower_bound


@given(lengths=st.lists(st.integers(1, 20), max_size=9), room=st.integers(0, 60))
def test_no_subset_fills_the_room_better(lengths, room):
    chosen = best_subset(lengths, room)
    assert sum(lengths[index] for index in chosen) == naive_best_sum(lengths, room)
    assert chosen == sorted(set(chosen))


def test_earlier_lengths_are_preferred():
    assert best_subset([4, 3, 3, 4, 2, 1], 10) == [0, 1, 2]
    assert best_subset([5, 5, 5], 5) == [0]


@given(lengths=st.lists(st.integers(1, 97), min_size=1, max_size=200), capacity=st.integers(97, 400))
def test_it_needs_no_more_bins_than_best_fit_and_holds_the_capacity(lengths, capacity):
    sizes = np.asarray(lengths)
    bin_of = exact_fill(sizes, capacity)
    loads = np.bincount(bin_of, weights=sizes)
    assert 0 < loads.min() <= loads.max() <= capacity
    assert len(loads) <= best_fit_decreasing(sizes, capacity).max() + 1


def test_on_receipts_best_fit_wastes_a_row_in_seventy_and_exact_fill_next_to_none():
    receipts = LENGTH_SETS["CORD"]
    lengths = receipts.lengths(10_000)
    bound = lower_bound(lengths, receipts.capacity)
    assert exact_fill(lengths, receipts.capacity).max() + 1 == bound
    assert best_fit_decreasing(lengths, receipts.capacity).max() + 1 > 1.01 * bound


@pytest.mark.parametrize("name", LENGTH_SETS)
@pytest.mark.parametrize("scale", [0.6, 1.0, 2.0])
def test_at_any_capacity_it_needs_no_more_bins_than_best_fit(name, scale):
    lengths = LENGTH_SETS[name].lengths(3000, seed=5)
    capacity = max(int(LENGTH_SETS[name].capacity * scale), int(lengths.max()))
    assert exact_fill(lengths, capacity).max() <= best_fit_decreasing(lengths, capacity).max()


def test_where_hardly_any_row_can_be_filled_the_search_ends(monkeypatch):
    """Two samples of about half a row leave a gap that nothing fits; 8 draws for every length would be 22,000."""
    lengths = np.arange(44_000, 66_000, 8)
    draws = []
    draw = Stock.draw
    monkeypatch.setattr(Stock, "draw", lambda stock, room: draws.append(room) or draw(stock, room))
    assert exact_fill(lengths, 131_072).max() <= best_fit_decreasing(lengths, 131_072).max()
    assert 8 * 64 <= len(draws) < len(lengths)


CAPACITY = 13
few = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=7)


@given(lengths=st.lists(st.integers(1, CAPACITY), min_size=1, max_size=40))
def test_the_bound_is_that_of_the_formula_threshold_by_threshold(lengths):
    assert lower_bound(np.asarray(lengths), CAPACITY) == naive_lower_bound(lengths, CAPACITY)


@given(lengths=few)
def test_no_packing_at_all_needs_fewer_bins(lengths):
    assert lower_bound(np.asarray(lengths), CAPACITY) <= naive_fewest_bins(lengths, CAPACITY)


def test_long_samples_that_cannot_share_count_one_by_one():
    assert lower_bound(np.asarray([7, 7, 7]), CAPACITY) == 3  # by tokens alone two bins would do


def test_things_that_need_nothing_need_no_bin():
    assert lower_bound(np.asarray([0, 0, 5, 8]), CAPACITY) == 1
    assert lower_bound(np.asarray([0, 0]), CAPACITY) == 0
