"""Measure one GPU in one command and a fixed time: `python -m benchmarks.gpu --budget 540`."""

from __future__ import annotations

from benchmarks.gpu.command import main

__all__ = ["main"]
