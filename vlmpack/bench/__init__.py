"""Measured cases: figures with their spread, their ideal and their target, as a table and as JSON."""

from __future__ import annotations

from vlmpack.bench.cases import CASES, Case
from vlmpack.bench.command import main, measure
from vlmpack.bench.environment import version_of
from vlmpack.bench.figure import Figure, Report, Skipped, Target
from vlmpack.bench.markdown import markdown, runs
from vlmpack.bench.memory import peak_bytes
from vlmpack.bench.run import run_cases
from vlmpack.bench.settings import BenchSettings
from vlmpack.bench.table import tables_of_runs

__all__ = [
    "CASES",
    "BenchSettings",
    "Case",
    "Figure",
    "Report",
    "Skipped",
    "Target",
    "main",
    "markdown",
    "measure",
    "peak_bytes",
    "run_cases",
    "runs",
    "tables_of_runs",
    "version_of",
]
