"""The packing buffer: rows around the oldest sample, filled from those that wait, under one limit or several."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan.naive import checked

from benchmarks.cases.planning import LENGTH_SETS, stream
from vlmpack.errors import ConfigError, SampleError
from vlmpack.plan import Budget, PackingBuffer, plan_bins
from vlmpack.plan import packing_buffer as buffered
from vlmpack.plan.exact_fill import best_subset
from vlmpack.plan.packing_buffer import fill_row

LIMITS = (50, 40, 4)
needs = st.tuples(st.integers(1, LIMITS[0]), st.integers(0, LIMITS[1]), st.integers(0, LIMITS[2]))


@pytest.mark.parametrize("name", LENGTH_SETS)
def test_a_stream_of_64_waiting_samples_is_full_and_nobody_waits_for_long(name):
    lengths = LENGTH_SETS[name].lengths(20_000)
    rows, delay = stream(lengths, LENGTH_SETS[name].capacity, 64)
    assert lengths.sum() / (rows * LENGTH_SETS[name].capacity) >= 0.999
    assert delay <= 200


def test_a_row_holds_the_oldest_sample_and_what_fills_it():
    room = PackingBuffer(10)
    for sample, length in enumerate([6, 5, 3, 4, 1]):
        room.add(sample, length)
    assert room.take() == [0, 3]
    assert room.tokens == 9
    assert room.take() == [1, 2, 4]
    assert room.take() == []
    assert len(room) == room.tokens == 0


@given(samples=st.lists(needs, min_size=1, max_size=40), pause=st.integers(1, 9))
def test_every_sample_comes_out_once_each_row_begins_with_the_oldest_and_keeps_every_limit(samples, pause):
    room, rows = PackingBuffer(LIMITS[0], LIMITS[1:]), []
    for sample, costs in enumerate(samples):
        room.add(sample, *costs)
        if sample % pause == 0:
            waiting = min({*range(sample + 1)} - {other for row in rows for other in row})
            rows.append(room.take())
            assert rows[-1][0] == waiting
    while row := room.take():
        rows.append(row)
    assert sorted(sample for row in rows for sample in row) == list(range(len(samples)))
    assert all(row == sorted(row) for row in rows)
    assert all((np.asarray([samples[at] for at in row]).sum(0) <= LIMITS).all() for row in rows)


@given(samples=st.lists(needs, min_size=1, max_size=30))
def test_nothing_that_still_fits_is_left_outside_a_row(samples):
    costs, limits = np.asarray(samples), np.asarray(LIMITS)
    row = fill_row(costs, limits)
    left = limits - costs[row].sum(0)
    outside = [at for at in range(len(samples)) if at not in row]
    assert row[0] == 0
    assert not any((costs[at] <= left).all() for at in outside)


def test_the_limit_with_the_highest_demand_is_filled_exactly():
    # Tokens are no matter here. Of the patches, only 47 + 31 + 22 make 100, which exchanges one for one do not find.
    costs = np.asarray([(1, patches) for patches in (0, 47, 31, 22, 17, 17, 17, 17)])
    row = fill_row(costs, np.asarray([1000, 100]))
    assert costs[row].sum(0)[1] == 100


def test_three_limits_that_bind_alike_cost_less_than_one_and_a_half_per_cent():
    """Text with 0 to 6 images a sample, whose patches and images bind as much as its tokens do."""
    random, capacity = np.random.default_rng(0), 16_384
    images = random.choice([0, 1, 1, 1, 1, 2, 3, 4, 6], 6000)
    tokens_of_image = np.clip(random.lognormal(np.log(500), 0.7, images.sum()), 16, 1600)
    pixels = np.bincount(np.repeat(np.arange(6000), images), weights=tokens_of_image, minlength=6000).astype(np.int64)
    tokens = pixels + np.clip(random.lognormal(np.log(270), 0.9, 6000), 16, 4000).astype(np.int64)
    rows = tokens.sum() / capacity
    limits = {"patches": (4 * pixels, 4 * pixels.sum() / rows), "images": (images, np.ceil(images.sum() / rows))}
    budgets = [Budget(name=n, costs=c, limit=max(int(limit), int(c.max()))) for n, (c, limit) in limits.items()]
    plan = checked(plan_bins(tokens, capacity, budgets=budgets, seed=0))
    assert len(plan) <= 1.015 * plan.lower_bound


@pytest.mark.parametrize(
    ("sample", "reason"), [((1, 11, 0), "overlength"), ((1, 3, 5), "overlength"), ((1, 0, 0), "empty")]
)
def test_a_sample_that_fits_no_row_is_refused_by_name(sample, reason):
    with pytest.raises(SampleError, match=r"sample 1: .* a row holds from 1 to 10 tokens, and 0 to \[4\]") as caught:
        PackingBuffer(10, [4]).add(*sample)
    assert caught.value.reason == reason


def test_limits_are_whole_numbers_of_at_least_1():
    with pytest.raises(ConfigError, match="the capacity of a row must be a whole number from 1 to"):
        PackingBuffer(0)
    with pytest.raises(ConfigError, match="a row's limit must be a whole number from 1 to"):
        PackingBuffer(5, [0])


@pytest.mark.parametrize("lengths", [[1000], [700, 1000, 3000]])
def test_of_equal_lengths_no_more_are_looked_at_than_fit_together(lengths, monkeypatch):
    """So that the work on many of them grows as their number does."""
    looked: list[int] = []

    def counted(company, room):
        return best_subset((looked.append(length) or length for length in company), room)

    monkeypatch.setattr(buffered, "best_subset", counted)
    work = []
    for count in (500, 2000):
        looked.clear()
        room = PackingBuffer(8192)
        for at in range(count):
            room.add(at, lengths[at % len(lengths)])
        while len(room):
            assert room.take()
        work.append(len(looked))
    assert work[1] < 5 * work[0]
