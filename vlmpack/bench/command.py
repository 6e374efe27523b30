"""The command: `python -m vlmpack.bench [CASE ...]`."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from vlmpack.bench.cases import CASES
from vlmpack.bench.figure import place_for
from vlmpack.bench.run import Unit, run_cases, units_of
from vlmpack.bench.settings import CLOCKS, BenchSettings, check_budget, check_seed
from vlmpack.bench.table import print_report
from vlmpack.errors import ConfigError, VlmpackError
from vlmpack.families import FAMILIES

GPU = "gpu"
"""The first word of the command that measures everything about one GPU, `vlmpack.bench.gpu`."""
ALL = "all"
"""In place of a family: every one."""
SECONDS = 60.0
"""Time for one case, or for one family of it, unless told otherwise."""


def main(arguments: Sequence[str] | None = None, *, console: Console | None = None) -> int:
    """Measure, print a table, and say by the exit status how it went.

    Args:
        arguments: of the command line; None: those of the process.
        console: where to print; None: the terminal.

    Returns:
        0: measured; 1: `--check` was given and a target was missed, or there was no time to measure it; 2: could not
        be run as asked.
    """
    try:
        return measure(sys.argv[1:] if arguments is None else arguments, console=console)
    except VlmpackError as error:
        (console or Console(stderr=True)).print(Text(str(error), style="red"), soft_wrap=True)
        return 2


def measure(arguments: Sequence[str], *, console: Console | None = None) -> int:
    """`main`, but that what could not be run as asked is raised.

    Raises:
        VlmpackError: it could not.
    """
    console, words = console or _console(), list(arguments)
    if words[:1] == [GPU]:
        from vlmpack.bench.gpu import main as gpu

        return gpu(words[1:], console=console)
    return _measure(_parser().parse_args(words), console)


def _measure(chosen: argparse.Namespace, console: Console) -> int:
    _check(chosen)
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    names = chosen.cases or list(CASES)
    families = list(FAMILIES) if ALL in chosen.family else chosen.family or [BenchSettings.family]
    units = len(units_of(names, families))
    budget = SECONDS * units if chosen.budget is None else chosen.budget
    settings = BenchSettings(device=chosen.device, seconds=budget / units, clock=chosen.clock, seed=chosen.seed)
    path = place_for(chosen.json, option="--json") if chosen.json else None
    with _bar(console, units) as before:
        report = run_cases(names, settings, families=families, before=before)
    try:
        if path is not None:
            report.save(path)
    finally:  # figures that took minutes are told and kept, whichever of the two cannot be done
        print_report(report, console)
    return 1 if chosen.check and not report.complete else 0


def _check(chosen: argparse.Namespace) -> None:
    """Numbers and a device that can be measured with.

    Raises:
        ConfigError: one of them cannot.
    """
    there = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if chosen.device not in (*there, *(["cuda"] if torch.cuda.is_available() else [])):
        raise ConfigError(f"--device {chosen.device}: PyTorch sees {', '.join(there)} here; choose from these")
    if chosen.threads is not None and chosen.threads < 1:
        raise ConfigError(f"--threads {chosen.threads}: give 1 or more, or leave it out for PyTorch's own choice")
    if chosen.budget is not None:
        check_budget(chosen.budget)
    check_seed(chosen.seed)


@contextmanager
def _bar(console: Console, units: int) -> Iterator[Callable[[Unit], None]]:
    """A progress bar over units; gives a function that is told each before it starts."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=units)
        begun = count()

        def before(unit: Unit) -> None:
            about = f"[bold]{unit}[/]: {CASES[unit.case].about}"
            progress.update(bar, description=about, completed=next(begun))

        yield before


def _console() -> Console:
    """The terminal, or a file or pipe. What it cannot write comes as an escape."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")
    return Console()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vlmpack bench", description=_ABOUT, epilog=_cases_in_words())
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"what to measure: {', '.join(CASES)} (default: all)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument(
        "--family",
        action="append",
        default=[],
        metavar="NAME",
        help=f"whose step to measure, may be repeated: {', '.join(FAMILIES)}, or all (default: {BenchSettings.family})",
    )
    parser.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help=f"time for everything together (default: {SECONDS:.0f} for each case, or for each family of it)",
    )
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="which clock decides; cpu on a machine that others use too (default: wall)",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="threads of PyTorch (default: its own choice)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, ids and pixels (default: 0)")
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a target is missed or skipped")
    return parser


_ABOUT = (
    "Measure vlmpack against what it replaces, alternating in one process. "
    "As the first word, `gpu` measures everything about one GPU instead, and `vlmpack bench report FILE...` puts what "
    "several runs wrote with --json side by side; both have a --help of their own."
)


def _cases_in_words() -> str:
    return "; ".join(f"{name}: {case.about}" for name, case in CASES.items())
