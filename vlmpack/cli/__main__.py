"""Run the command as `python -m vlmpack.cli`."""

from __future__ import annotations

from vlmpack.cli.app import main

main()
