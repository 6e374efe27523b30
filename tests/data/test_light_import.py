"""`import vlmpack.data` loads no library that only some sources of data need."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("transformers", "datasets", "pyarrow", "matplotlib")
STEPS = (
    "import vlmpack.data",
    "from vlmpack.testing import SyntheticReceipts\nSyntheticReceipts(num=1, scale=0.25)[0]",
    "import pyarrow",  # so that the test can fail
)


@pytest.mark.slow
def test_neither_the_room_nor_receipts_load_anything_heavy() -> None:
    """One fresh interpreter: importing torch takes most of its time."""
    report = f"import sys\nprint(*(name for name in {HEAVY} if name in sys.modules))"
    code = "\n".join(f"{step}\n{report}" for step in STEPS)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["", "", "pyarrow"]
