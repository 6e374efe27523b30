"""Reports for people: one run as a table, several runs side by side, as Markdown."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from benchmarks.figures import Figure, Report
from vlmpack.errors import ConfigError
from vlmpack.terminal import GAP, NEEDED, print_table, print_text

_UNITS = {
    "s": ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms")),
    "bytes": ((2**10, 1.0, "bytes"), (2**20, 2**-10, "KiB"), (2**60, 2**-20, "MiB")),
}
"""unit -> (numbers below this, are multiplied by this, and get this unit)"""
NAMES = 30
"""Columns of a terminal for the names of figures, which wrap."""


def print_report(report: Report, console: Console) -> None:
    """Print where a run was made, its figures, its families side by side, and what it left out."""
    print_text(console, title(report))
    width = console.width if console.is_terminal else NEEDED
    for part in (table(report), *tables_of_families(report, width=width)):
        print_table(console, part)
    for line in skipped(report):
        print_text(console, line)


def table(report: Report) -> Table:
    """Make a line a figure, below its case: value, quartiles over the rounds, and target, all in one unit."""
    lines = _table("figure", "median", "quartiles", "rounds", "target")
    last = None
    for figure in report.figures:
        group = _group(figure)
        if group != last:
            if last is not None:
                lines.add_section()
            lines.add_row(Text(group, style="bold"))
        lines.add_row(Padding(figure.name, (0, 0, 0, 2), expand=False), *_cells(figure))
        last = group
    return lines


def tables_of_families(report: Report, *, width: int) -> list[Table]:
    """For each case that measured several families a line a family, its ratios side by side.

    A case has as many tables as it takes to fit them into `width` columns.
    """
    return [
        part
        for case, figures in _ratios_by_family(report).items()
        if len(figures) > 1
        for part in _by_family(case, figures, width)
    ]


def tables_of_runs(reports: Mapping[str, Report], *, width: int) -> list[Table]:
    """Put reports side by side: a line a figure, a column a run, in as many tables as `width` needs.

    Args:
        reports: by the name that heads their column; at least part.
        width: of the terminal.
    """
    lines = lines_of(reports)
    names = [f"{line.group}: {line.name}" + (f" ({line.target})" if line.target else "") for line in lines]
    cells = [[_coloured(line.figures[run]) for line in lines] for run in range(len(reports))]
    runs = list(reports)
    tables = []
    for run in columns_that_fit(runs, cells, taken=NAMES, width=width):
        part = _table("figure", *map(wrapped, runs[run]))
        for at, name in enumerate(names):
            part.add_row(name, *(column[at] for column in cells[run]))
        tables.append(part)
    return tables


def skipped(report: Report) -> list[Text]:
    """A line for each thing that was left out, and for each that broke."""
    lines = [Text(f"skipped: {entry.case}, {entry.name}: {entry.why}", style="yellow") for entry in report.skipped]
    return lines + [
        Text(f"failed: {entry.case}, {entry.name}: {entry.why}", style="bold red") for entry in report.failed
    ]


def _ratios_by_family(report: Report) -> dict[str, dict[str, list[Figure]]]:
    """case -> family -> its ratios."""
    ratios: dict[str, dict[str, list[Figure]]] = {}
    for figure in report.figures:
        if figure.family is not None and figure.unit == "x":
            ratios.setdefault(figure.case, {}).setdefault(figure.family, []).append(figure)
    return ratios


def _by_family(case: str, figures: Mapping[str, Sequence[Figure]], width: int) -> Iterator[Table]:
    titles = [figure.name for figure in next(iter(figures.values()))]
    cells = [[_short(ratio) for ratio in column] for column in zip(*figures.values(), strict=True)]
    for run in columns_that_fit(titles, cells, taken=max(map(len, (case, *figures))), width=width):
        part = _table(case, *map(wrapped, titles[run]))
        for at, family in enumerate(figures):
            part.add_row(family, *(column[at] for column in cells[run]))
        yield part


def _table(first: str, *numbers: str) -> Table:
    empty = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    empty.add_column(first, overflow="fold")
    for title in numbers:
        empty.add_column(title, justify="right", no_wrap=True)
    return empty


def _short(figure: Figure) -> Text:
    """The value, and by its colour whether a target was missed."""
    style = {None: "", True: "green", False: "bold red"}[figure.met]
    return Text(f"{figure.value:.3g}" + " missed" * (figure.met is False), style=style)


def _group(figure: Figure) -> str:
    return figure.case if figure.family is None else f"{figure.case} {figure.family}"


@final
@dataclass(frozen=True, kw_only=True)
class Line:
    """The same figure of several runs."""

    group: str
    """Case and family."""
    name: str
    """Of the figure."""
    figures: tuple[Figure | None, ...]
    """Of each run; None: it has none."""

    @property
    def target(self) -> str:
        """The target, of the first run that has one; nothing where none has."""
        return next((target_in_words(figure) for figure in self.figures if figure is not None and figure.target), "")


def lines_of(reports: Mapping[str, Report]) -> list[Line]:
    """All figures of some runs, in the order in which they first appear."""
    runs = [{(_group(figure), figure.name): figure for figure in report.figures} for report in reports.values()]
    keys = dict.fromkeys(key for figures in runs for key in figures)
    return [Line(group=key[0], name=key[1], figures=tuple(figures.get(key) for figures in runs)) for key in keys]


def readable(values: Sequence[float], unit: str, *, like: float | None = None) -> str:
    """Numbers with one unit, three digits or so: `[0.00152, 0.00161]` of "s" are "1.52 to 1.61 ms".

    Args:
        values: one or more.
        unit: theirs.
        like: the number beside which they stand, and which chooses the unit; None: the largest of them.
    """
    factor, name = _scale(max(map(abs, values)) if like is None else abs(like), unit)
    return f"{_digits(values, factor)} {name}"


def _digits(values: Sequence[float], factor: float) -> str:
    scaled = [value * factor for value in values]
    return " to ".join(f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" for value in scaled)


def _scale(largest: float, unit: str) -> tuple[float, str]:
    """Choose the unit in which a number is easy to read: (factor, name)."""
    for below, factor, name in _UNITS.get(unit, ()):
        if largest < below:
            return factor, name
    return 1.0, unit


def _coloured(figure: Figure | None) -> Text:
    return Text(cell_of(figure), style="bold red" if figure is not None and figure.met is False else "")


def cell_of(figure: Figure | None) -> str:
    """The value with its quartiles, in its unit."""
    if figure is None:
        return ""
    spread = quartiles(figure)
    return readable([figure.value], figure.unit) + (f" ({spread})" if spread else "")


def quartiles(figure: Figure) -> str:
    """Both, in the unit of the figure's value; nothing for an exact number."""
    if figure.low is None or figure.high is None:
        return ""
    return _digits([figure.low, figure.high], _scale(abs(figure.value), figure.unit)[0])


