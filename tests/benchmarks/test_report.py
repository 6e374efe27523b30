"""Reports for people: numbers in one unit, Markdown, several runs side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.command import CASES, PackShapes, main, run_cases
from benchmarks.figures import BenchSettings, Figure, Report, Skipped, Target
from benchmarks.report import markdown, readable


@pytest.mark.parametrize(
    ("values", "unit", "expected"),
    [
        ([0.0000125], "s", "12.5 µs"),
        ([0.00152, 0.00161], "s", "1.52 to 1.61 ms"),
        ([0.9, 1.1], "s", "0.9 to 1.1 s"),
        ([512], "bytes", "512 bytes"),
        ([3 * 2**20], "bytes", "3 MiB"),
        ([0.5741], "x", "0.574 x"),
        ([61234.5], "tokens/s", "61,234 tokens/s"),
    ],
)
def test_numbers_keep_three_digits_and_one_unit(values, unit, expected):
    assert readable(values, unit) == expected


SPEED = Figure(
    case="step", family="qwen3_vl", name="speed-up", value=2.071, unit="x", low=2.0, high=2.11, rounds=3,
    target=Target(limit=2.05, better="higher"),
)  # fmt: skip
SLOWER = Figure(**{**vars(SPEED), "value": 1.9, "low": 1.8, "high": 1.95})
COPY = Figure(case="pack", name="pack 8 x 4096", value=0.00031, unit="s")
WHERE = {"vlmpack": "1.2", "commit": "0123456789abcdef+", "python": "3.11", "torch": "2.13", "transformers": "5.23"}


def run(*figures: Figure, device: str = "a CPU", skipped: tuple[Skipped, ...] = ()) -> Report:
    return Report(
        figures=figures,
        environment={**WHERE, "device_name": device, "threads": 2},
        settings={"clock": "wall", "seed": 0},
        shapes={},
        skipped=skipped,
    )


def test_runs_stand_side_by_side() -> None:
    skipped = Skipped(case="attention", name="flash", why="no GPU")
    table = markdown({"before": run(COPY, SPEED), "after": run(SLOWER, device="a GPU", skipped=(skipped,))})
    assert table == (
        "| case | figure | before | after | target |\n"
        "| --- | --- | ---: | ---: | ---: |\n"
        "| pack | pack 8 x 4096 | 310 µs |  |  |\n"
        "| step qwen3_vl | speed-up | 2.07 x (2 to 2.11) | **1.9 x** (1.8 to 1.95) | ≥ 2.05 x |\n"
        "\n"
        "- before: vlmpack 1.2 (0123456789ab+), Python 3.11, torch 2.13, transformers 5.23, a CPU, 2 threads, wall "
        "clock, seed 0\n"
        "- after: vlmpack 1.2 (0123456789ab+), Python 3.11, torch 2.13, transformers 5.23, a GPU, 2 threads, wall "
        "clock, seed 0\n"
        "  - skipped: attention, flash: no GPU\n"
    )


def test_a_bar_in_a_name_does_not_end_its_cell() -> None:
    odd = Figure(case="pack", name="a | b", value=1.0, unit="x")
    assert "| a \\| b |" in markdown({"run": run(odd)})


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files of two real runs of a tiny case."""
    tiny = PackShapes(batches=((2, 10),))
    monkeypatch.setitem(CASES, "pack", type(CASES["pack"])(**{**vars(CASES["pack"]), "shapes": tiny}))
    files = []
    for name in ("before", "after"):
        run_cases(["pack"], BenchSettings(seconds=0.0)).save(tmp_path / f"{name}.json")
        files.append(str(tmp_path / f"{name}.json"))
    return files


@dataclass(frozen=True)
class Shown:
    status: int
    output: str
    error: str


Reported = Callable[..., Shown]


@pytest.fixture
def reported(capsys: pytest.CaptureFixture[str]) -> Reported:
    """Run `python -m benchmarks report` with some arguments."""

    def run(*arguments: str) -> Shown:
        status = main(["report", *arguments])
        return Shown(status, *capsys.readouterr())

    return run


@pytest.mark.full
def test_the_table_is_printed(reported: Reported, runs: list[str]) -> None:
    shown = reported(*runs)
    assert shown.status == 0, shown.error
    head, _, first, *_ = shown.output.splitlines()
    assert head == "| case | figure | before | after | target |"
    assert first.startswith("| pack | pack 2 x 10 |")


def test_a_missing_file_is_named_with_what_writes_one(reported: Reported, tmp_path: Path) -> None:
    shown = reported(str(tmp_path / "no.json"))
    assert shown.status == 2
    assert "there is no file" in shown.error and "--json" in shown.error


@pytest.mark.full
def test_a_file_named_twice_is_refused(reported: Reported, runs: list[str]) -> None:
    shown = reported(runs[0], runs[0])
    assert shown.status == 2 and "named twice" in shown.error


@pytest.mark.parametrize("content", [b"", b'{"schema": 2, ', b"\xff\xfe\x00", b'{"schema": 2}'])
def test_a_file_that_is_no_report_is_refused_in_one_line(reported: Reported, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(content)
    shown = reported(str(tmp_path / "run.json"))
    assert shown.status == 2
    assert shown.error.startswith(f"{tmp_path / 'run.json'} is no ") and "measure again" in shown.error
    assert len(shown.error.splitlines()) == 1
