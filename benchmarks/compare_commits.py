"""Compare two checkouts on this machine, in turn: `python -m benchmarks.compare_commits EARLIER LATER`.

    git worktree add ../earlier COMMIT
    python -m benchmarks.compare_commits ../earlier . --rounds 5 --check

Each round runs every case in both checkouts, one right after the other, each in a process of its own, and the order
changes with every round. A ratio is that of two runs of one round; its median and quartiles over the rounds are
printed. Both checkouts need the packages of the interpreter that runs this, and are imported from their own folder.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.figures import Figure, Report
from benchmarks.report import readable
from benchmarks.timing import CLOCKS, Spread
from vlmpack.errors import ConfigError, VlmpackError, check_whole_number
from vlmpack.terminal import print_table, print_text

CASES = ("step", "collate", "pack", "plan", "pixels")
MODULES = ("benchmarks", "vlmpack.bench")
"""Modules that run the benchmarks of a checkout, the newer first."""
TOLERANCE = 0.03
"""Share by which a figure may be worse."""
LOWER_IS_BETTER = ("s", "bytes", "%", "samples")
LAST_LINES = 5
"""Lines that are shown of what a failed run printed."""
Key = tuple[str, str | None, str]
"""(case, family, name) of a figure."""


@final
@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One figure of both checkouts."""

    figure: Figure
    """Of the first round of the later checkout: its name, unit and target."""
    earlier: Spread
    """Values over the rounds."""
    later: Spread
    """Values over the rounds."""
    ratio: Spread
    """Later over earlier, each round within itself."""

    @classmethod
    def of(cls, earlier: Sequence[Figure], later: Sequence[Figure]) -> Comparison:
        """Compare the same figure of as many rounds, one at least."""
        ratios = [_ratio(a.value, b.value) for a, b in zip(earlier, later, strict=True)]
        spreads = (Spread.of([figure.value for figure in figures]) for figures in (earlier, later))
        before, after = spreads
        return cls(figure=later[0], earlier=before, later=after, ratio=Spread.of(ratios))

    @property
    def better(self) -> str | None:
        """ "lower" or "higher"; None: neither, such as the ideal speed-up of a batch."""
        if self.figure.target is not None:
            return self.figure.target.better
        if self.figure.unit in LOWER_IS_BETTER:
            return "lower"
        return "higher" if self.figure.unit.endswith("/s") else None

    def is_worse(self, tolerance: float) -> bool:
        """Return whether the median ratio is worse than 1 by more than `tolerance`."""
        if self.better == "higher":
            return self.ratio.median < 1 / (1 + tolerance)
        return self.better == "lower" and self.ratio.median > 1 + tolerance


def _ratio(earlier: float, later: float) -> float:
    if earlier == later:
        return 1.0
    return later / earlier if earlier else float("inf")


def compare(earlier: Sequence[Report], later: Sequence[Report]) -> list[Comparison]:
    """Compare every figure that all reports have, in the order of the later ones.

    Args:
        earlier: a report a round.
        later: as many, in the same order.
    """
    rounds = [[_by_key(report) for report in reports] for reports in (earlier, later)]
    keys = [key for key in rounds[1][0] if all(key in figures for side in rounds for figures in side)]
    return [Comparison.of(*([figures[key] for figures in side] for side in rounds)) for key in keys]


def unmatched(earlier: Sequence[Report], later: Sequence[Report]) -> list[str]:
    """Name the figures that some reports lack, and those that were skipped."""
    sides = [{key for report in reports for key in _by_key(report)} for reports in (earlier, later)]
    common = {key for key in sides[0] & sides[1] if all(key in _by_key(report) for report in (*earlier, *later))}
    return sorted(": ".join(filter(None, key)) for key in (sides[0] | sides[1]) - common)


def _by_key(report: Report) -> dict[Key, Figure]:
    return {(figure.case, figure.family, figure.name): figure for figure in report.figures}


def joined(reports: Sequence[Report]) -> Report:
    """One report with the figures of several cases of one checkout and round."""
    figures = tuple(figure for report in reports for figure in report.figures)
    first = reports[0]
    return Report(figures=figures, environment=first.environment, settings=first.settings, shapes=first.shapes)


# ---------------------------------------------------------------------- runs


def run_rounds(
    checkouts: Mapping[str, Path], cases: Sequence[str], options: Sequence[str], *, rounds: int, folder: Path
) -> dict[str, list[Report]]:
    """Run all cases in both checkouts, in turn; a report a round for each checkout.

    Args:
        checkouts: "earlier" and "later".
        cases: of the benchmarks.
        options: of the benchmarks' command line.
        rounds: how often, 1 or more.
        folder: where the JSON file of every run is written.

    Raises:
        ConfigError: a folder has no benchmarks, a run failed, or it measured another checkout.
    """
    modules = {name: module_of(checkout) for name, checkout in checkouts.items()}
    reports: dict[str, list[Report]] = {name: [] for name in checkouts}
    for turn in range(rounds):
        order = list(checkouts) if turn % 2 == 0 else list(checkouts)[::-1]
        runs: dict[str, list[Report]] = {name: [] for name in checkouts}
        for case in cases:
            for name in order:
                path = folder / f"{name}-{case}-{turn}.json"
                runs[name].append(_run(checkouts[name], modules[name], [case, *options], path))
        for name in checkouts:
            reports[name].append(joined(runs[name]))
    return reports


