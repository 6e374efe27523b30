"""Figures and reports: targets, and the trip through JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.figures import SCHEMA, BenchSettings, Failed, Figure, Report, Skipped, Target
from benchmarks.timing import Timings
from vlmpack.errors import ConfigError

TIMES = {"a": (1.0, 2.0, 3.0), "b": (2.0, 4.0, 6.0)}


@pytest.fixture
def report() -> Report:
    timings = Timings(seconds={"wall": TIMES, "cpu": TIMES})
    settings = BenchSettings()
    speedup = Figure.compared(
        "step", "speed-up", timings, ("b", "a"), settings, target=Target(limit=3, better="higher")
    )
    figures = (
        Figure.timed("step", "packed", timings, "a", settings),
        replace(speedup, family="qwen3_vl"),
        Figure(case="memory", name="peak", value=7, unit="bytes", target=Target(limit=8, better="lower")),
    )
    return Report(
        figures=figures,
        environment={"torch": "2"},
        settings={"seed": 0},
        shapes={"step": {"layers": 4}},
        skipped=(Skipped(case="step", name="qwen3", why="no time", owed=True),),
    )


def test_a_report_survives_the_trip_through_json(report, tmp_path):
    report.save(tmp_path / "bench.json")
    assert Report.load(tmp_path / "bench.json") == report


def test_the_json_says_where_and_how(report, tmp_path):
    report.save(tmp_path / "bench.json")
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found.keys() == {"schema", "figures", "environment", "settings", "shapes", "skipped", "failed"}
    assert found["schema"] == SCHEMA
    assert found["figures"][1] == {
        "case": "step",
        "name": "speed-up",
        "value": 2.0,
        "unit": "x",
        "family": "qwen3_vl",
        "low": 2.0,
        "high": 2.0,
        "rounds": 3,
        "clocks": {"wall": 2.0, "cpu": 2.0},
        "target": {"limit": 3, "better": "higher"},
    }


@pytest.mark.parametrize("content", ['{"schema": 0, "figures": []}', "[]", "{}"])
def test_another_file_is_refused(content, tmp_path):
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(ConfigError, match=rf"other.json is no benchmark report of schema {SCHEMA} .*; measure again"):
        Report.load(tmp_path / "other.json")


def test_missed_targets_are_listed_and_figures_without_one_never_are(report):
    assert [figure.met for figure in report.figures] == [None, False, True]
    assert [figure.name for figure in report.missed] == ["speed-up"]


def test_a_report_is_complete_if_no_target_is_missed_and_nothing_that_could_be_measured_was_skipped(report):
    reached = replace(report, figures=report.figures[::2], skipped=())
    assert reached.complete
    assert replace(reached, skipped=(Skipped(case="plan", name="another library", why="not installed"),)).complete
    assert not replace(reached, skipped=report.skipped).complete
    broken = Failed(case="step", name="qwen3", why="ValueError: no", traceback="")
    assert not replace(reached, failed=(broken,)).complete
    assert not replace(reached, figures=report.figures).complete


@pytest.mark.parametrize(("better", "met"), [("lower", [True, True, False]), ("higher", [False, True, True])])
def test_a_limit_itself_reaches_the_target(better, met):
    assert [Target(limit=2.0, better=better).met_by(value) for value in (1.0, 2.0, 3.0)] == met


def test_a_figure_is_of_the_clock_that_counts_and_keeps_the_other():
    timings = Timings(seconds={"wall": {"a": (5.0,)}, "cpu": {"a": (3.0,)}})
    figure = Figure.timed("step", "packed", timings, "a", BenchSettings(clock="cpu"))
    assert figure.value == 3.0
    assert figure.clocks == {"wall": 5.0, "cpu": 3.0}


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        (b"", "no benchmark report: it is no JSON"),
        (b'{"schema": 2, "figures": [', "no benchmark report: it is no JSON"),
        (b"\xff\xfe{}", "no benchmark report: it is no JSON .*utf-8"),
        (b"[" * 100_000, "no benchmark report: it is no JSON"),
        (b'{"schema": 2}', r"no whole benchmark report of schema 2 \(KeyError: 'figures'\)"),
        (b'{"schema": 2, "figures": [{"target": null, "colour": "red"}]}', "no whole benchmark report .*'colour'"),
        (b'{"schema": 2, "figures": 7}', "no whole benchmark report"),
    ],
)
def test_a_file_that_is_not_whole_is_refused(content, seen, tmp_path):
    (tmp_path / "other.json").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"other.json is {seen}.*; measure again"):
        Report.load(tmp_path / "other.json")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"other.json cannot be read: .*No such file"):
        Report.load(tmp_path / "other.json")
