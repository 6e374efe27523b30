"""`python -m vlmpack.bench`."""

from __future__ import annotations

import sys

from vlmpack.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