def module_of(checkout: Path) -> str:
    """The module that runs a checkout's benchmarks.

    Raises:
        ConfigError: there is none.
    """
    for module in MODULES:
        if (checkout / module.replace(".", "/") / "__main__.py").is_file():
            return module
    raise ConfigError(f"{checkout} has none of {', '.join(MODULES)}; name a checkout of vlmpack")


def _run(checkout: Path, module: str, arguments: Sequence[str], path: Path) -> Report:
    command = [sys.executable, "-m", module, *arguments, "--json", str(path.resolve())]
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-LAST_LINES:])
        raise ConfigError(f"{' '.join(command[1:])} in {checkout} ended with status {done.returncode}:\n{last}")
    report = Report.load(path)
    commit, expected = report.environment["commit"], _head(checkout)
    if commit is not None and expected is not None and commit.rstrip("+") != expected:
        raise ConfigError(
            f"{checkout} is at {expected[:12]}, and {commit[:12]} was measured; is PYTHONPATH overridden?"
        )
    return report


def _head(checkout: Path) -> str | None:
    git = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    done = subprocess.run(git, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


# ---------------------------------------------------------------------- the command


def main(arguments: Sequence[str] | None = None, *, console: Console | None = None) -> int:
    """Compare two checkouts and print the ratio of every figure.

    Args:
        arguments: of the command line; None: those of the process.
        console: where to print; None: the terminal.

    Returns:
        0: compared; 1: `--check` was given and a figure is worse; 2: could not be run with these arguments.
    """
    options, console = _parser().parse_args(arguments), console or Console()
    checkouts = {"earlier": options.earlier, "later": options.later}
    handed_on = [f"--budget={options.budget}", f"--clock={options.clock}", f"--seed={options.seed}"]
    handed_on += [f"--threads={options.threads}"] if options.threads else []
    handed_on += [f"--family={name}" for name in options.family]
    try:
        check_whole_number("--rounds", options.rounds)
        with nullcontext(options.out) if options.out else TemporaryDirectory() as folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            reports = run_rounds(checkouts, options.cases, handed_on, rounds=options.rounds, folder=Path(folder))
    except VlmpackError as error:
        console.print(Text(str(error), style="red"), soft_wrap=True)
        return 2
    comparisons = compare(reports["earlier"], reports["later"])
    for line in _head_lines(reports):
        print_text(console, Text(line))
    print_table(console, table(comparisons, options.tolerance))
    for name in unmatched(reports["earlier"], reports["later"]):
        print_text(console, Text(f"not compared, as some runs lack it: {name}", style="yellow"))
    worse = [comparison for comparison in comparisons if comparison.is_worse(options.tolerance)]
    print_text(
        console, Text(f"{len(worse)} of {len(comparisons)} figures are worse by more than {options.tolerance:.0%}")
    )
    return 1 if options.check and (worse or not comparisons) else 0


def table(comparisons: Sequence[Comparison], tolerance: float) -> Table:
    """Make a line a figure: both medians, later over earlier with its quartiles, and the verdict."""
    lines = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    lines.add_column("figure", overflow="fold")
    for title in ("earlier", "later", "ratio", "quartiles", f"±{tolerance:.0%}"):
        lines.add_column(title, justify="right", no_wrap=True)
    for comparison in comparisons:
        figure, ratio = comparison.figure, comparison.ratio
        name = ": ".join(filter(None, (figure.case, figure.family, figure.name)))
        values = (readable([spread.median], figure.unit) for spread in (comparison.earlier, comparison.later))
        verdict = _verdict(comparison, tolerance)
        lines.add_row(name, *values, f"{ratio.median:.3f}", f"{ratio.low:.3f} to {ratio.high:.3f}", verdict)
    return lines


def _verdict(comparison: Comparison, tolerance: float) -> Text:
    if comparison.is_worse(tolerance):
        return Text("worse", style="bold red")
    if 1 / (1 + tolerance) <= comparison.ratio.median <= 1 + tolerance:
        return Text("same", style="green")
    return Text("other" if comparison.better is None else "better")


def _head_lines(reports: Mapping[str, Sequence[Report]]) -> Iterator[str]:
    for name, runs in reports.items():
        where = runs[0].environment
        commit = where["commit"] or "no commit"
        yield (
            f"{name}: {commit[:12]}{'+' * commit.endswith('+')}, torch {where['torch']}, "
            f"transformers {where['transformers']}, {where['device_name']}, {where['threads']} threads, "
            f"{runs[0].settings['clock']} clock, {len(runs)} rounds"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare_commits",
        description="Run benchmarks of two checkouts in turn on this machine, and print later over earlier.",
    )
    parser.add_argument("earlier", type=Path, help="folder of a checkout")
    parser.add_argument("later", type=Path, help="folder of another")
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE", help=f"(default: {' '.join(CASES)})")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each case and checkout (3)")
    parser.add_argument("--budget", type=float, default=20.0, metavar="SECONDS", help="of each run of a case (20)")
    parser.add_argument("--family", action="append", default=[], metavar="NAME", help="of `step`, may be repeated")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu on a machine that others use too (wall)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of PyTorch (default: its own choice)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, ids and pixels (0)")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help=f"share that counts as equal ({TOLERANCE})")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the JSON file of every run in this folder")
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a figure is worse")
    return parser


if __name__ == "__main__":
    sys.exit(main())
