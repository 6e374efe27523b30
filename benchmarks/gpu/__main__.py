"""`python -m benchmarks.gpu`, the same as `python -m benchmarks gpu`."""

from __future__ import annotations

import sys

from benchmarks.command import main

if __name__ == "__main__":
    sys.exit(main(["gpu", *sys.argv[1:]]))
