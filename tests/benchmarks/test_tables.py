"""Tables of figures: every number whole at a terminal of 80 columns, plain lines behind a pipe."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from benchmarks.compare_commits import compare, table
from benchmarks.figures import Figure, Report, Skipped, Target
from benchmarks.gpu.command import print_targets
from benchmarks.report import print_report, print_runs
from vlmpack.terminal import print_table

WIDTH = 80
DRAWN = set("─━│┃┏┓┗┛┌┐└┘├┤┡┩╇╭╮╰╯|")


def measured(families: int = 8) -> Report:
    target = Target(limit=2e-5, better="lower")
    spread: dict[str, Any] = {"low": 2.45e-5, "high": 2.512e-5, "rounds": 300, "target": target}
    names = (
        "packed / padded, forward and backward",
        "compiled / eager",
        "tokens / ideal",
        "peak memory packed / padded",
    )
    figures = [
        Figure(
            case="plan", name="uniform: a sample of a stream of a million lengths", value=2.5e-5, unit="s", **spread
        ),
        Figure(case="plan", name="CORD: longest wait", value=1_234_567, unit="samples"),
        Figure(case="memory", name="peak of a step, activations alone", value=139 * 2**30, unit="bytes"),
        *(
            Figure(
                case="step",
                family=f"qwen{n}_vl_moe",
                name=name,
                value=0.512,
                unit="x",
                target=Target(limit=0.5, better="lower"),
            )
            for n in range(families)
            for name in names
        ),
    ]
    where = {"vlmpack": "0.1.0", "torch": "2.13.0+cu128", "transformers": "5.23.0", "python": "3.11.7", "threads": 16}
    return Report(
        figures=tuple(figures), environment={**where, "device_name": "NVIDIA H200", "commit": "0123456789abcdef"},
        settings={"clock": "wall", "seed": 0}, shapes={},
        skipped=(Skipped(case="plan", name="plan / TRL's bfd, 100,000 lengths", why="TRL cannot be imported"),),
    )  # fmt: skip


COMMANDS: dict[str, Callable[[Console], None]] = {
    "cases": lambda console: print_report(measured(), console),
    "gpu": lambda console: print_targets(measured(), console),
    "report": lambda console: print_runs({f"run-{n}": measured() for n in range(5)}, console),
    "compare_commits": lambda console: print_table(console, table(compare([measured()], [measured()]), 0.03)),
}
TABLES = [command for command in COMMANDS if command != "gpu"]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Table]]:
    """The tables that were printed."""
    printed_tables: list[Table] = []
    render = Table.__rich_console__

    def noted(self: Table, *arguments: Any) -> Any:
        if any(isinstance(cell, str) and cell for column in self.columns for cell in column._cells):
            printed_tables.append(self)  # and not those by which rich puts texts side by side
        return render(self, *arguments)

    monkeypatch.setattr(Table, "__rich_console__", noted)
    yield printed_tables


def printed(command: str, *, terminal: bool) -> str:
    file = io.StringIO()
    COMMANDS[command](Console(file=file, width=WIDTH, force_terminal=terminal, color_system=None))
    return file.getvalue()


def plain(cell: Any) -> str:
    if isinstance(cell, Padding):
        return plain(cell.renderable)
    return cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain


@pytest.mark.parametrize("command", COMMANDS)
def test_a_terminal_of_80_columns_shows_every_number_whole(command: str, tables: list[Table]) -> None:
    text = printed(command, terminal=True)
    columns = [column for shown in tables for column in shown.columns if column.justify == "right"]
    numbers = {plain(cell) for column in columns for cell in column._cells}
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "…" not in text
    assert [number for number in numbers if number not in text] == []
    assert bool(tables) == (command in TABLES)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_pipe_gets_plain_lines(command: str, tables: list[Table]) -> None:
    text = printed(command, terminal=False)
    assert not DRAWN & set(text.replace("**", ""))
    assert "…" not in text and "\x1b" not in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for shown in tables:
        for row in zip(*(column._cells for column in shown.columns), strict=True):
            words = " ".join(" ".join(plain(cell) for cell in row).split())
            assert not words or words in lines


def test_a_figure_its_spread_and_its_target_are_in_one_unit() -> None:
    words = " ".join(printed("cases", terminal=False).split())
    assert "uniform: a sample of a stream of a million lengths 25 µs 24.5 to 25.1 300 ≤ 20 µs missed" in words


@pytest.mark.full
def test_the_command_has_no_colours_and_no_cut_cells_in_a_pipe(tmp_path: Path) -> None:
    measured().save(tmp_path / "run.json")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "report", str(tmp_path / "run.json")],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=Path(__file__).parents[2],
        env={**os.environ, "COLUMNS": "80", "PYTHONIOENCODING": "utf-8"},
    )
    assert "| plan | CORD: longest wait | 1,234,567 samples |  |" in done.stdout.splitlines(), done.stderr
