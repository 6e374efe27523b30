"""Run benchmark cases of two commits in turn, each in its own process, and print the ratios of their figures.

    python -m benchmarks.compare_commits main~3 main step collate --rounds 5 --family qwen3

The order alternates from round to round. Ratios are later / earlier by processor time, within each round. A commit may
also be a folder, such as a working tree.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.measuring import Spread


def check_out(commit: str, stack: ExitStack) -> Path:
    """Return a folder with the files of a commit, removed when `stack` closes; a folder is returned as it is."""
    if (given := Path(commit)).is_dir():
        return given.resolve()
    folder = Path(stack.enter_context(TemporaryDirectory()), "checkout")
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(folder), commit], check=True)
    stack.callback(subprocess.run, ["git", "worktree", "remove", "--force", str(folder)], check=True)
    return folder


def run_case(checkout: Path, case: str, options: Sequence[str]) -> dict[str, float]:
    """Run a case of a checkout in a new process, and return its figures by name; a failure ends the comparison."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "report.json")
        command = [sys.executable, "-m", "benchmarks", case, "--clock=cpu", f"--json={path}", *options]
        env = {**os.environ, "PYTHONPATH": str(checkout)}
        done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True)
        if not path.is_file():
            raise SystemExit(f"{case} failed in {checkout}:\n{(done.stdout + done.stderr)[-2000:]}")
        figures = json.loads(path.read_text())["figures"]
    return {": ".join(filter(None, (case, each["family"], each["name"]))): each["value"] for each in figures}


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare two commits. Options that are not listed go to `python -m benchmarks`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare_commits", description=main.__doc__)
    parser.add_argument("commits", nargs=2, metavar="COMMIT", help="the earlier and the later one")
    parser.add_argument("cases", nargs="+", metavar="CASE", help="cases of `python -m benchmarks`")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each case and commit (3)")
    chosen, options = parser.parse_known_args(arguments)
    rounds: list[tuple[dict[str, float], dict[str, float]]] = [({}, {}) for _ in range(chosen.rounds)]
    with ExitStack() as stack:
        checkouts = [check_out(commit, stack) for commit in chosen.commits]
        for turn, figures in enumerate(rounds):
            for case in chosen.cases:
                for side in (0, 1) if turn % 2 == 0 else (1, 0):
                    figures[side].update(run_case(checkouts[side], case, options))
    for name in dict.fromkeys(name for pair in rounds for figures in pair for name in figures):
        found = "not compared, because a run has no such figure or 0"
        if all(figures.get(name) for pair in rounds for figures in pair):
            ratio = Spread.of([later[name] / earlier[name] for earlier, later in rounds])
            found = f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
        sys.stdout.write(f"{name}: {found}\n")


if __name__ == "__main__":
    main()
