"""Who may import whom: each contract of `pyproject.toml`, which `make lint` holds, can fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import vlmpack

ROOT = Path(__file__).parents[1]
PACKAGE = Path(vlmpack.__file__).parent
BENCHMARKS = ROOT / "benchmarks"

CONTRACTS = (
    "upper packages import lower ones, siblings never",
    "service: web, queue, sampling, engine, ranks, wire",
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
    "service/engine/offence.py": "import vlmpack.service.sampling.batched",
    "plan/offence.py": "import torch",
    "trainer/offence.py": "import matplotlib",
    "data/measured.py": "import benchmarks.measuring",
    "../benchmarks/measuring.py": "import benchmarks.peers",
    "files.py": "import vlmpack.cli",
}
"""Between them these break every contract."""


def test_every_import_contract_can_fail(tmp_path: Path) -> None:
    for package in (PACKAGE, BENCHMARKS):
        shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name, text in OFFENCES.items():
        (tmp_path / "vlmpack" / name).write_text(text)
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    assert [name for name in CONTRACTS if f"{name} BROKEN" not in said] == [], said
