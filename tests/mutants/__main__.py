"""Break one named function of vlmpack at a time, and see that the fast tests fail: `make mutants`.

    python tests/mutants                          all of them
    python tests/mutants --only "window" -j 2     those whose names have this in them, two at a time

torch, transformers and pytest are imported once. Each run of tests is a fork of that process, in which the function's
code is exchanged, whoever imported it before. The tests of a mutant must pass without it, and one of them must fail
with it: an error while tests are collected or set up is no failure.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import pkgutil
import resource
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from mutants.patches import MUTANTS, Mutant  # noqa: E402

HEAVY = ("torch.distributed", "transformers", "transformers.models.qwen3_vl.modeling_qwen3_vl", "datasets", "peft")
OPTIONS = ("-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
MOST_SECONDS = 600
"""Of processor time, for one run of tests: a mutant may loop forever."""


def function_at(target: str) -> FunctionType:
    """The plain function behind a dotted name: module, perhaps class, name; decorators and properties unwrapped."""
    found: Any = pkgutil.resolve_name(target)
    while not isinstance(found, FunctionType) or hasattr(found, "__wrapped__"):
        inner = ("fget", "func", "__func__", "__wrapped__", "_torchdynamo_orig_callable")
        found = getattr(found, next(name for name in inner if hasattr(found, name)))
    return found


def apply(target: str, patch: Callable[..., Any]) -> None:
    """Exchange the code of a function, which stays the same object, for a call of `patch` with the original."""
    function = function_at(target)
    original = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__
    function.__globals__["_patch"] = partial(patch, original)
    signature = inspect.signature(function)
    function.__code__ = (lambda *args, **kwargs: _patch(*args, **kwargs)).__code__  # noqa: F821  # pyright: ignore
    function.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]


class Breaking:
    """A plugin of pytest: breaks the function once all tests are collected, and keeps the first that fails."""

    def __init__(self, mutant: Mutant | None) -> None:
        self.mutant = mutant
        self.test = ""

    def pytest_collection_finish(self) -> None:
        """Files of tests make their inputs when they are imported, with the function as it is."""
        if self.mutant:
            apply(self.mutant.target, self.mutant.patch)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep it, and what it said."""
        if report.failed and report.when == "call" and not self.test:
            self.test = f"{report.nodeid}: {str(getattr(report.longrepr, 'reprcrash', '')).partition(': ')[2]}"


def run(tests: str, mutant: Mutant | None = None) -> bool:
    """Run tests in a fork of this process: whether they pass, or whether a mutant makes one fail; print it."""
    sys.stdout.flush()
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    fine, began = False, time.perf_counter()
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
        os.chdir(TESTS.parent)
        shown, devnull = os.dup(1), os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 1)
        first = Breaking(mutant)
        words = [f"tests/{word}" if (TESTS / word).exists() else word for word in shlex.split(tests)]
        code = pytest.main([*OPTIONS, *words], plugins=[first])
        os.dup2(shown, 1)
        fine = code == 1 and bool(first.test) if mutant else code == 0
        told = f"{tests!r} {'pass' if fine else f'fails on the package as it is: {first.test or code}'}"
        if mutant:
            told = f"{mutant.name}: {f'killed by {first.test}' if fine else f'SURVIVES ({code})'}"
        print(f"{time.perf_counter() - began:6.1f} s  {told}"[:240], flush=True)
    except BaseException as error:
        print(f"{mutant.name if mutant else tests}: {error!r}", flush=True)
    finally:
        os._exit(0 if fine else 1)


def examine(mutants: Sequence[Mutant]) -> int:
    """Run these one after the other; how many were not killed."""
    passes = {tests: run(tests) for tests in dict.fromkeys(mutant.tests for mutant in mutants)}
    return sum(not passes[mutant.tests] or not run(mutant.tests, mutant) for mutant in mutants)


def main(arguments: Sequence[str]) -> int:
    """Run them; 1 if a mutant survives."""
    parser = argparse.ArgumentParser(prog="python tests/mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], help="mutants whose names have one of these texts in them")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="runs of tests at a time")
    chosen = parser.parse_args(arguments)
    mutants = [mutant for mutant in MUTANTS if any(text in mutant.name for text in chosen.only)]
    if not mutants:
        parser.error(f"no mutant's name has {' or '.join(chosen.only)!r} in it")
    for name in ("conftest", *HEAVY):  # conftest first: it holds settings that the others read when they are imported
        importlib.import_module(name)
    jobs = []
    for at in range(chosen.jobs):
        job = os.fork()
        if not job:
            os._exit(min(examine(mutants[at :: chosen.jobs]), 100))
        jobs.append(job)
    survivors = sum(os.waitstatus_to_exitcode(os.waitpid(job, 0)[1]) for job in jobs)
    print(f"{len(mutants)} mutants, of which {survivors} survive the fast tests")
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
