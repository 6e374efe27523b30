"""Packed == alone, proved on the user's machine: every sample, every mechanism, and plain transformers as baseline."""

from __future__ import annotations

from vlmpack.probing.receipts import processed_samples
from vlmpack.probing.report import BAD, Baseline, Cause, Check, Report
from vlmpack.probing.run import backends_for, probe
from vlmpack.probing.samples import Words, make_sample, synthetic_samples
from vlmpack.probing.weights import Loaded, load, small_copy

__all__ = [
    "BAD",
    "Baseline",
    "Cause",
    "Check",
    "Loaded",
    "Report",
    "Words",
    "backends_for",
    "load",
    "make_sample",
    "probe",
    "processed_samples",
    "small_copy",
    "synthetic_samples",
]
