"""Run a module or a script with the device: `python tests/pretend_cuda -m MODULE ...`, `... SCRIPT.py ...`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # for `pretend_cuda` itself

from pretend_cuda import install  # noqa: E402

if __name__ == "__main__":
    install()
    sys.path.insert(0, "")
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
