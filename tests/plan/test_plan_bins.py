"""plan_bins: nothing is lost, nothing is too full, order is kept where promised, and bad input is named."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cases.planning import LENGTH_SETS
from vlmpack.errors import ConfigError, SampleError
from vlmpack.plan import Budget, plan_bins
from vlmpack.plan.plan import STRATEGIES

CAPACITY = 31
lengths_lists = st.lists(st.integers(1, 40), min_size=1, max_size=60)
seeds = st.none() | st.integers(0, 5)


@given(
    lengths=lengths_lists,
    strategy=st.sampled_from([*STRATEGIES]),
    overlength=st.sampled_from(["drop", "own_row"]),
    seed=seeds,
)
def test_every_sample_is_in_one_row_or_dropped_and_no_row_is_too_full(lengths, strategy, overlength, seed):
    plan = plan_bins(lengths, CAPACITY, strategy=strategy, overlength=overlength, seed=seed)
    planned = [sample for row in plan.bins for sample in row]
    too_long = [sample for sample, n in enumerate(lengths) if n > CAPACITY]
    assert sorted([*planned, *plan.dropped.tolist()]) == list(range(len(lengths)))
    assert plan.dropped.tolist() == (too_long if overlength == "drop" else [])
    for row in plan.bins:
        assert row
        assert sum(lengths[sample] for sample in row) <= CAPACITY or (len(row) == 1 and overlength == "own_row")


@given(lengths=st.lists(st.integers(1, CAPACITY), min_size=1, max_size=60))
def test_without_a_seed_samples_rise_within_a_row_and_rows_come_in_the_order_of_their_first(lengths):
    for strategy in STRATEGIES:
        bins = plan_bins(lengths, CAPACITY, strategy=strategy).bins
        assert all(row == tuple(sorted(row)) for row in bins)
        assert [row[0] for row in bins] == sorted(row[0] for row in bins)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_seed_gives_the_same_plan_again_and_another_seed_another(strategy):
    lengths = LENGTH_SETS["CORD"].lengths(500)
    first, again, other = (plan_bins(lengths, 4096, strategy=strategy, seed=seed) for seed in (7, 7, 8))
    assert first == again
    assert first != other
    assert first != plan_bins(lengths, 4096, strategy=strategy)


@pytest.mark.parametrize("name", LENGTH_SETS)
def test_the_default_needs_no_more_rows_than_any_other_strategy(name):
    lengths, capacity = LENGTH_SETS[name].lengths(5000, seed=2), LENGTH_SETS[name].capacity
    rows = {strategy: len(plan_bins(lengths, capacity, strategy=strategy)) for strategy in STRATEGIES}
    assert len(plan_bins(lengths, capacity)) == min(rows.values())


def test_a_sample_that_is_too_long_stops_the_plan_and_all_of_them_are_listed():
    with pytest.raises(
        SampleError, match=r"sample 1: does not fit a row of 31 tokens\. 2 of 4 .*: 1 \(32.*3 \(99"
    ) as caught:
        plan_bins([5, 32, 31, 99], CAPACITY)
    assert caught.value.index == 1
    assert caught.value.reason == "overlength"


@pytest.mark.parametrize(
    ("lengths", "message", "reason"),
    [
        ([3, 0, 4], r"sample 1: has length 0; a sample needs at least one token", "empty"),
        ([3, 4, -2], r"sample 2: has length -2", "empty"),
        ([3.0, float("nan")], r"sample 1: .* is not finite: nan", "not_finite"),
        ([float("inf"), 3.0], r"sample 0: .* is not finite: inf", "not_finite"),
        ([3.0, 2.5], r"sample 1: .* is not a whole number: 2\.5", "not_whole"),
        ([3, 2**31], r"sample 1: .* is above 2147483647: 2147483648", "too_large"),
    ],
)
def test_a_length_that_makes_no_sense_names_its_sample(lengths, message, reason):
    with pytest.raises(SampleError, match=message) as caught:
        plan_bins(lengths, CAPACITY)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "the list of lengths is empty"),
        ([[3, 4]], r"got 2 dimensions of int64"),
        ([[3], [4, 5]], "the length of a sample must be one whole number: .*inhomogeneous"),
        (["a", "b"], "expected a vector of integers"),
        ((n for n in [3, 4]), "expected a list or vector of integers, got a generator"),
        (None, "expected a list or vector of integers, got a NoneType"),
        (np.array(5), r"expected a list or vector of integers, got a ndarray \(len\(\) of unsized object\)"),
        ([True, False], "expected a vector of integers"),
    ],
)
def test_lengths_are_a_vector_of_numbers(lengths, message):
    with pytest.raises(ConfigError, match=message):
        plan_bins(lengths, CAPACITY)


@pytest.mark.parametrize("capacity", [0, -5, 2**31, 3.5, float("nan"), True, None])
def test_a_capacity_is_a_whole_number_of_at_least_1(capacity):
    with pytest.raises(ConfigError, match="the capacity of a row must"):
        plan_bins([1], capacity)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": None}, "strategy must be one of exact_fill, "),
        ({"strategy": "best"}, "strategy must be one of exact_fill, .*, got 'best'"),
        ({"overlength": "truncate"}, r"overlength='truncate': rows are planned from lengths"),
        ({"seed": -1}, r"the seed must be a whole number of at least 0"),
        ({"seed": 1.5}, r"the seed must be a whole number of at least 0"),
    ],
)
def test_a_setting_that_does_not_exist_lists_those_that_do(settings, message):
    with pytest.raises(ConfigError, match=message):
        plan_bins([1, 2], CAPACITY, **settings)


def test_budgets_are_checked_against_the_samples_and_the_strategy():
    patches = Budget(name="patches", costs=np.asarray([1, 2]), limit=4)
    with pytest.raises(ConfigError, match="'patches' has costs of 2 samples, not of 3"):
        plan_bins([1, 2, 3], CAPACITY, budgets=[patches])
    with pytest.raises(ConfigError, match="best_fit_decreasing packs by tokens only, not by patches; choose exact"):
        plan_bins([1, 2], CAPACITY, budgets=[patches], strategy="best_fit_decreasing")
    with pytest.raises(ConfigError, match="two budgets have the same name: patches, patches"):
        plan_bins([1, 2], CAPACITY, budgets=[patches, patches])
    with pytest.raises(SampleError, match="sample 1: the patches of a sample are negative: -2"):
        Budget(name="patches", costs=np.asarray([1, -2]), limit=4)
    with pytest.raises(ConfigError, match="the limit of budget 'patches' must be a whole number from"):
        Budget(name="patches", costs=np.asarray([1, 2]), limit=0)
