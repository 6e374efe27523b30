"""`vlmpack bench report`: JSON files of benchmark runs as one Markdown table, and a picture of their ratios."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from vlmpack.cli.folder import made_folder
from vlmpack.cli.need import need
from vlmpack.errors import ConfigError
from vlmpack.terminal import print_table

if TYPE_CHECKING:
    from vlmpack.bench import Report
    from vlmpack.plots import Ratio

TABLE, PICTURE = "report.md", "report.png"

report_app = typer.Typer(add_completion=False)


@report_app.command()
def report(
    files: Annotated[list[Path], typer.Argument(help="What `vlmpack bench --json FILE` wrote; a column each.")],
    out: Annotated[
        Path | None, typer.Option(help=f"Folder for {TABLE} and {PICTURE}; without it: a table, in a pipe Markdown.")
    ] = None,
) -> None:
    """Put the figures of several runs side by side."""
    from vlmpack.bench import Report, markdown

    reports = {name: Report.load(path) for name, path in _names(files).items()}
    text = markdown(reports)
    if out is None:
        console = Console()
        if console.is_terminal:
            print_runs(reports, console)
        else:
            typer.echo(text, nl=False)
        return
    made_folder("--out", out)
    (out / TABLE).write_text(text, encoding="utf-8")
    typer.echo(f"{out / TABLE}")
    if any(_ratios(one) for one in reports.values()):
        typer.echo(f"{_draw(reports, out / PICTURE)}")


def print_runs(reports: Mapping[str, Report], console: Console) -> None:
    """The figures of some runs at a terminal, then where each was made."""
    from vlmpack.bench import runs, tables_of_runs

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
            raise ConfigError(f"there is no file {path}; `vlmpack bench --json {path}` writes one")
    stems = [path.stem for path in files]
    names = stems if len(set(stems)) == len(stems) else [str(path) for path in files]
    if len(set(names)) < len(names):
        raise ConfigError(f"a file is named twice: {', '.join(names)}")
    return dict(zip(names, files, strict=True))


def _draw(reports: Mapping[str, Report], path: Path) -> Path:
    need("bench report --out", "matplotlib", extra="plots")
    from vlmpack.plots import plot_ratios, save

    return save(plot_ratios({name: _ratios(one) for name, one in reports.items()}), path)


def _ratios(report: Report) -> list[Ratio]:
    """What a run measured as ratios of two times or two sizes."""
    from vlmpack.plots import Ratio

    return [
        Ratio(
            name=f"{figure.case if figure.family is None else f'{figure.case} {figure.family}'}: {figure.name}",
            value=figure.value,
            low=figure.value if figure.low is None else figure.low,
            high=figure.value if figure.high is None else figure.high,
            target=None if figure.target is None else figure.target.limit,
        )
        for figure in report.figures
        if figure.unit == "x" and figure.value > 0
    ]
