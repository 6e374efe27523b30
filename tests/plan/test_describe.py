"""Few numbers for many: percentiles, and bins that a few long samples do not spoil."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmpack.plan.length_table import HistogramBin, Summary, histogram, summary


def test_a_summary() -> None:
    assert summary(np.arange(101)) == Summary(mean=50.0, median=50.0, p95=95.0, p99=99.0, max=100, total=5050)


def test_a_summary_of_nothing_is_zero() -> None:
    assert summary(np.zeros(0, np.int64)) == Summary(mean=0.0, median=0.0, p95=0.0, p99=0.0, max=0, total=0)


def test_bins_are_round_and_begin_where_the_values_do() -> None:
    assert histogram(np.array([430, 450, 610, 799]), most=5) == (
        HistogramBin(start=400, stop=500, count=2),
        HistogramBin(start=500, stop=600, count=0),
        HistogramBin(start=600, stop=700, count=1),
        HistogramBin(start=700, stop=800, count=1),
    )


def test_what_lies_beyond_the_99th_percentile_shares_the_last_bin() -> None:
    values = np.array([*range(200), 90_000])
    last = histogram(values)[-1]
    assert (last.start, last.stop, last.count) == (200, None, 1)


def test_one_value_has_one_bin() -> None:
    assert histogram(np.array([7, 7])) == (HistogramBin(start=7, stop=8, count=2),)


def test_nothing_has_no_bins() -> None:
    assert histogram(np.zeros(0, np.int64)) == ()


@given(values=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50), most=st.integers(3, 20))
def test_every_value_lies_in_one_bin_and_there_are_not_too_many(values: list[int], most: int) -> None:
    bins = histogram(np.array(values), most=most)
    assert 1 <= len(bins) <= most
    assert sum(one.count for one in bins) == len(values)
    for one in bins:
        stop = 2**31 if one.stop is None else one.stop
        assert one.count == sum(one.start <= value < stop for value in values)
    assert [one.stop for one in bins[:-1]] == [one.start for one in bins[1:]]


@pytest.mark.parametrize("most", [3, 12, 40])
def test_a_wide_range_gets_wide_bins(most: int) -> None:
    bins = histogram(np.arange(0, 1_000_000, 997), most=most)
    assert most // 3 <= len(bins) <= most
