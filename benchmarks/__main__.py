"""The benchmark command: the cases, their order, and how they share the time.

python -m benchmarks [CASE ...]    cases of this file
python -m benchmarks.gpu           all benchmarks of one GPU
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from rich.console import Console

from benchmarks.cases.attention import measure_head
from benchmarks.cases.collating import (
    CollateShapes,
    LengthShapes,
    PackShapes,
    PixelShapes,
    measure_collate,
    measure_headers,
    measure_pack,
    measure_pixels,
)
from benchmarks.cases.planning import PlanShapes, measure_plan
from benchmarks.cases.sampling import SamplingShapes, measure_sampling
from benchmarks.cases.step import CompileShapes, measure_compiled, measure_host, measure_step
from benchmarks.cases.tree import TreeShapes, measure_tree
from benchmarks.measuring import CLOCKS, BenchSettings, Figure, Report, Skipped, environment
from benchmarks.peers import PeerShapes, measure_peers
from benchmarks.receipts import MEASURED, ReceiptShapes
from vlmpack.errors import VlmpackError, check_whole_number


@final
@dataclass(frozen=True, kw_only=True)
class Case:
    """A benchmark case."""

    about: str
    run: Callable[[BenchSettings, Any], Iterable[Figure | Skipped]]
    shapes: Any
    """Sizes that `run` gets: a frozen dataclass."""
    by_family: bool = False
    """True if the case measures one model family at a time."""
    weight: float = 1.0
    """Relative share of a run's time. Cases with long rounds need more time for an equally stable median."""


_DEEP = ReceiptShapes(hidden=64, layers=28, kv_heads=1, vision_hidden=64, vision_depth=2, longest=64)
CASES: Mapping[str, Case] = {
    "pack": Case(about="pack a padded batch, against copying its bytes", run=measure_pack, shapes=PackShapes()),
    "collate": Case(about="collate receipts, packed against padded", run=measure_collate, shapes=CollateShapes()),
    "pixels": Case(about="join the patches of a batch, against a copy", run=measure_pixels, shapes=PixelShapes()),
    "plan": Case(about="rows from lengths, planned ahead and from a stream", run=measure_plan, shapes=PlanShapes()),
    "lengths": Case(about="lengths by headers, against the processor", run=measure_headers, shapes=LengthShapes()),
    "peers": Case(about="other projects on the same tokenized samples", run=measure_peers, shapes=PeerShapes()),
    "compile": Case(about="layers compiled again", run=measure_compiled, shapes=CompileShapes(), by_family=True),
    "step": Case(about="packed against padded", run=measure_step, shapes=ReceiptShapes(), by_family=True, weight=3.0),
    "host": Case(about="the host's own time", run=measure_host, shapes=_DEEP, by_family=True),
    "tree": Case(about="prefixes computed once", run=measure_tree, shapes=TreeShapes(), by_family=True, weight=4.0),
    "head": Case(about="the head on labelled rows, against all rows", run=measure_head, shapes=ReceiptShapes()),
    "sampling": Case(about="against continuous batching", run=measure_sampling, shapes=SamplingShapes()),
}
"""The cases, in the order in which they run."""


def run_cases(
    names: Sequence[str],
    settings: BenchSettings,
    families: Sequence[str],
    before: Callable[[str], None] = lambda unit: None,
) -> Report:
    """Run the named cases, and repeat those that measure a family for every family.

    Each case gets its share (`Case.weight`) of the time that is left when its turn comes, but always its minimum number
    of rounds. The first family of every case is always measured. Other families are skipped, and listed in the report,
    if the total time (`settings.seconds` for each case and family) is over when their turn comes.
    """
    units = [(name, family) for name in names for family in (families if CASES[name].by_family else [None])]
    ends = time.perf_counter() + 0.91 * settings.seconds * len(units)  # the rest is for setup
    figures: list[Figure] = []
    skipped: list[Skipped] = []
    for turn, (name, family) in enumerate(units):
        left = ends - time.perf_counter()
        if family is not None and family != families[0] and left < 0:
            why = "the time was used up before its turn; give a larger --budget, or name it alone"
            skipped.append(Skipped(case=name, name=family, why=why, owed=True))
            continue
        case, weights = CASES[name], sum(CASES[later].weight for later, _ in units[turn:])
        before(f"{name} {family or ''}: {case.about}")
        seconds = max(left, 0.0) * case.weight / weights
        for entry in case.run(replace(settings, family=family or settings.family, seconds=seconds), case.shapes):
            kept: list[Any] = figures if isinstance(entry, Figure) else skipped
            kept.append(entry)
    return Report(
        figures=figures,
        environment=environment(settings.device),
        settings={**asdict(settings), "family": list(families)},
        shapes={name: asdict(CASES[name].shapes) for name in names},
        skipped=skipped,
    )


def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Measure, print a table, and return the exit status.

    Returns:
        0: success; 1: `--check` was given, and a target was missed or not measured for lack of time; 2: the arguments
        are invalid.
    """
    chosen, console = _parser().parse_args(arguments), console or Console()
    try:
        if chosen.threads is not None:
            torch.set_num_threads(check_whole_number("--threads", chosen.threads))
        check_whole_number("--seed", chosen.seed, at_least=0)
        names, families = chosen.cases or list(CASES), chosen.family or [BenchSettings.family]
        families = list(MEASURED) if "all" in families else families
        units = sum(len(families) if CASES[name].by_family else 1 for name in names)
        seconds = 60.0 if chosen.budget is None else chosen.budget / units
        settings = BenchSettings(device=chosen.device, seconds=seconds, clock=chosen.clock, seed=chosen.seed)
        path = chosen.json
        with console.status("") as status:
            report = run_cases(names, settings, families, before=status.update)
    except VlmpackError as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 2
    report.print(console)
    if path:
        report.save(path)
    return 1 if chosen.check and not report.complete else 0


def _parser() -> argparse.ArgumentParser:
    cases = "; ".join(f"{name}: {case.about}" for name, case in CASES.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure vlmpack against what it replaces, alternating in one process.",
        epilog=cases,
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", type=_one_of(CASES), help="what to measure (default: all)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures to this file")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument(
        "--family",
        action="append",
        metavar="NAME",
        type=_one_of([*MEASURED, "all"]),
        help=f"whose step to measure, may be repeated: {', '.join(MEASURED)}, or all (default: {BenchSettings.family})",
    )
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="for everything (60 a case and family)")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu on a machine that others use (wall)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of PyTorch (default: its own choice)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, ids and pixels (default: 0)")
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a target is missed or skipped")
    return parser


def _one_of(names: Iterable[str]) -> Callable[[str], str]:
    def checked(name: str) -> str:
        if name not in names:
            raise argparse.ArgumentTypeError(f"there is no {name!r}; choose from {', '.join(names)}")
        return name

    return checked


if __name__ == "__main__":
    sys.exit(main())
