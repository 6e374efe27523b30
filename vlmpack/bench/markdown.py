"""Several reports as one Markdown table: a line a figure, a column a run."""

from __future__ import annotations

from collections.abc import Mapping

from vlmpack.bench.figure import Figure, Report
from vlmpack.bench.table import cell_of, lines_of


def markdown(reports: Mapping[str, Report]) -> str:
    """One table of all figures, in the order in which they first appear, then where each run was made.

    Args:
        reports: by the name that heads their column; at least one.
    """
    table = [
        _row("case", "figure", *reports, "target"),
        _row(*["---"] * 2, *["---:"] * (len(reports) + 1)),
        *(_row(line.group, line.name, *map(_cell, line.figures), line.target) for line in lines_of(reports)),
    ]
    return "\n".join([*table, "", *runs(reports)]) + "\n"


def runs(reports: Mapping[str, Report]) -> list[str]:
    """For each run its versions and place, and what it left out."""
    return [_run(name, report) for name, report in reports.items()]


def _cell(figure: Figure | None) -> str:
    """The value with its quartiles; in bold if it misses its target."""
    value, bracket, spread = cell_of(figure).partition(" (")
    bold = figure is not None and figure.met is False
    return f"{f'**{value}**' if bold else value}{bracket}{spread}"


def _run(name: str, report: Report) -> str:
    """A run's versions and place, and what it left out."""
    where = report.environment
    commit = where["commit"] or "no commit"
    line = (
        f"- {name}: vlmpack {where['vlmpack']} ({commit[:12]}{'+' if commit.endswith('+') else ''}), "
        f"Python {where['python']}, torch {where['torch']}, transformers {where['transformers']}, "
        f"{where['device_name']}, {where['threads']} threads, {report.settings['clock']} clock, "
        f"seed {report.settings['seed']}"
    )
    skipped = [f"  - skipped: {one.case}, {one.name}: {one.why}" for one in report.skipped]
    return "\n".join([line, *skipped, *(f"  - failed: {one.case}, {one.name}: {one.why}" for one in report.failed)])


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
