"""Placing the longest first, and next fit: the bins are those of the plain loops."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from plan.naive import Bins, naive_best_fit, naive_decreasing, naive_next_fit

from vlmpack.plan.exact_fill import best_fit_decreasing, longest_first, next_fit

CAPACITY = 23
lengths_lists = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=60)
few_lengths = st.lists(st.sampled_from([1, 2, 3, 5, 7, 8, 11]), min_size=1, max_size=90)


def contents(bins: Bins, lengths: list[int]) -> list[list[int]]:
    """The lengths in each bin, in the order of the bins."""
    return [sorted(lengths[sample] for sample in samples) for samples in bins]


def bins_of(bin_of: np.ndarray) -> Bins:
    """The samples of each bin."""
    return [np.flatnonzero(bin_of == at).tolist() for at in range(int(bin_of.max()) + 1)]


@given(lengths=lengths_lists | few_lengths)
def test_bins_have_the_loads_that_a_plain_loop_gives(lengths):
    bins = bins_of(best_fit_decreasing(np.asarray(lengths), CAPACITY))
    truth = naive_best_fit(lengths, CAPACITY)
    assert sorted(sum(held) for held in contents(bins, lengths)) == sorted(map(sum, contents(truth, lengths)))


@given(lengths=lengths_lists)
def test_next_fit_cuts_where_the_plain_loop_cuts(lengths):
    assert bins_of(next_fit(np.asarray(lengths), CAPACITY)) == naive_next_fit(lengths, CAPACITY)


def test_the_twin_comparison_can_fail():
    lengths = [6, 5, 4, 3, 2]
    worst = naive_decreasing(lengths, 10, max)
    assert contents(bins_of(best_fit_decreasing(np.asarray(lengths), 10)), lengths) != contents(worst, lengths)


def test_a_thousand_samples_of_one_length_fill_bins_evenly():
    loads = np.bincount(best_fit_decreasing(np.full(1000, 7), 23))
    assert loads.tolist() == [3] * 333 + [1]


@given(lengths=lengths_lists)
def test_falling_sorts_and_keeps_equal_lengths_in_order(lengths):
    order = longest_first(np.asarray(lengths)).tolist()
    assert order == sorted(range(len(lengths)), key=lambda sample: (-lengths[sample], sample))
