"""Exact fill: the best subset there is, rows full to the last token, never more rows than best fit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan.naive import Bins, naive_best_fit, naive_best_sum, naive_lower_bound

from benchmarks.cases.planning import LENGTH_SETS
from vlmpack.plan.exact_fill import (
    Stock,
    best_fit_decreasing,
    best_subset,
    exact_fill,
    lower_bound,
)

repeated = st.lists(st.sampled_from([2, 3, 3, 5, 8, 13]), max_size=24)


@given(lengths=st.lists(st.integers(1, 20), max_size=9) | repeated, room=st.integers(0, 60))
def test_no_subset_fills_the_room_better(lengths, room):
    chosen = best_subset(lengths, room)
    assert sum(lengths[index] for index in chosen) == naive_best_sum(lengths, room)
    assert chosen == sorted(set(chosen))


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


@pytest.mark.parametrize(
    ("lengths", "capacity", "fewer"),
    [
        (np.arange(44_000, 66_000, 8), 131_072, 0),  # two samples of about half a row leave a gap that nothing fits
        (np.random.default_rng(0).integers(1, 8_193, 5_000), 8_192, 0),
        (np.arange(2_000, 7_900), 16_384, 0.02),
        (np.tile(np.arange(2_600, 2_900), 10), 8_192, 0.06),  # long samples must meet short ones
    ],
)
def test_the_search_goes_on_only_where_it_saves_rows(monkeypatch, lengths, capacity, fewer):
    draws = []
    draw = Stock._draw
    monkeypatch.setattr(Stock, "_draw", lambda stock, room: draws.append(room) or draw(stock, room))
    rows = exact_fill(lengths, capacity).max() + 1
    best_fit = best_fit_decreasing(lengths, capacity).max() + 1
    assert rows <= (1 - fewer) * best_fit
    assert len(draws) < (len(lengths) if fewer else 512 + len(lengths) // 8)


@given(data=st.data(), capacity=st.sampled_from([13, 97]))
def test_the_bound_is_that_of_the_formula_threshold_by_threshold(data, capacity):
    sizes = st.integers(1, capacity) | st.integers(capacity // 3 + 1, 2 * capacity // 3)
    lengths = data.draw(st.lists(sizes, min_size=1, max_size=40))
    assert lower_bound(np.asarray(lengths), capacity) == naive_lower_bound(lengths, capacity)


@given(lengths=st.lists(st.integers(1, 97), min_size=1, max_size=200), unit=st.integers(1, 64), data=st.data())
def test_padded_samples_are_packed_as_if_their_units_were_tokens(lengths, unit, data):
    capacity = unit * 97 + data.draw(st.integers(0, unit - 1))
    sizes = np.asarray(lengths)
    assert (exact_fill(unit * sizes, capacity) == exact_fill(sizes, 97)).all()
    assert lower_bound(unit * sizes, capacity) == lower_bound(sizes, 97)


def test_the_search_does_not_start_where_samples_go_in_pairs(monkeypatch):
    monkeypatch.setattr(Stock, "_draw", None)
    for seed in range(20):
        lengths = np.random.default_rng(seed).integers(3_000, 8_000, 200)
        assert (exact_fill(lengths, 8_192) == best_fit_decreasing(lengths, 8_192)).all()


# ---------------------------------------------------------------------- against plain loops

WIDTH = 23
lengths_lists = st.lists(st.integers(1, WIDTH), min_size=1, max_size=60)
few_lengths = st.lists(st.sampled_from([1, 2, 3, 5, 7, 8, 11]), min_size=1, max_size=90)


def contents(bins: Bins, lengths: list[int]) -> list[list[int]]:
    """The lengths in each bin, in the order of the bins."""
    return [sorted(lengths[sample] for sample in samples) for samples in bins]


def bins_of(bin_of: np.ndarray) -> Bins:
    """The samples of each bin."""
    return [np.flatnonzero(bin_of == at).tolist() for at in range(int(bin_of.max()) + 1)]


@given(lengths=lengths_lists | few_lengths)
def test_bins_have_the_loads_that_a_plain_loop_gives(lengths):
    bins = bins_of(best_fit_decreasing(np.asarray(lengths), WIDTH))
    truth = naive_best_fit(lengths, WIDTH)
    assert sorted(sum(held) for held in contents(bins, lengths)) == sorted(map(sum, contents(truth, lengths)))
