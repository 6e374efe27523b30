"""Runs: which case and family comes when, what is left out when the time is up, and how families stand side by side."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from benchmarks import command
from benchmarks.command import CASES, HANDED_OUT, NO_FORMULA, OUT_OF_TIME, Case, main, run_cases
from benchmarks.figures import BenchSettings, Figure, Skipped, Target
from benchmarks.receipts import MEASURED

SECONDS = {"qwen3_vl": 10.0, "qwen3_5": 30.0, "qwen3": 1.0}
SHARES = {"qwen3_vl": 0.9, "qwen3_5": 0.5, "qwen3": 1.25}
THREE = list(SECONDS)


@pytest.fixture(autouse=True)
def measured(monkeypatch) -> list[tuple[str, str]]:
    """Two cases, one of which measures families, on a clock that they alone move; returns what was run."""
    ran: list[tuple[str, str]] = []
    clock = SimpleNamespace(now=0.0)

    def by_family(settings, shapes):
        ran.append(("step", settings.family))
        clock.now += SECONDS.get(settings.family, 0.0)
        value = SHARES.get(settings.family, 1.0)
        target = Target(limit=0.75, better="higher")
        figure = Figure(case="step", name="share", value=value, unit="x", family=settings.family, target=target)
        return [figure, Figure(case="step", name="time", value=1.0, unit="s", family=settings.family)]

    def other(settings, shapes):
        ran.append(("pack", ""))
        return [Skipped(case="pack", name="another library", why="it is not installed")]

    shapes = CASES["pack"].shapes
    fakes = {
        "pack": Case(about="", run=other, shapes=shapes),
        "step": Case(about="", run=by_family, shapes=shapes, families=MEASURED),
    }
    monkeypatch.setattr("benchmarks.command.CASES", fakes)
    monkeypatch.setattr("benchmarks.command.time", SimpleNamespace(perf_counter=lambda: clock.now))
    return ran


def printed(arguments: list[str]) -> tuple[int, str]:
    page = io.StringIO()
    status = main(arguments, console=Console(file=page, width=110))
    return status, page.getvalue()


def test_each_family_is_measured_by_the_cases_that_measure_families_and_by_no_other(measured):
    report = run_cases(settings=BenchSettings(seconds=60), families=THREE)
    assert measured == [("pack", ""), *(("step", name) for name in THREE)]
    assert report.settings["family"] == THREE


def test_the_family_of_the_settings_is_measured_unless_told_otherwise(measured):
    run_cases(["step"], BenchSettings(family="qwen2_vl"))
    run_cases(["step"])
    assert measured == [("step", "qwen2_vl"), ("step", "qwen3_vl")]


def test_a_case_gets_time_by_its_weight(measured, monkeypatch):
    given = []

    def note(settings, shapes):
        given.append(settings.seconds)
        return []

    shapes = CASES["pack"].shapes
    fakes = {"pack": Case(about="", run=note, shapes=shapes), "step": Case(about="", run=note, shapes=shapes, weight=3)}
    monkeypatch.setattr("benchmarks.command.CASES", fakes)
    run_cases(["pack", "step"], BenchSettings(seconds=40))  # no time passes, so that the second gets all that is left
    assert given == pytest.approx([80 * HANDED_OUT / 4, 80 * HANDED_OUT])
    assert CASES["step"].weight > CASES["pack"].weight


def test_what_has_no_time_left_is_skipped_and_owed(measured):
    report = run_cases(["step"], BenchSettings(seconds=13), families=THREE)  # 39 seconds, and the first two take 40
    assert measured == [("step", "qwen3_vl"), ("step", "qwen3_5")]
    assert report.skipped == (Skipped(case="step", name="qwen3", why=OUT_OF_TIME, owed=True),)
    assert not report.complete


def test_the_first_of_every_case_is_measured_however_little_time_there_is(measured):
    report = run_cases(settings=BenchSettings(seconds=0), families=THREE)
    assert measured == [("pack", ""), ("step", "qwen3_vl")]
    assert [skipped.name for skipped in report.skipped if skipped.owed] == ["qwen3_5", "qwen3"]


def test_a_case_may_skip_something_itself_which_fails_no_check(measured):
    status, text = printed(["pack", "--check"])
    assert status == 0
    assert "skipped: pack, another library: it is not installed" in text


def test_all_families_can_be_asked_for_at_once(measured):
    printed(["step", "--family", "all"])
    assert measured == [("step", name) for name in MEASURED]


def test_a_family_that_a_case_cannot_measure_is_listed_and_fails_no_check(measured, monkeypatch):
    cases = command.CASES
    monkeypatch.setitem(cases, "step", replace(cases["step"], families=("qwen3_vl",)))
    report = run_cases(["step"], BenchSettings(seconds=60), families=["qwen3_vl", "gemma3"])
    assert measured == [("step", "qwen3_vl")]
    assert report.skipped == (Skipped(case="step", name="gemma3", why=NO_FORMULA),)
    assert report.complete


def test_families_stand_side_by_side_with_their_ratios():
    _, text = printed(["step", "--family", "qwen3", "--family", "qwen3_5"])
    lines = [re.split("  +", line) for line in text.splitlines()]
    assert ["qwen3", "1.25"] in lines
    assert ["qwen3_5", "0.5 missed"] in lines


def test_one_family_needs_no_second_table():
    assert "0.5 missed" not in printed(["step", "--family", "qwen3_5"])[1]


def test_a_check_fails_for_a_missed_target_and_for_one_that_was_not_measured(measured):
    asked = ["step", "--check", "--family", "qwen3_vl", "--family", "qwen3"]
    assert printed(asked)[0] == 0
    status, text = printed([*asked, "--budget", "5"])
    assert status == 1
    assert "skipped: step, qwen3: the time was used up" in text
    assert printed([*asked, "--family", "qwen3_5"])[0] == 1
