"""`import vlmpack.data` loads no library that only some sources of data need."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("transformers", "datasets", "pyarrow", "matplotlib")


def loaded_by(code: str) -> set[str]:
    """Return which heavy libraries a fresh interpreter has loaded after `code`."""
    report = f"{code}\nimport sys\nprint(*(name for name in {HEAVY} if name in sys.modules))"
    run = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_the_room_loads_nothing_heavy() -> None:
    assert loaded_by("import vlmpack.data") == set()


def test_receipts_load_nothing_heavy() -> None:
    assert loaded_by("from vlmpack.testing import SyntheticReceipts\nSyntheticReceipts(num=1, scale=0.25)[0]") == set()


def test_the_check_can_fail() -> None:
    assert loaded_by("import vlmpack.data, pyarrow") == {"pyarrow"}
