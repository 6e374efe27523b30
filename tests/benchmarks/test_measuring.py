"""Everything is called in turn, in every round; ratios compare within a round; reports are read back."""

from __future__ import annotations

import pytest

from benchmarks.measuring import BenchSettings, Failed, Figure, Report, Skipped, Spread, Target, Timings, alternate


def test_each_round_calls_all_in_turn_and_starts_one_further_along(monkeypatch):
    monkeypatch.setattr("benchmarks.measuring.LEAST_SECONDS", 0.0)  # so that one measurement is one call
    seen: list[str] = []
    alternate({name: lambda name=name: seen.append(name) for name in "abc"}, seconds=0.0, least_rounds=4, most_rounds=4)
    assert seen[:3] == list("abc")
    assert seen[3:] == list("abc" + "bca" + "cab" + "abc")


def test_rounds_are_limited_by_numbers_and_time_and_a_fast_callable_is_called_several_times_in_each():
    calls = []
    fast = {"fast": lambda: calls.append(1)}
    assert len(alternate(fast, seconds=0.0, least_rounds=5).seconds["cpu"]["fast"]) == 5
    assert len(alternate(fast, seconds=60.0, most_rounds=7).seconds["wall"]["fast"]) == 7
    assert len(calls) > 1000


def test_a_ratio_compares_each_round_within_itself():
    # The machine slows down fourfold in the middle; the ratio does not notice.
    slow = {"a": (2.0, 2.0, 8.0, 8.0, 2.0), "b": (1.0, 1.0, 4.0, 4.0, 1.0)}
    timings = Timings(seconds={"wall": slow, "cpu": slow})
    assert timings.ratio("a", "b", "wall") == Spread(median=2.0, low=2.0, high=2.0, rounds=5)
    figure = Figure.compared("case", "name", timings, ("a", "b"), BenchSettings(), scale=0.5)
    assert (figure.value, figure.low, figure.rounds, figure.clocks) == (1.0, 1.0, 5, {"wall": 1.0, "cpu": 1.0})
    assert Figure.rate("case", "name", timings, "b", 8, "x/s", "wall").value == 8.0


def figure(value: float, limit: float | None = None, better: str = "lower") -> Figure:
    target = None if limit is None else Target(limit=limit, better=better)  # type: ignore[arg-type]
    return Figure(case="case", name=f"{value} {limit} {better}", value=value, unit="x", target=target)


def report(**more) -> Report:
    environment = {"torch": "2.13", "commit": None}
    return Report(figures=(figure(1.0), figure(2.0, 3.0)), environment=environment, settings={}, shapes={}, **more)


@pytest.mark.parametrize(
    ("more", "complete"),
    [
        ({}, True),
        ({"skipped": (Skipped(case="a", name="b", why="c"),)}, True),
        ({"skipped": (Skipped(case="a", name="b", why="c", owed=True),)}, False),
        ({"failed": (Failed(case="a", name="b", why="c"),)}, False),
    ],
)
def test_a_report_is_complete_if_nothing_that_could_be_measured_is_missing(more, complete, tmp_path):
    written = report(**more)
    assert written.complete is complete
    written.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == written
