"""Two gloo processes on the CPU: every target weighs the same on whichever rank it is, and none is counted twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training import descend, loss_sums, receipts

from vlmpack.families.tiny import tiny_model

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """(what rank 0 saw, each rank's weights)."""
    folder = tmp_path_factory.mktemp("ranks")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    script = Path(__file__).with_name("two_ranks.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*launch, str(script), str(folder)], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    weights = [torch.load(folder / f"weights{rank}.pt") for rank in (0, 1)]
    return json.loads((folder / "result.json").read_text()), weights


def test_a_step_equals_one_step_on_all_samples(ranks):
    result, weights = ranks
    reference = tiny_model()
    expected = descend(reference, receipts(reference), size=4, steps=1)
    assert result["losses"] == pytest.approx(expected.losses, rel=1e-6)
    for name, p in reference.named_parameters():
        torch.testing.assert_close(weights[0][name], p.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(weights[0][name], weights[1][name])


def test_predictions_come_once_and_in_order(ranks):
    result, _ = ranks
    model = tiny_model()
    with torch.no_grad():
        sums, counts = loss_sums(model, receipts(model))
    assert result["sample_targets"] == counts.tolist()
    assert result["sample_losses"] == pytest.approx((sums / counts).tolist(), rel=1e-6)
    assert result["metrics"]["eval_token_loss"] == pytest.approx(float(sums.sum() / counts.sum()), rel=1e-6)
