"""On a machine with the base requirements and pytest alone, tests for a GPU are found."""

from __future__ import annotations

import os
import subprocess
from importlib.metadata import requires
from pathlib import Path

import pytest
from linked_environment import make, required_by

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of such a machine."""
    packages = required_by([*(requires("vlmpack") or []), "pytest", "hypothesis"])
    return make(tmp_path_factory.mktemp("bare"), packages.values())


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [str(python), "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_tests_for_a_gpu_are_found_without_extras(python: Path) -> None:
    done = run(python, "pytest", "-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout + done.stderr
    for file in ("model/test_equality_on_gpu.py", "attention/test_backends.py", "probing/test_host_syncs.py"):
        assert f"tests/{file}::" in done.stdout
    for package in ("datasets", "uvicorn", "torchdata"):
        assert f"needs the package {package}" in done.stdout
