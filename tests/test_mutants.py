"""Each mutant's function and its tests exist: `make mutants` runs them."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from mutants.__main__ import function_at
from mutants.patches import MUTANTS, Mutant

TESTS = Path(__file__).parent


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_what_a_mutant_breaks_is_there(mutant: Mutant) -> None:
    assert not function_at(mutant.target).__code__.co_freevars
    files = shlex.split(mutant.tests.partition(" -k ")[0])
    assert [file for file in files if not (TESTS / file).exists()] == []
