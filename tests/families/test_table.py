"""The README lists the families of the registry, which the equality matrix runs, and nothing else."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
from table import END, FILES, NAMES, written

from vlmpack.families.registry import FAMILIES

INSTALLED = tuple(map(int, version("transformers").split(".")[:2]))
pytestmark = pytest.mark.skipif(INSTALLED < (5, 23), reason="the table is of a transformers that has every family")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_the_table_of_each_file_is_that_of_the_registry(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert written(text) == text, "run python tests/families/table.py"
    assert all(NAMES[name] in text for name in FAMILIES)
    by_hand = text.replace(END, "| Florence 2 | text, images | |\n" + END)
    assert written(by_hand) == text != by_hand
