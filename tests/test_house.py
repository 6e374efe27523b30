"""The house rules that a machine can check: who imports whom, and how long things may get."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vlmpack

ROOT = Path(__file__).parents[1]
PACKAGE = Path(vlmpack.__file__).parent
BENCHMARKS = ROOT / "benchmarks"
FILES = sorted([*PACKAGE.rglob("*.py"), *BENCHMARKS.rglob("*.py")])

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
USUAL_FUNCTION_LINES = 40
"""At most one function in ten is longer than this."""

ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))

CONTRACTS = (
    "the house: upper rooms import lower ones, siblings never",
    "model works on a hand-made row: it never imports collate",
    "layout is pure index maths",
    "plan plans with numpy alone",
    "the installed package never imports benchmarks",
    "benchmarks: commands above cases, cases above what they measure with",
    "matplotlib lives in plots alone",
    *(f"{room} is entered through its face" for room in ROOMS),
)

OFFENCES = {
    "layout/offence.py": "import transformers\nfrom vlmpack import families",
    "model/offence.py": "from vlmpack import collate",
    "plan/offence.py": "import torch",
    "trainer/offence.py": "import matplotlib",
    "data/measured.py": "import benchmarks.timing",
    "../benchmarks/timing.py": "import benchmarks.report",
    **{f"{room}/inner.py": "" for room in ROOMS},
    "files.py": "".join(f"import vlmpack.{room}.inner\n" for room in ROOMS),
}
"""Between them these break every contract."""


def lint_imports(where: Path) -> str:
    """What import-linter says about the copy of the packages under `where`."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=where, capture_output=True, text=True).stdout


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and number of lines of every function in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            yield f"{path.relative_to(ROOT)}:{node.name}", node.end_lineno - node.lineno + 1


def calls_by_name(path: Path) -> set[str]:
    """Names of the plain functions that a file calls."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}


def test_every_room_imports_only_what_it_may() -> None:
    said = lint_imports(ROOT)
    assert [name for name in CONTRACTS if f"{name} KEPT" not in said] == [], said


def test_every_import_contract_can_fail(tmp_path: Path) -> None:
    for package in (PACKAGE, BENCHMARKS):
        shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name, text in OFFENCES.items():
        (tmp_path / "vlmpack" / name).write_text(text)
    said = lint_imports(tmp_path)
    assert [name for name in CONTRACTS if f"{name} BROKEN" not in said] == [], said


def test_the_house_is_not_empty() -> None:
    assert len(FILES) > 30


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_can_be_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES


def test_functions_are_short() -> None:
    lines = dict(found for path in FILES for found in functions(path))
    too_long = {name: count for name, count in lines.items() if count > MAX_FUNCTION_LINES}
    longish = {name: count for name, count in lines.items() if count > USUAL_FUNCTION_LINES}
    assert too_long == {}
    assert len(longish) <= len(lines) / 10, longish


def test_attributes_of_foreign_models_are_looked_up_in_families_and_mechanisms_alone() -> None:
    guessing = {path for path in FILES if calls_by_name(path) & {"getattr", "hasattr", "setattr"}}
    rooms = {path.parent.relative_to(PACKAGE).as_posix() for path in guessing}
    assert rooms <= {"families", "model/mechanisms"}


def test_every_room_says_in_one_line_what_it_is_for() -> None:
    rooms = [path for path in FILES if path.name == "__init__.py"]
    silent = [path for path in rooms if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))]
    assert rooms
    assert silent == []


@pytest.mark.parametrize("room", ROOMS)
def test_a_rooms_readme_lists_its_files(room: str) -> None:
    text = (PACKAGE / room / "README.md").read_text(encoding="utf-8")
    listed = {Path(name).name for name in re.findall(r"`([a-z_/]+\.py)`", text)}
    files = {path.name for path in (PACKAGE / room).rglob("*.py")} - {"__init__.py", "__main__.py"}
    assert files - listed == set()
    elsewhere = {
        path.name for folder in (PACKAGE, ROOT / "tests", ROOT / "benchmarks") for path in folder.rglob("*.py")
    }
    assert listed - files - elsewhere == set()


@pytest.mark.parametrize("path", [path for path in FILES if PACKAGE in path.parents], ids=lambda path: path.stem)
def test_a_file_is_no_fragment(path: Path) -> None:
    assert path.name in ("__init__.py", "__main__.py") or len(path.read_text(encoding="utf-8").splitlines()) >= 60
