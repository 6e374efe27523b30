"""Two gloo processes on the CPU: PackedGRPOTrainer under DDP does what TRL's own trainer does there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training import distance

pytest.importorskip("trl", reason="needs TRL: pip install trl")
pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.slow]


def test_steps_are_those_of_the_padded_trainer(tmp_path):
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    script = Path(__file__).with_name("grpo_two_ranks.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*launch, str(script), str(tmp_path)], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (losses, reference), (ours, weights) = (
        torch.load(tmp_path / f"{name}.pt") for name in ("GRPOTrainer", "PackedGRPOTrainer")
    )
    assert len(losses) == 3
    assert ours == pytest.approx(losses, rel=1e-5, abs=1e-6)
    assert distance(reference, weights) < 1e-5
