"""Break one line of the package at a time, and see that the short tier of tests fails: `make mutants`.

    python tests/mutants                          all of them
    python tests/mutants --only "experts" -j 2    those whose names have this in them, two at a time

A copy of the repository is changed, never the repository. Each mutant's tests must pass on the copy as it is, and one
of them must fail on the changed copy: an error while tests are collected or set up is no failure. torch, transformers
and pytest are imported once; every run of tests is a fork of that process.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import shlex
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any, final

import pytest

ROOT = Path(__file__).resolve().parents[2]

sys.path.insert(0, str(ROOT / "tests"))
from mutants.lines import MUTANTS, Mutant  # noqa: E402

COPIED = ("vlmpack", "tests", "benchmarks", "examples", "notebooks", "docs", "pyproject.toml", "Makefile")
HEAVY = ("torch.distributed", "transformers", "transformers.models.qwen3_vl.modeling_qwen3_vl", "datasets", "peft")
MOST_SECONDS = 600
"""Of processor time, for one run of tests."""
CRASHED = 100
"""Exit status of a job that did not come to its end."""


@final
@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one run of tests."""

    status: int
    """pytest's exit status."""
    failed: str | None
    """The test that failed in its own call, and why; None: none did."""
    seconds: float
    """Elapsed."""


@final
class FirstFailure:
    """A plugin of pytest: the first test that fails in its call, by an error that is not one of importing."""

    def __init__(self) -> None:
        self.test: str | None = None

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep the first."""
        why = str(getattr(report.longrepr, "reprcrash", "")).partition(": ")[2]
        if report.failed and report.when == "call" and self.test is None and not why.startswith("ImportError"):
            self.test = f"{report.nodeid}: {why.splitlines()[0] if why else ''}"


def run_tests(copy: Path, tests: str) -> Outcome:
    """Run tests in a fork of this process, with the package of `copy`."""
    began, answer = time.perf_counter(), copy / "outcome.json"
    answer.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        try:
            _run_here(copy, tests, answer)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    found = json.loads(answer.read_text()) if answer.is_file() else {"status": -1, "failed": None}
    return Outcome(**found, seconds=time.perf_counter() - began)


def _run_here(copy: Path, tests: str, answer: Path) -> None:
    log = os.open(copy / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))  # a mutant may loop for ever
    os.chdir(copy)
    sys.path[:] = [str(copy), *(place for place in sys.path if place not in (str(ROOT), str(ROOT / "tests")))]
    for name in ("conftest", "tiers", "mutants", "mutants.lines"):
        sys.modules.pop(name, None)
    os.environ["PYTHONPATH"] = str(copy)
    package = importlib.import_module("vlmpack")
    assert Path(str(package.__file__)).is_relative_to(copy), package.__file__
    words = [f"tests/{word}" if word.endswith(".py") else word for word in shlex.split(tests)]
    first = FirstFailure()
    ignored = "ignore::pytest.PytestAssertRewriteWarning"  # of what this process imported before
    options = ["-x", "-q", "-m", "not full", "-p", "no:cacheprovider", "-W", ignored]
    status = pytest.main([*options, *words], plugins=[first])
    answer.write_text(json.dumps({"status": int(status), "failed": first.test}))


@contextmanager
def changed(copy: Path, mutant: Mutant) -> Iterator[None]:
    """The copy with one line broken; compiled files of the other text are removed, before and after."""
    path = copy / "vlmpack" / mutant.file
    text, compiled = path.read_text(encoding="utf-8"), Path(cache_from_source(str(path)))
    try:
        path.write_text(text.replace(mutant.line, mutant.change), encoding="utf-8")
        compiled.unlink(missing_ok=True)
        yield
    finally:
        path.write_text(text, encoding="utf-8")
        compiled.unlink(missing_ok=True)


def fault(mutant: Mutant, copy: Path, healthy: dict[str, Outcome]) -> tuple[str, Outcome]:
    """(what is wrong with a mutant, or an empty string; what came of its run). `healthy`: of tests on the copy as it
    is, which are run once."""
    if mutant.tests not in healthy:
        healthy[mutant.tests] = run_tests(copy, mutant.tests)
    if healthy[mutant.tests].status:
        return "its tests fail on the package as it is", healthy[mutant.tests]
    with changed(copy, mutant):
        outcome = run_tests(copy, mutant.tests)
    if outcome.status == 1 and outcome.failed:
        return "", outcome
    return f"SURVIVES (pytest's exit status {outcome.status})", outcome


def copied() -> Path:
    """A copy of the repository in a temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix="vlmpack-mutants-")).resolve()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def examine(mutants: Sequence[Mutant]) -> int:
    """Run these one after the other in a copy of their own; how many survive."""
    copy, survivors, healthy = copied(), 0, dict[str, Outcome]()
    try:
        for mutant in mutants:
            wrong, outcome = fault(mutant, copy, healthy)
            survivors += bool(wrong)
            if wrong:
                print((copy / "log.txt").read_text()[-2000:])
            shown = wrong or f"killed by {outcome.failed}"
            print(f"{outcome.seconds:6.1f} s  {mutant.protects}: {shown}"[:240], flush=True)
    finally:
        shutil.rmtree(copy, ignore_errors=True)
    return survivors


def main(arguments: Sequence[str]) -> int:
    """Run them; 1 if a mutant survives."""
    parser = argparse.ArgumentParser(prog="python tests/mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], help="mutants whose names have one of these texts in them")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="runs of tests at a time, each in its own copy")
    chosen = parser.parse_args(arguments)
    mutants = [mutant for mutant in MUTANTS if any(text in mutant.protects for text in chosen.only)]
    for name in ("conftest", *HEAVY):  # conftest first: it holds settings that the others read when they are imported
        importlib.import_module(name)
    jobs = []
    for at in range(chosen.jobs):
        job = os.fork()
        if not job:
            survivors = CRASHED
            try:
                survivors = examine(mutants[at :: chosen.jobs])
            finally:
                os._exit(min(survivors, CRASHED))
        jobs.append(job)
    survivors = sum(os.waitstatus_to_exitcode(os.waitpid(job, 0)[1]) for job in jobs)
    print(f"{len(mutants)} mutants, of which {survivors} survive the short tier of tests")
    return 1 if survivors or not mutants else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
