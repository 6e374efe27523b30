"""The command for a GPU, whole, with tiny shapes; and what it does where something breaks or time runs out."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks import gpu
from benchmarks.gpu import TINY, Cell, Lab, run_cells
from benchmarks.measuring import Figure, Report, Skipped

CONSOLE = Console(file=io.StringIO())


def cell(name: str, *entries: Figure | Skipped | Exception, seconds: float = 0.0) -> Cell:
    def run(lab: Lab) -> Iterator[Figure | Skipped]:
        for entry in entries:
            if isinstance(entry, Exception):
                raise entry
            yield entry

    return Cell(case="case", name=name, seconds=seconds, run=run)


def figure(name: str) -> Figure:
    return Figure(case="case", name=name, value=1.0, unit="x")


def started(cells: dict[str, float | None] | None = None) -> Report:
    settings = {"cells": cells or {}}
    return Report(figures=(), environment={}, settings=settings, shapes={})


def run(cells: list[Cell], path: Path, report: Report | None = None, left: float = 60.0) -> tuple[Report, bool]:
    lab = Lab("cpu", TINY, seed=0, ends=time.time() + left)
    return run_cells(cells, lab, report or started(), path, CONSOLE)


def test_a_cell_that_breaks_keeps_its_figures_and_the_others_go_on(tmp_path):
    path = tmp_path / "gpu.json"
    report, works = run([cell("a", figure("1"), ValueError("no\nkernel")), cell("b", figure("2"))], path)
    assert works
    assert [each.name for each in report.figures] == ["1", "2"]
    (failed,) = report.failed
    assert (failed.name, failed.why) == ("a", "ValueError: no\nkernel")
    assert "raise entry" in failed.traceback
    assert Report.load(path).settings["cells"].keys() == {"case: a", "case: b"}


def test_a_cell_without_time_is_owed_and_shorter_ones_are_run(tmp_path):
    cells = [cell("long", figure("1"), seconds=100.0), cell("short", figure("2"))]
    report, _ = run(cells, tmp_path / "gpu.json", left=10.0)
    assert [each.name for each in report.figures] == ["2"]
    (skipped,) = report.skipped
    assert skipped.owed
    assert "it takes about 100 s, and 10 s are left" in skipped.why


@pytest.mark.parametrize(("seconds", "why"), [(1.0, []), (None, ["the process ended while it was measured"])])
def test_a_run_resumes_after_its_report_and_a_cell_in_which_the_process_died_has_failed(seconds, why, tmp_path):
    before = started({"case: a": seconds})
    report, _ = run([cell("a", figure("1")), cell("b", figure("2"))], tmp_path / "gpu.json", before)
    assert [each.name for each in report.figures] == ["2"]
    assert [each.why for each in report.failed] == why


def test_where_the_device_is_lost_the_run_ends_with_the_report_written(tmp_path, monkeypatch):
    monkeypatch.setattr(Lab, "works", lambda lab: False)
    path = tmp_path / "gpu.json"
    report, works = run([cell("a", figure("1")), cell("b", figure("2"))], path)
    assert not works
    assert [each.name for each in Report.load(path).figures] == [each.name for each in report.figures] == ["1"]


def test_memory_that_runs_out_is_no_result_and_other_errors_are_raised():
    lab = Lab("cpu", TINY, seed=0, ends=0.0)

    def fail(error: Exception) -> None:
        raise error

    for error in (torch.OutOfMemoryError("x"), RuntimeError("CUDA out of memory"), RuntimeError("CUBLAS ALLOC_FAILED")):
        assert lab.if_it_fits(lambda error=error: fail(error)) is None
    with pytest.raises(RuntimeError, match="another"):
        lab.if_it_fits(lambda: fail(RuntimeError("another")))
    assert lab.if_it_fits(lambda: 3) == 3


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_every_part_runs(tmp_path):
    path = tmp_path / "gpu.json"
    assert gpu.main(["--shapes", "tiny", "--json", str(path)], CONSOLE) == 0
    report = json.loads(path.read_text())
    assert report["failed"] == []
    cases = {"tests", "probe", "ceilings", "step", "syncs", "tree", "attention", "head", "memory"}
    assert {figure["case"] for figure in report["figures"]} == cases
    syncs = [each["value"] for each in report["figures"] if each["name"].endswith(", of vlmpack") and each["target"]]
    assert syncs == [0] * len(syncs) != []
