"""The lower bound: never above what is possible, and often equal to it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from plan.naive import naive_fewest_bins, naive_lower_bound

from vlmpack.plan.exact_fill import lower_bound

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
