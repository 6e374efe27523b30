"""The command: a table, JSON, and an exit status."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from benchmarks.command import CASES, Case, main, run_cases
from benchmarks.figures import Figure, Report, Target
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
    monkeypatch.setattr("benchmarks.command.CASES", fakes)
    return given


def printed(arguments: list[str]) -> tuple[int, str]:
    page = io.StringIO()
    status = main(arguments, console=Console(file=page, width=110))
    return status, page.getvalue()


def test_it_prints_each_figure_with_spread_and_verdict(cases):
    status, text = printed([])
    assert status == 0
    lines = text.splitlines()
    good, bad = (lines[lines.index(name) + 1] for name in ("good", "bad"))
    assert re.split("  +", good.strip()) == ["a ratio", "2 x", "1.5 to 2.5", "3", "≤ 3 x reached"]
    assert "≤ 3 x missed" in bad
    assert lines[0].startswith("vlmpack ")


def test_the_budget_is_shared_by_the_cases_that_were_named(cases):
    printed(["--budget", "10"])
    printed(["good", "--budget", "10"])
    assert cases["good"] == pytest.approx([4.55, 9.1], abs=0.1)


def test_what_a_case_leaves_of_its_time_is_shared_by_those_after_it(cases):
    printed(["--budget", "10"])  # the first takes none
    assert cases["bad"] == pytest.approx([9.1], abs=0.1)


def test_without_a_budget_there_is_a_minute_for_every_case(cases):
    printed([])
    assert cases["good"] == pytest.approx([54.6], abs=0.1)


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


def test_the_folder_of_the_json_file_is_made(cases, tmp_path):
    printed(["good", "--json", str(tmp_path / "new" / "folder" / "bench.json")])
    assert len(Report.load(tmp_path / "new" / "folder" / "bench.json").figures) == 1


@pytest.mark.parametrize("words", [["good"], ["gpu", "--device", "cpu", "--shapes", "tiny"]], ids=["cases", "gpu"])
@pytest.mark.parametrize(
    ("place", "seen"), [("a file/bench.json", r"its folder cannot be made (File exists)"), (".", "is a folder")]
)
def test_a_path_that_cannot_be_written_is_refused_before_anything_is_measured(words, place, seen, cases, tmp_path):
    (tmp_path / "a file").write_text("")
    status, text = printed([*words, "--json", str(tmp_path / place)])
    assert status == 2
    assert text.startswith(f"--json {tmp_path / place}") and seen in text
    assert cases["good"] == []


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        (["--device", "foo"], "--device foo: PyTorch sees cpu"),
        (["--device", "cuda:99"], "--device cuda:99: PyTorch sees cpu"),
        (["--threads", "-1"], "--threads must be a whole number of at least 1, got -1"),
        (["--threads", "0"], "--threads must be a whole number of at least 1, got 0"),
        (["--budget", "nan"], "--budget nan: give seconds"),
        (["--budget", "inf"], "--budget inf: give seconds"),
        (["--budget", "-1"], "--budget -1: give seconds"),
        (["--seed", "-1"], "--seed must be a whole number from 0 to 4294967295, got -1"),
    ],
)
def test_settings_that_cannot_be_measured_with_are_refused_in_one_line(words, seen, cases):
    status, text = printed(["good", *words])
    assert status == 2
    assert text.startswith(seen) and len(text.splitlines()) == 1
    assert cases["good"] == []


@pytest.mark.parametrize("words", [["--budget", "nan"], ["--budget", "-1"], ["--seed", "-1"]])
def test_a_gpu_is_not_measured_with_them_either(words, tmp_path):
    path = tmp_path / "gpu.json"
    status, text = printed(["gpu", "--device", "cpu", "--shapes", "tiny", "--json", str(path), *words])
    assert status == 2
    assert text.startswith(words[0]) and len(text.splitlines()) == 1
    assert not path.exists()


def test_going_on_from_a_damaged_file_is_refused_in_one_line(tmp_path):
    path = tmp_path / "gpu.json"
    path.write_text('{"schema"')
    status, text = printed(["gpu", "--device", "cpu", "--shapes", "tiny", "--json", str(path), "--resume"])
    assert status == 2
    assert text.startswith(f"{path} is no benchmark report") and len(text.splitlines()) == 1


def test_the_figures_are_kept_before_they_are_printed(cases, tmp_path):
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"), width=110)
    with pytest.raises(UnicodeEncodeError):  # the sign for "at most" in its target
        main(["good", "--json", str(tmp_path / "bench.json")], console=console)
    assert len(Report.load(tmp_path / "bench.json").figures) == 1


def test_a_terminal_without_the_signs_gets_escapes(cases, monkeypatch):
    page = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(page, encoding="ascii", write_through=True))
    assert main(["good"]) == 0
    assert rb"\u2264 3 x reached" in page.getvalue()
