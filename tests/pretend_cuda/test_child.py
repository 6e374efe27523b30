"""Tests that a child runs are reported as if they had run here, whatever becomes of them and of the child."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pretend_cuda

TESTS = Path(__file__).parents[1]
EXAMPLES = """
import os
import pytest
import torch

def test_here():
    assert not torch.cuda.is_available()

@pytest.mark.gpu
@pytest.mark.parametrize("number", [1, 2])
def test_there(number):
    assert torch.ones(1, device="cuda").item() == number

@pytest.mark.gpu
def test_skipped():
    pytest.skip("for a reason")

@pytest.mark.gpu
def test_that_ends_the_process():
    os._exit(3)

@pytest.mark.gpu
def test_behind_it():
    pass
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(pretend_cuda.missing()), reason=str(pretend_cuda.missing()))
def test_each_test_is_reported_by_itself(tmp_path: Path) -> None:
    (tmp_path / "test_examples.py").write_text(EXAMPLES)
    (tmp_path / "test_next.py").write_text("def test_next():\n    pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\naddopts = -ra")
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "COLUMNS": "200"}
    command = [sys.executable, "-m", "pytest", "-p", "pretend_cuda.child", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "3 passed, 1 skipped" in done.stdout.replace("3 failed, ", ""), done.stdout
    assert "assert 1.0 == 2" in done.stdout
    assert "FAILED test_examples.py::test_there[2]" in done.stdout
    assert "for a reason" in done.stdout
    for lost in ("test_that_ends_the_process", "test_behind_it"):
        assert f"FAILED test_examples.py::{lost} - the process with the pretend CUDA device ended" in done.stdout
    assert "it ended with 3" in done.stdout
