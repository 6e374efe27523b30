"""The `vlmpack` command: one file per verb. What a verb computes with is imported when the verb runs."""

from __future__ import annotations

from vlmpack.cli.app import app, main

__all__ = ["app", "main"]
