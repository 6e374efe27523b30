"""Packed == alone, proved on the user's machine: every sample, every mechanism, and plain transformers for contrast."""

from __future__ import annotations

from vlmpack.proof.report import BAD, Cause, Check, Contrast, Report
from vlmpack.proof.run import backends_for, probe
from vlmpack.proof.shrink import small_copy
from vlmpack.proof.weights import Loaded, load

__all__ = ["BAD", "Cause", "Check", "Contrast", "Loaded", "Report", "backends_for", "load", "probe", "small_copy"]
