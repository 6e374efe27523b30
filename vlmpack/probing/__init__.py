"""Packed == alone, proved on the user's machine: every sample, every mechanism, and plain transformers as baseline."""

from __future__ import annotations

from vlmpack.probing.report import BAD, Baseline, Cause, Check, Report
from vlmpack.probing.run import backends_for, probe
from vlmpack.probing.weights import Loaded, load, small_copy

__all__ = ["BAD", "Baseline", "Cause", "Check", "Loaded", "Report", "backends_for", "load", "probe", "small_copy"]
