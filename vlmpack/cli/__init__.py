"""The `vlmpack` command: one file per verb. A verb imports what it needs when it runs."""

from __future__ import annotations

from vlmpack.cli.app import app, main

__all__ = ["app", "main"]
