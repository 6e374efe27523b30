"""Placing the longest first, and next fit: the bins are those of the plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan.naive import (
    Bins,
    naive_best_fit,
    naive_decreasing,
    naive_first_fit,
    naive_next_fit,
    naive_worst_fit,
)

from vlmpack.plan.exact_fill import (
    best_fit_decreasing,
    first_fit_decreasing,
    longest_first,
    next_fit,
    worst_fit_decreasing,
)

CAPACITY = 23
lengths_lists = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=60)
few_lengths = st.lists(st.sampled_from([1, 2, 3, 5, 7, 8, 11]), min_size=1, max_size=90)

TWINS = {
    best_fit_decreasing: naive_best_fit,
    first_fit_decreasing: naive_first_fit,
    worst_fit_decreasing: naive_worst_fit,
}


def contents(bins: Bins, lengths: list[int]) -> list[list[int]]:
    """The lengths in each bin, in the order of the bins."""
    return [sorted(lengths[sample] for sample in samples) for samples in bins]


def bins_of(bin_of: np.ndarray) -> Bins:
    """The samples of each bin."""
    return [np.flatnonzero(bin_of == at).tolist() for at in range(int(bin_of.max()) + 1)]


@pytest.mark.parametrize("place", TWINS, ids=lambda place: place.__name__)
@given(lengths=lengths_lists | few_lengths)
def test_bins_have_the_loads_that_a_plain_loop_gives(place, lengths):
    bins = bins_of(place(np.asarray(lengths), CAPACITY))
    truth = TWINS[place](lengths, CAPACITY)
    assert sorted(sum(held) for held in contents(bins, lengths)) == sorted(map(sum, contents(truth, lengths)))


@given(lengths=lengths_lists | few_lengths)
def test_first_fit_fills_the_very_bins_of_the_plain_loop(lengths):
    bins = bins_of(first_fit_decreasing(np.asarray(lengths), CAPACITY))
    assert contents(bins, lengths) == contents(naive_first_fit(lengths, CAPACITY), lengths)


@given(lengths=lengths_lists)
def test_next_fit_cuts_where_the_plain_loop_cuts(lengths):
    assert bins_of(next_fit(np.asarray(lengths), CAPACITY)) == naive_next_fit(lengths, CAPACITY)


def test_the_three_choices_give_three_packings_so_that_a_mixed_up_one_would_show():
    lengths = [7, 5, 4, 11, 5, 4, 10, 1]
    loads = [sorted(np.bincount(place(np.asarray(lengths), 14), weights=lengths).tolist()) for place in TWINS]
    assert loads == [[9, 11, 13, 14], [9, 12, 12, 14], [11, 11, 12, 13]]


def test_the_twin_comparison_can_fail():
    lengths = [6, 5, 4, 3, 2]
    worst = naive_decreasing(lengths, 10, max)
    assert contents(bins_of(best_fit_decreasing(np.asarray(lengths), 10)), lengths) != contents(worst, lengths)


def test_a_thousand_samples_of_one_length_fill_bins_evenly():
    loads = np.bincount(best_fit_decreasing(np.full(1000, 7), 23))
    assert loads.tolist() == [3] * 333 + [1]


def test_worst_fit_keeps_rows_more_alike_than_best_fit():
    lengths = np.random.default_rng(3).integers(1, 400, 3000)
    loads = {place: np.bincount(place(lengths, 1000), weights=lengths) for place in TWINS}
    assert loads[worst_fit_decreasing].std() < loads[best_fit_decreasing].std()


@given(lengths=lengths_lists)
def test_falling_sorts_and_keeps_equal_lengths_in_order(lengths):
    order = longest_first(np.asarray(lengths)).tolist()
    assert order == sorted(range(len(lengths)), key=lambda sample: (-lengths[sample], sample))
