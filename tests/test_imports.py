"""Who may import whom, and what each package is for."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import vlmpack

ROOT = Path(__file__).parents[1]
PACKAGE = Path(vlmpack.__file__).parent
BENCHMARKS = ROOT / "benchmarks"
FILES = sorted([*PACKAGE.rglob("*.py"), *BENCHMARKS.rglob("*.py")])

CONTRACTS = (
    "upper packages import lower ones, siblings never",
    "model works on a hand-made row: it never imports collate",
    "layout is pure index maths",
    "plan plans with numpy alone",
    "the installed package never imports benchmarks",
    "benchmarks: commands above cases, cases above what they measure with",
    "matplotlib lives in plots alone",
)

OFFENCES = {
    "layout/offence.py": "import transformers\nfrom vlmpack import families",
    "model/offence.py": "from vlmpack import collate",
    "plan/offence.py": "import torch",
    "trainer/offence.py": "import matplotlib",
    "data/measured.py": "import benchmarks.measuring",
    "../benchmarks/measuring.py": "import benchmarks.peers",
    "files.py": "import vlmpack.cli",
}
"""Between them these break every contract."""


def lint_imports(where: Path) -> str:
    """What import-linter says about the copy of the packages under `where`."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=where, capture_output=True, text=True).stdout


def test_every_package_imports_only_what_it_may() -> None:
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


def test_every_package_says_in_one_line_what_it_is_for() -> None:
    packages = [path for path in FILES if path.name == "__init__.py"]
    silent = [path for path in packages if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))]
    assert packages
    assert silent == []
