"""The list of mutants is about the package as it is: what `make mutants` changes is there, once."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutants.lines import MUTANTS, Mutant

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "vlmpack"


def test_there_are_enough_and_each_has_a_name_of_its_own() -> None:
    assert len({mutant.protects for mutant in MUTANTS}) == len(MUTANTS) >= 40


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.protects)
def test_the_line_occurs_once_and_its_tests_are_there(mutant: Mutant) -> None:
    text = (PACKAGE / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.line) == 1
    assert "\n" not in mutant.line.strip()
    assert mutant.change != mutant.line
    compile(text.replace(mutant.line, mutant.change), mutant.file, "exec")  # an error of syntax would prove nothing
    for file in mutant.tests.partition(" -k ")[0].split():
        assert (TESTS / file).is_file()