def _cells(figure: Figure) -> tuple[str | Text, ...]:
    return readable([figure.value], figure.unit), quartiles(figure), str(figure.rounds or "exact"), _target(figure)


def _target(figure: Figure) -> Text:
    if figure.target is None:
        return Text("")
    words = f"{target_in_words(figure)} {'reached' if figure.met else 'missed'}"
    return Text(words, style="green" if figure.met else "bold red")


def target_in_words(figure: Figure) -> str:
    """`≤ 20 µs`, in the unit of the figure's value; nothing where it has no target."""
    if figure.target is None:
        return ""
    limit = readable([figure.target.limit], figure.unit, like=figure.value)
    return f"{'≤' if figure.target.better == 'lower' else '≥'} {limit}"


def title(report: Report) -> str:
    """One line: with what, and where."""
    where = report.environment
    return (
        f"vlmpack {where['vlmpack']}, torch {where['torch']}, transformers {where['transformers']}, "
        f"{where['device_name']}, {where['threads']} threads, {report.settings['clock']} clock"
    )


def markdown(reports: Mapping[str, Report]) -> str:
    """One table of all figures, in the order in which they first appear, then where each run was made.

    Args:
        reports: by the name that heads their column; at least one.
    """
    table = [
        _markdown_row("case", "figure", *reports, "target"),
        _markdown_row(*["---"] * 2, *["---:"] * (len(reports) + 1)),
        *(
            _markdown_row(line.group, line.name, *map(_markdown_cell, line.figures), line.target)
            for line in lines_of(reports)
        ),
    ]
    return "\n".join([*table, "", *runs(reports)]) + "\n"


