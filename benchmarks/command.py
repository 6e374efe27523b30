"""The command: which cases there are, in which order they run, and how the time is shared out.

python -m benchmarks [CASE ...]        cases of this file
python -m benchmarks gpu               everything about one GPU (`benchmarks.gpu`)
python -m benchmarks report FILE ...   several runs side by side (`benchmarks.report`)
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any, final

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from benchmarks.cases.attention import AttentionShapes, measure_attention
from benchmarks.cases.head import measure_head
from benchmarks.cases.lengths import LengthShapes, measure_headers
from benchmarks.cases.loader import (
    CollateShapes,
    PackShapes,
    PixelShapes,
    measure_collate,
    measure_pack,
    measure_pixels,
)
from benchmarks.cases.plan import PlanShapes, measure_plan
from benchmarks.cases.service import ServiceShapes, measure_service
from benchmarks.cases.step import CompileShapes, measure_compiled, measure_memory, measure_step
from benchmarks.cases.thd import measure_thd
from benchmarks.cases.tree import TreeShapes, measure_tree
from benchmarks.figures import MOST_SEED, BenchSettings, Figure, Report, Skipped, check_budget, environment, place_for
from benchmarks.peers import PeerShapes, measure_peers
from benchmarks.receipts import BY_FORMULA, MEASURED, ReceiptShapes
from benchmarks.report import print_report, report_runs
from benchmarks.timing import CLOCKS
from vlmpack.errors import ConfigError, VlmpackError, check_whole_number


@final
@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to measure."""

    about: str
    """One line for people."""
    run: Callable[[BenchSettings, Any], Sequence[Figure | Skipped]]
    """Measures it; what could not be measured is returned as `Skipped`."""
    shapes: Any
    """The sizes that `run` gets by default: a frozen dataclass."""
    families: Sequence[str] = ()
    """Families of models that it measures, one at a time; none: it is about no family."""
    weight: float = 1.0
    """Its share of a run's time, relative to the others: long rounds need more for an equally stable median."""


CASES: Mapping[str, Case] = {
    "pack": Case(about="pack a padded batch, against copying its bytes", run=measure_pack, shapes=PackShapes()),
    "collate": Case(
        about="collate receipts into a row, against a padded batch", run=measure_collate, shapes=CollateShapes()
    ),
    "pixels": Case(
        about="join the patches of a batch, against a copy of them", run=measure_pixels, shapes=PixelShapes()
    ),
    "plan": Case(about="rows from lengths, planned ahead and from a stream", run=measure_plan, shapes=PlanShapes()),
    "lengths": Case(
        about="lengths of samples from their images' headers, against running the processor",
        run=measure_headers,
        shapes=LengthShapes(),
    ),
    "peers": Case(
        about="other projects on the same tokenised samples, against us", run=measure_peers, shapes=PeerShapes()
    ),
    "attention": Case(
        about="attention on a row, against a padded batch and a dense mask",
        run=measure_attention,
        shapes=AttentionShapes(),
    ),
    "compile": Case(
        about="rows of many lengths through compiled layers: how often they are compiled again",
        run=measure_compiled,
        shapes=CompileShapes(),
        families=MEASURED,
    ),
    "step": Case(
        about="a training step on a row, against Hugging Face's own on the padded batch",
        run=measure_step,
        shapes=ReceiptShapes(),
        families=MEASURED,
        weight=3.0,
    ),
    "tree": Case(
        about="a training step on a row whose samples share prefixes, against the row without sharing",
        run=measure_tree,
        shapes=TreeShapes(),
        families=BY_FORMULA,
        weight=4.0,
    ),
    "memory": Case(
        about="peak memory of those two steps", run=measure_memory, shapes=ReceiptShapes(), families=MEASURED
    ),
    "service": Case(
        about="training requests through the step service's engine, against a loop of one's own",
        run=measure_service,
        shapes=ServiceShapes(),
    ),
    "thd": Case(
        about="a model that takes boundaries, through ThdStep, against finished arguments",
        run=measure_thd,
        shapes=ReceiptShapes(),
    ),
    "head": Case(about="the head on labelled rows, against all rows", run=measure_head, shapes=ReceiptShapes()),
}
"""In the order in which they are run."""


HANDED_OUT = 0.91
"""Share of the time that units get; the rest is for what they set up before they look at a clock."""
NO_FORMULA = "the FLOPs of its families are known by formula, and those of this one are not"
OUT_OF_TIME = "the time was used up before its turn; give a larger --budget, or name it alone"


@final
@dataclass(frozen=True, kw_only=True)
class Unit:
    """One case to be run, of one family if the case measures families."""

    case: str
    """A key of `CASES`."""
    family: str | None
    """A key of `MEASURED`; None: the case is about none."""
    first: bool = True
    """The first of its case, which is measured whether there is time left or not."""

    def __str__(self) -> str:
        return self.case if self.family is None else f"{self.case} {self.family}"


