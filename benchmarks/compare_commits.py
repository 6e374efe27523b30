"""Compare the benchmarks of two checkouts on this machine: `python -m benchmarks.compare_commits EARLIER LATER`.

    git worktree add ../earlier COMMIT
    python -m benchmarks.compare_commits ../earlier . step collate --rounds 5 --check

Each round runs every case in both checkouts, one right after the other, each in its own process; the order alternates
from round to round. The ratio of a figure is computed within a round, and its median and quartiles over all rounds are
printed. Each checkout is imported from its own folder, with the packages of the interpreter that runs this command.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from benchmarks.measuring import Spread

CASES = ("step", "collate", "pack", "plan", "pixels")
TOLERANCE = 0.03
"""Fraction by which a figure may be worse."""
LOWER_IS_BETTER = ("s", "bytes", "%", "samples")
Key = tuple[str, str | None, str]
"""(case, family, name) of a figure."""
Figures = Mapping[Key, Mapping[str, Any]]


def run_case(checkout: Path, case: str, options: Sequence[str]) -> Figures:
    """Run a case of a checkout in a new process.

    Raises:
        SystemExit: the process failed; the message contains the end of its output.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder, "report.json")
        command = [sys.executable, "-m", "benchmarks", case, f"--json={path}", *options]
        environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
        if not path.is_file():
            raise SystemExit(f"{case} failed in {checkout}:\n{(done.stdout + done.stderr)[-2000:]}")
        report = json.loads(path.read_text())
    return {(figure["case"], figure["family"], figure["name"]): figure for figure in report["figures"]}


def better(figure: Mapping[str, Any]) -> str | None:
    """Return "lower" or "higher"; None: neither is better, as for the ideal speed-up of a batch."""
    if figure["target"]:
        return figure["target"]["better"]
    if figure["unit"] in LOWER_IS_BETTER:
        return "lower"
    return "higher" if figure["unit"].endswith("/s") else None


def compare(earlier: Sequence[Figures], later: Sequence[Figures], tolerance: float) -> list[tuple[Key, Spread, str]]:
    """Return (figure, ratio later / earlier, verdict) of every figure that all rounds of both checkouts have."""
    keys = [key for key in later[0] if all(key in figures for figures in (*earlier, *later))]
    compared = []
    for key in keys:
        pairs = [(a[key]["value"], b[key]["value"]) for a, b in zip(earlier, later, strict=True)]
        ratio = Spread.of([1.0 if a == b else b / a if a else 1e9 for a, b in pairs])
        verdict = "same"
        if not 1 / (1 + tolerance) <= ratio.median <= 1 + tolerance:
            side = better(later[0][key])
            verdict = "other" if side is None else "worse" if (ratio.median > 1) == (side == "lower") else "better"
        compared.append((key, ratio, verdict))
    return compared


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two checkouts and print the ratio of every figure.

    Returns:
        0: success; 1: `--check` was given, and a figure is worse or there are no figures.
    """
    chosen = _parser().parse_args(arguments)
    options = [
        f"--{name}={value}" for name, value in vars(chosen).items() if name in ("budget", "clock", "threads") and value
    ]
    options += [f"--family={name}" for name in chosen.family]
    checkouts = {"earlier": chosen.earlier, "later": chosen.later}
    rounds: dict[str, list[dict[Key, Mapping[str, Any]]]] = {
        name: [{} for _ in range(chosen.rounds)] for name in checkouts
    }
    for turn in range(chosen.rounds):
        for case in chosen.cases:
            for name in list(checkouts)[:: 1 if turn % 2 == 0 else -1]:
                rounds[name][turn].update(run_case(checkouts[name], case, options))
    compared, console = compare(rounds["earlier"], rounds["later"], chosen.tolerance), Console(soft_wrap=True)
    for key, ratio, verdict in compared:
        console.print(
            f"{': '.join(filter(None, key)):80} {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})  {verdict}"
        )
    for key in {key for name in rounds for figures in rounds[name] for key in figures} - {
        key for key, _, _ in compared
    }:
        console.print(f"not compared, as some runs lack it: {': '.join(filter(None, key))}")
    worse = sum(verdict == "worse" for _, _, verdict in compared)
    console.print(f"{worse} of {len(compared)} figures are worse by more than {chosen.tolerance:.0%}")
    return 1 if chosen.check and (worse or not compared) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare_commits",
        description="Run benchmarks of two checkouts in turn on this machine, and print later over earlier.",
    )
    parser.add_argument("earlier", type=Path, help="folder of a checkout")
    parser.add_argument("later", type=Path, help="folder of another")
    parser.add_argument("cases", nargs="*", default=CASES, metavar="CASE", help=f"(default: {' '.join(CASES)})")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each case and checkout (3)")
    parser.add_argument("--budget", type=float, default=20.0, metavar="SECONDS", help="of each run of a case (20)")
    parser.add_argument("--family", action="append", default=[], metavar="NAME", help="of `step`, may be repeated")
    parser.add_argument("--clock", choices=("wall", "cpu"), help="cpu on a machine that others use too (wall)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of PyTorch (default: its own choice)")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help=f"share that counts as equal ({TOLERANCE})")
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a figure is worse")
    return parser


if __name__ == "__main__":
    sys.exit(main())
