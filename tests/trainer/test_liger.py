"""Liger's kernels in an enabled model: a packed row is its samples alone with the same kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cases import slow

pytestmark = pytest.mark.slow

KERNELS = {"qwen3": {"norm", "rotary", "gated MLP"}, "qwen3_moe": {"norm", "rotary", "experts"}}
"""Those that Liger 0.8.5 has for each. They run in a process of their own: Liger replaces functions of modules."""


def run(*arguments):
    """What liger_runs.py found, in a process of its own."""
    for package in ("liger_kernel", "triton"):
        pytest.importorskip(package, reason="needs Liger: pip install liger-kernel triton")
    script = Path(__file__).with_name("liger_runs.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("order", ["before", *slow("after", "class")])
@pytest.mark.parametrize("family", KERNELS)
def test_a_packed_row_is_its_samples_alone_with_the_same_kernels(family, order):
    found = run("compare", family, order)
    assert found["loss"] < 2e-6
    assert found["gradients"] < 1e-5
    assert found["padding"] == 0
    assert set(found["packed"]) == set(found["alone"]) == KERNELS[family]
    assert found["packed"]["norm"] < found["alone"]["norm"]


@pytest.mark.parametrize("order", ["before", "after", "class"])
def test_its_fused_loss_is_refused_by_name(order):
    assert "Liger" in run("refuse", "qwen3", order)["refused"]
