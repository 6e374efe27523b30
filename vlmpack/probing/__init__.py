"""Packed == alone, proved on the user's machine: every sample, every mechanism, and plain transformers as baseline."""

from __future__ import annotations

from vlmpack.probing.report import Report
from vlmpack.probing.run import probe

__all__ = [
    "Report",
    "probe",
]
