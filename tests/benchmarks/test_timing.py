"""alternate: everything is called in turn, in every round, and ratios compare within a round."""

from __future__ import annotations

import gc

import pytest
import torch

from benchmarks.timing import Spread, Timings, alternate, one_thread


def test_each_round_calls_all_in_turn_and_starts_one_further_along(monkeypatch):
    monkeypatch.setattr("benchmarks.timing.LEAST_SECONDS", 0.0)  # so that one measurement is one call
    seen: list[str] = []
    alternate({name: lambda name=name: seen.append(name) for name in "abc"}, seconds=0.0, least_rounds=4, most_rounds=4)
    warm_up, rounds = seen[:3], seen[3:]
    assert warm_up == list("abc")
    assert rounds == list("abc" + "bca" + "cab" + "abc")


def test_fast_callables_are_called_several_times_for_one_measurement():
    calls = []
    timings = alternate({"fast": lambda: calls.append(1)}, seconds=0.0, least_rounds=1)
    assert len(calls) > 100
    assert timings.of("fast", "wall").rounds == 1


def test_it_stops_after_the_time_given_but_not_before_the_least_rounds():
    nothing = {"nothing": lambda: None}
    assert alternate(nothing, seconds=0.0, least_rounds=5).of("nothing", "cpu").rounds == 5
    assert alternate(nothing, seconds=60.0, most_rounds=7).of("nothing", "cpu").rounds == 7


def test_garbage_is_not_collected_while_a_clock_runs_and_is_afterwards():
    running: list[bool] = []
    alternate({"look": lambda: running.append(gc.isenabled())}, seconds=0.0, least_rounds=1)
    assert running
    assert not any(running)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_what_a_worker_does_is_measured_with_its_one_thread():
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_a_ratio_compares_each_round_within_itself():
    # The machine slows down fourfold in the middle; the ratio does not notice.
    slow = {"a": (2.0, 2.0, 8.0, 8.0, 2.0), "b": (1.0, 1.0, 4.0, 4.0, 1.0)}
    ratio = Timings(seconds={"wall": slow, "cpu": slow}).ratio("a", "b", "wall")
    assert ratio == Spread(median=2.0, low=2.0, high=2.0, rounds=5)


@pytest.mark.parametrize(
    ("values", "expected"),
    [((3.0,), (3.0, 3.0, 3.0)), ((1.0, 2.0, 3.0, 4.0, 5.0), (2.0, 3.0, 4.0))],
)
def test_a_spread_is_a_median_between_quartiles(values, expected):
    spread = Spread.of(values)
    assert (spread.low, spread.median, spread.high) == expected
    assert spread.scaled(10).median == 10 * expected[1]
