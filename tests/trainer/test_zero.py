"""DeepSpeed's ZeRO over packed rows on two gloo processes: the losses, gradient norms and weights of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training import collator, receipts

from vlmpack.model import enable_packing
from vlmpack.testing import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.slow]


def of_one_process(steps):
    """The same samples in one row a step: (losses, norms before clipping, weights)."""
    model = enable_packing(tiny_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    row, losses, norms = collator("packed")(receipts(model)), [], []
    for _ in range(steps):
        loss = model(**row).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ten_clipped_accumulated_and_resumed_steps(stage, tmp_path):
    pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install deepspeed")
    script = Path(__file__).with_name("zero_two_ranks.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [*launch, str(script), str(stage), str(tmp_path)], capture_output=True, text=True, timeout=280, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ours = torch.load(tmp_path / f"zero{stage}.pt")
    losses, norms, weights = of_one_process(10)
    assert ours["losses"] == pytest.approx(losses, rel=1e-4)
    assert min(norms) > 0.5  # the guard: gradients were clipped
    assert ours["norms"] == pytest.approx(norms, rel=1e-3)
    assert ours["weights"].keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(ours["weights"][name], weight, rtol=1e-2, atol=2e-4)
