"""The page of families lists those of the registry, which the equality matrix runs, and nothing else."""

import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
from table import END, PAGE, written

from vlmpack.families.registry import FAMILIES

INSTALLED = tuple(map(int, version("transformers").split(".")[:2]))
pytestmark = pytest.mark.skipif(INSTALLED < (5, 23), reason="the table is of a transformers that has every family")


def test_the_page_has_every_family_of_the_registry_and_no_other() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert written(text) == text, "run python tests/families/table.py"
    assert all(f"`{name}`" in text for name in FAMILIES)
    by_hand = text.replace(END, "| Florence 2 | text, images | |\n" + END)
    assert written(by_hand) == text != by_hand