def run_cases(
    names: Sequence[str] = (),
    settings: BenchSettings | None = None,
    *,
    families: Sequence[str] = (),
    before: Callable[[Unit], None] = lambda unit: None,
) -> Report:
    """Run the named cases, or all of them, each for every family if it measures families.

    A unit gets its share (`Case.weight`) of the time that is left when its turn comes. The first unit of every case is
    always measured. After it, units whose turn comes when `settings.seconds` for each unit have passed are skipped, and
    the report lists them.

    Args:
        names: keys of `CASES`; none: all, in its order.
        settings: of the run, `seconds` for each unit; None: the defaults.
        families: keys of `MEASURED`; none: that of `settings`.
        before: called with each unit before it starts.

    Raises:
        ConfigError: there is no such case or family.
    """
    settings = settings or BenchSettings()
    names, families = names or list(CASES), families or [settings.family]
    units = units_of(names, families)
    figures, skipped = [], []
    ends = time.perf_counter() + HANDED_OUT * settings.seconds * len(units)
    for turn, unit in enumerate(units):
        left = ends - time.perf_counter()
        if not unit.first and left < 0:
            skipped.append(Skipped(case=unit.case, name=unit.family or unit.case, why=OUT_OF_TIME, owed=True))
            continue
        if unit.family is not None and unit.family not in CASES[unit.case].families:
            skipped.append(Skipped(case=unit.case, name=unit.family, why=NO_FORMULA))
            continue
        before(unit)
        case, weights = CASES[unit.case], sum(CASES[later.case].weight for later in units[turn:])
        seconds = max(left, 0.0) * case.weight / weights
        unit_settings = replace(settings, family=unit.family or settings.family, seconds=seconds)
        for figure in case.run(unit_settings, case.shapes):
            (figures if isinstance(figure, Figure) else skipped).append(figure)
    return Report(
        figures=tuple(figures),
        environment=environment(settings.device),
        settings={**asdict(settings), "family": list(families)},
        shapes={name: asdict(CASES[name].shapes) for name in names},
        skipped=tuple(skipped),
    )


def units_of(names: Sequence[str], families: Sequence[str]) -> list[Unit]:
    """The units of a run in their order.

    Raises:
        ConfigError: there is no such case or family.
    """
    for kind, chosen, choices in (("case", names, list(CASES)), ("family", families, list(MEASURED))):
        if unknown := [name for name in chosen if name not in choices]:
            raise ConfigError(f"there is no {kind} {', '.join(map(repr, unknown))}; choose from {', '.join(choices)}")
    return [
        Unit(case=name, family=family, first=i == 0)
        for name in names
        for i, family in enumerate(families if CASES[name].families else [None])
    ]


GPU = "gpu"
"""The first word of the command that measures everything about one GPU, `benchmarks.gpu`."""
REPORT = "report"
"""The first word of the command that puts reports side by side, `benchmarks.report`."""
ALL = "all"
"""In place of a family: every one."""
SECONDS = 60.0
"""Time for one case, or for one family of it, where no budget is given."""


def main(arguments: Sequence[str] | None = None, *, console: Console | None = None) -> int:
    """Measure, print a table, and return the exit status.

    Args:
        arguments: of the command line; None: those of the process.
        console: where to print; None: the terminal.

    Returns:
        0: measured; 1: `--check` was given and a target was missed, or there was no time to measure it; 2: could not
        be run with these arguments.
    """
    try:
        return measure(sys.argv[1:] if arguments is None else arguments, console=console)
    except VlmpackError as error:
        (console or Console(stderr=True)).print(Text(str(error), style="red"), soft_wrap=True)
        return 2


def measure(arguments: Sequence[str], *, console: Console | None = None) -> int:
    """Measure and print a table like `main`, but raise errors.

    Raises:
        VlmpackError: it cannot be run with these arguments.
    """
    console, words = console or _console(), list(arguments)
    if words[:1] == [GPU]:
        from benchmarks.gpu import main as measure_gpu

        return measure_gpu(words[1:], console=console)
    if words[:1] == [REPORT]:
        return report_runs(words[1:], console=console)
    return _measure(_parser().parse_args(words), console)


def _measure(chosen: argparse.Namespace, console: Console) -> int:
    _check(chosen)
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    names = chosen.cases or list(CASES)
    families = list(MEASURED) if ALL in chosen.family else chosen.family or [BenchSettings.family]
    units = len(units_of(names, families))
    budget = SECONDS * units if chosen.budget is None else chosen.budget
    settings = BenchSettings(device=chosen.device, seconds=budget / units, clock=chosen.clock, seed=chosen.seed)
    path = place_for(chosen.json, option="--json") if chosen.json else None
    with _bar(console, units) as before:
        report = run_cases(names, settings, families=families, before=before)
    try:
        if path is not None:
            report.save(path)
    finally:  # figures that took minutes are printed and kept, whichever of the two fails
        print_report(report, console)
    return 1 if chosen.check and not report.complete else 0


def _check(chosen: argparse.Namespace) -> None:
    """Refuse numbers and devices that cannot be measured with.

    Raises:
        ConfigError: one of them cannot.
    """
    there = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if chosen.device not in (*there, *(["cuda"] if torch.cuda.is_available() else [])):
        raise ConfigError(f"--device {chosen.device}: PyTorch sees {', '.join(there)} here; choose from these")
    if chosen.threads is not None:
        check_whole_number("--threads", chosen.threads)
    if chosen.budget is not None:
        check_budget(chosen.budget)
    check_whole_number("--seed", chosen.seed, at_least=0, at_most=MOST_SEED)


@contextmanager
def _bar(console: Console, units: int) -> Iterator[Callable[[Unit], None]]:
    """Show a progress bar over units; yields a function to be called with each before it starts."""
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=_ABOUT, epilog=_cases_in_words())
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"what to measure: {', '.join(CASES)} (default: all)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument(
        "--family",
        action="append",
        default=[],
        metavar="NAME",
        help=f"whose step to measure, may be repeated: {', '.join(MEASURED)}, or all (default: {BenchSettings.family})",
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
    "As the first word, `gpu` measures everything about one GPU instead, and `report FILE...` puts what "
    "several runs wrote with --json side by side; both have a --help of their own."
)


def _cases_in_words() -> str:
    return "; ".join(f"{name}: {case.about}" for name, case in CASES.items())
