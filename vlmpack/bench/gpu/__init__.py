"""Everything about one GPU in one command and a fixed time: `vlmpack bench gpu --budget 540`."""

from __future__ import annotations

from vlmpack.bench.gpu.command import main

__all__ = ["main"]
