"""Packed == alone, proved on the user's machine: every sample, every mechanism, and plain transformers for contrast."""

from __future__ import annotations

from vlmpack.proof.report import BAD, Cause, Check, Contrast, Report
from vlmpack.proof.run import probe

__all__ = ["BAD", "Cause", "Check", "Contrast", "Report", "probe"]
