"""Prove on the user's machine that packing changes nothing: every sample, every mechanism, with plain transformers as
the baseline."""

from __future__ import annotations

from vlmpack.probing.report import Report
from vlmpack.probing.run import probe

__all__ = ["Report", "probe"]
