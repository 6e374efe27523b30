"""`python -m vlmpack.cli`."""

from __future__ import annotations

from vlmpack.cli import main

main()
