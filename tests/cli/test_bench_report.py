"""`vlmpack bench report`: runs side by side."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from vlmpack.bench import BenchSettings, run_cases
from vlmpack.bench.cases import CASES, PackShapes
from vlmpack.cli.app import app


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


def test_the_table_is_printed(runs: list[str]) -> None:
    shown = CliRunner().invoke(app, ["bench", "report", *runs])
    assert shown.exit_code == 0, shown.output
    head, _, first, *_ = shown.output.splitlines()
    assert head == "| case | figure | before | after | target |"
    assert first.startswith("| pack | pack 2 x 10 |")


def test_table_and_picture_are_written(runs: list[str], tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["bench", "report", *runs, "--out", str(tmp_path / "out")])
    assert shown.exit_code == 0, shown.output
    assert (tmp_path / "out" / "report.md").read_text().startswith("| case |")
    assert (tmp_path / "out" / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_file_is_named_with_what_writes_one(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["bench", "report", str(tmp_path / "no.json")])
    assert shown.exit_code == 2
    assert "there is no file" in shown.output and "--json" in shown.output


def test_a_file_named_twice_is_refused(runs: list[str]) -> None:
    shown = CliRunner().invoke(app, ["bench", "report", runs[0], runs[0]])
    assert shown.exit_code == 2 and "named twice" in shown.output


@pytest.mark.parametrize("content", [b"", b'{"schema": 2, ', b"\xff\xfe\x00", b'{"schema": 2}'])
def test_a_file_that_is_no_report_is_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(content)
    shown = CliRunner().invoke(app, ["bench", "report", str(tmp_path / "run.json")])
    assert shown.exit_code == 2
    assert shown.stderr.startswith(f"vlmpack: {tmp_path / 'run.json'} is no ") and "measure again" in shown.stderr
    assert len(shown.stderr.splitlines()) == 1


def test_a_file_in_the_place_of_the_folder_is_refused(runs: list[str], tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["bench", "report", *runs, "--out", runs[0]])
    assert shown.exit_code == 2
    assert f"vlmpack: --out {runs[0]} cannot be a folder (" in shown.stderr
