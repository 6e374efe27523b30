"""The command: a table, JSON, and an exit status."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from vlmpack.bench import CASES, Case, Figure, Report, Target, main, run_cases
from vlmpack.errors import ConfigError


@pytest.fixture
def cases(monkeypatch) -> dict[str, list[float]]:
    """Stand in for the real cases; returns the seconds that each one was given."""
    given: dict[str, list[float]] = {"good": [], "bad": []}

    def case(name: str, value: float) -> Case:
        def run(settings, shapes):
            given[name].append(settings.seconds)
            return [
                Figure(
                    case=name,
                    name="a ratio",
                    value=value,
                    unit="x",
                    low=value - 0.5,
                    high=value + 0.5,
                    rounds=3,
                    target=Target(limit=3, better="lower"),
                )
            ]

        return Case(about=f"a {name} case", run=run, shapes=CASES["pack"].shapes)

    fakes = {"good": case("good", 2.0), "bad": case("bad", 4.0)}
    monkeypatch.setattr("vlmpack.bench.command.CASES", fakes)
    monkeypatch.setattr("vlmpack.bench.run.CASES", fakes)
    return given


def printed(arguments: list[str]) -> tuple[int, str]:
    page = io.StringIO()
    status = main(arguments, console=Console(file=page, width=110))
    return status, page.getvalue()


def test_it_prints_each_figure_with_spread_and_verdict(cases):
    status, text = printed([])
    assert status == 0
    lines = text.splitlines()
    good, bad = (next(line for line in lines if f" {name} " in line) for name in ("good", "bad"))
    assert [cell.strip() for cell in good.split("│")[1:-1]] == [
        "good",
        "a ratio",
        "2 x",
        "1.5 to 2.5 x",
        "3",
        "≤ 3 reached",
    ]
    assert "≤ 3 missed" in bad
    assert lines[0].startswith("vlmpack ")


def test_the_budget_is_shared_by_the_cases_that_were_named(cases):
    printed(["--budget", "10"])
    printed(["good", "--budget", "10"])
    assert cases["good"] == pytest.approx([4.65, 9.3], abs=0.1)


def test_what_a_case_leaves_of_its_time_is_shared_by_those_after_it(cases):
    printed(["--budget", "10"])  # the first takes none
    assert cases["bad"] == pytest.approx([9.3], abs=0.1)


def test_without_a_budget_there_is_a_minute_for_every_case(cases):
    printed([])
    assert cases["good"] == pytest.approx([55.8], abs=0.1)


def test_a_missed_target_fails_only_when_asked_to(cases):
    assert printed(["bad"])[0] == 0
    assert printed(["bad", "--check"])[0] == 1
    assert printed(["good", "--check"])[0] == 0


def test_the_json_file_holds_the_report(cases, tmp_path):
    printed(["good", "--json", str(tmp_path / "bench.json"), "--seed", "7"])
    report = Report.load(tmp_path / "bench.json")
    assert [figure.name for figure in report.figures] == ["a ratio"]
    assert report.settings["seed"] == 7
    assert report.environment["torch"]
    assert report.shapes["good"]["ratio"] == 5.0


def test_an_unknown_family_is_refused_with_those_that_there_are(cases):
    status, text = printed(["good", "--family", "bert"])
    assert status == 2
    assert "there is no family 'bert'; choose from qwen2_vl, " in text


def test_an_unknown_case_is_refused_with_those_that_there_are(cases):
    status, text = printed(["speed"])
    assert status == 2
    assert "there is no case 'speed'; choose from good, bad" in text
    with pytest.raises(ConfigError, match="no case 'speed'"):
        run_cases(["speed"])
