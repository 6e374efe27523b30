"""Figures as a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from vlmpack.bench.figure import Figure, Report, Target

_UNITS = {
    "s": ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms")),
    "bytes": ((2**10, 1.0, "bytes"), (2**20, 2**-10, "KiB"), (2**60, 2**-20, "MiB")),
}
"""unit -> (numbers below this, are multiplied by this, and get this unit)"""


def table(report: Report) -> Table:
    """One line a figure: the value, how it spread over the rounds, and its target."""
    found = Table()
    for name in ("case", "figure"):
        found.add_column(name, no_wrap=True)
    for name in ("median", "quartiles", "rounds", "target"):
        found.add_column(name, justify="right")
    last = None
    for figure in report.figures:
        group = _group(figure)
        if last and group != last:
            found.add_section()
        found.add_row("" if group == last else group, figure.name, *_cells(figure))
        last = group
    return found


def tables_of_families(report: Report) -> list[Table]:
    """One table for each case that measured several families: a line a family, its ratios side by side."""
    return [_side_by_side(case, figures) for case, figures in _ratios(report).items() if len(figures) > 1]


def skipped(report: Report) -> list[Text]:
    """A line for each thing that was left out, and for each that broke."""
    lines = [Text(f"skipped: {one.case}, {one.name}: {one.why}", style="yellow") for one in report.skipped]
    return lines + [Text(f"failed: {one.case}, {one.name}: {one.why}", style="bold red") for one in report.failed]


def _ratios(report: Report) -> dict[str, dict[str, list[Figure]]]:
    """case -> family -> its ratios."""
    found: dict[str, dict[str, list[Figure]]] = {}
    for figure in report.figures:
        if figure.family is not None and figure.unit == "x":
            found.setdefault(figure.case, {}).setdefault(figure.family, []).append(figure)
    return found


def _side_by_side(case: str, figures: Mapping[str, Sequence[Figure]]) -> Table:
    found = Table()
    found.add_column(case, no_wrap=True)
    for figure in next(iter(figures.values())):
        found.add_column(figure.name, justify="right")
    for family, ratios in figures.items():
        found.add_row(family, *(_short(ratio) for ratio in ratios))
    return found


def _short(figure: Figure) -> Text:
    """The value, and by its colour whether a target was missed."""
    style = {None: "", True: "green", False: "bold red"}[figure.met]
    return Text(f"{figure.value:.3g}" + " missed" * (figure.met is False), style=style)


def _group(figure: Figure) -> str:
    return figure.case if figure.family is None else f"{figure.case} {figure.family}"


def readable(values: Sequence[float], unit: str) -> str:
    """Numbers with one unit, three digits or so: `[0.00152, 0.00161]` of "s" are "1.52 to 1.61 ms"."""
    factor, name = _scale(max(map(abs, values)), unit)
    scaled = [value * factor for value in values]
    return " to ".join(f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" for value in scaled) + f" {name}"


def _scale(largest: float, unit: str) -> tuple[float, str]:
    """(factor, name) of the unit in which a number is easy to read."""
    for below, factor, name in _UNITS.get(unit, ()):
        if largest < below:
            return factor, name
    return 1.0, unit


def _cells(figure: Figure) -> tuple[str | Text, ...]:
    spread = ""
    if figure.low is not None and figure.high is not None:
        spread = readable([figure.low, figure.high], figure.unit)
    return readable([figure.value], figure.unit), spread, str(figure.rounds or "exact"), _target(figure)


def _target(figure: Figure) -> Text:
    if figure.target is None:
        return Text("")
    words = f"{target_in_words(figure.target)} {'reached' if figure.met else 'missed'}"
    return Text(words, style="green" if figure.met else "bold red")


def target_in_words(target: Target) -> str:
    """`≤ 1.3`."""
    return f"{'≤' if target.better == 'lower' else '≥'} {target.limit:g}"


def title(report: Report) -> str:
    """One line: with what, and where."""
    where = report.environment
    return (
        f"vlmpack {where['vlmpack']}, torch {where['torch']}, transformers {where['transformers']}, "
        f"{where['device_name']}, {where['threads']} threads, {report.settings['clock']} clock"
    )