def runs(reports: Mapping[str, Report]) -> list[str]:
    """For each run its versions and place, and what it left out."""
    return [_markdown_run(name, report) for name, report in reports.items()]


def _markdown_cell(figure: Figure | None) -> str:
    """The value with its quartiles; in bold if it misses its target."""
    value, bracket, spread = cell_of(figure).partition(" (")
    bold = figure is not None and figure.met is False
    return f"{f'**{value}**' if bold else value}{bracket}{spread}"


def _markdown_run(name: str, report: Report) -> str:
    """A run's versions and place, and what it left out."""
    where = report.environment
    commit = where["commit"] or "no commit"
    line = (
        f"- {name}: vlmpack {where['vlmpack']} ({commit[:12]}{'+' if commit.endswith('+') else ''}), "
        f"Python {where['python']}, torch {where['torch']}, transformers {where['transformers']}, "
        f"{where['device_name']}, {where['threads']} threads, {report.settings['clock']} clock, "
        f"seed {report.settings['seed']}"
    )
    skipped = [f"  - skipped: {entry.case}, {entry.name}: {entry.why}" for entry in report.skipped]
    return "\n".join(
        [line, *skipped, *(f"  - failed: {entry.case}, {entry.name}: {entry.why}" for entry in report.failed)]
    )


def _markdown_row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def report_runs(arguments: Sequence[str], *, console: Console | None = None) -> int:
    """Put the figures of several runs side by side: `python -m benchmarks report FILE...`.

    Args:
        arguments: of the command line, after `report`.
        console: where to print; None: the terminal.

    Returns:
        0, the exit status.

    Raises:
        ConfigError: a file is missing, named twice or no report.
    """
    options, console = _parser().parse_args(arguments), console or Console()
    reports = {name: Report.load(path) for name, path in _names(options.files).items()}
    if console.is_terminal:
        print_runs(reports, console)
    else:
        console.file.write(markdown(reports))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description=_ABOUT)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="written with --json; a column each")
    return parser


_ABOUT = "Put the figures of several runs side by side: a table at a terminal, Markdown in a pipe."


def print_runs(reports: Mapping[str, Report], console: Console) -> None:
    """The figures of some runs at a terminal, then where each was made."""
    for table in tables_of_runs(reports, width=console.width):
        print_table(console, table)
    console.print(*runs(reports), sep="\n", markup=False, highlight=False)


def _names(files: list[Path]) -> dict[str, Path]:
    """Each file by its name without the suffix, or by its path where two have the same.

    Raises:
        ConfigError: a file is not there, or is named twice.
    """
    for path in files:
        if not path.is_file():
            raise ConfigError(f"there is no file {path}; `python -m benchmarks --json {path}` writes one")
    stems = [path.stem for path in files]
    names = stems if len(set(stems)) == len(stems) else [str(path) for path in files]
    if len(set(names)) < len(names):
        raise ConfigError(f"a file is named twice: {', '.join(names)}")
    return dict(zip(names, files, strict=True))


def columns_that_fit(
    titles: Sequence[str], cells: Sequence[Sequence[str | Text]], *, taken: int, width: int
) -> Iterator[slice]:
    """Yield runs of columns that fit a table side by side, at least one each.

    Args:
        titles: of the columns; they wrap, but no word of them does.
        cells: of each column; they do not wrap.
        taken: columns of the terminal in front of each run.
        width: columns of the terminal.
    """
    start, used = 0, taken
    for at, (title, column) in enumerate(zip(titles, cells, strict=True)):
        needed = GAP + max(len(line) for line in [*wrapped(title).splitlines(), *map(str, column)])
        if used + needed > width and at > start:
            yield slice(start, at)
            start, used = at, taken
        used += needed
    yield slice(start, len(titles))


def wrapped(title: str) -> str:
    """Break a column's title into lines of a few words."""
    return textwrap.fill(title, 14, break_long_words=False, break_on_hyphens=False)
