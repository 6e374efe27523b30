"""Several reports as one Markdown table: a line a figure, a column a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vlmpack.bench.figure import Figure, Report
from vlmpack.bench.table import readable, target_in_words

Line = tuple[str, str | None, str]
"""Case, family and name of a figure: what makes figures of two runs the same."""


def markdown(reports: Mapping[str, Report]) -> str:
    """One table of all figures, in the order in which they first appear, then where each run was made.

    Args:
        reports: by the name that heads their column; at least one.
    """
    found = {name: {_line(figure): figure for figure in report.figures} for name, report in reports.items()}
    lines = list(dict.fromkeys(line for figures in found.values() for line in figures))
    table = [
        _row("case", "figure", *reports, "target"),
        _row(*["---"] * 2, *["---:"] * (len(reports) + 1)),
        *(_figures(line, [figures.get(line) for figures in found.values()]) for line in lines),
    ]
    return "\n".join([*table, "", *(_run(name, report) for name, report in reports.items())]) + "\n"


def _line(figure: Figure) -> Line:
    return figure.case, figure.family, figure.name


def _figures(line: Line, figures: Sequence[Figure | None]) -> str:
    case, family, name = line
    target = next((figure.target for figure in figures if figure is not None and figure.target), None)
    words = "" if target is None else target_in_words(target)
    return _row(case if family is None else f"{case} {family}", name, *map(_cell, figures), words)


def _cell(figure: Figure | None) -> str:
    """The value with its quartiles; in bold if it misses its target."""
    if figure is None:
        return ""
    value = readable([figure.value], figure.unit)
    if figure.met is False:
        value = f"**{value}**"
    if figure.low is None or figure.high is None:
        return value
    return f"{value} ({readable([figure.low, figure.high], figure.unit)})"


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
