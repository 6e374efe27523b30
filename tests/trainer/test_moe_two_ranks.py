"""Two gloo processes on the CPU: DDP and FSDP2 around models with experts, router losses and rows with gaps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from moe import MOE, fresh, naive_z_loss, real_rows, samples_of, stock
from training import distance, gradients

from vlmpack.testing import padded

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where rank 0 left the gradients of every case."""
    folder = tmp_path_factory.mktemp("ranks")
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    script = Path(__file__).with_name("moe_two_ranks.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*launch, str(script), str(folder)], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
@pytest.mark.parametrize("family", MOE)
def test_a_step_is_that_of_both_halves_in_one_process(folder, family, wrapper, recomputed):
    """Of the unmodified model on padded batches. Gradients are the mean over ranks; targets were counted over both."""
    reference = fresh(family)
    samples = samples_of(reference)
    targets = padded(samples).metadata.num_targets
    for half in (samples[:2], samples[2:]):
        batch = padded(half)
        output = reference(**stock(batch), output_router_logits=True, num_items_in_batch=targets)
        loss = output.loss + 0.25 * naive_z_loss(real_rows(output.router_logits, batch))
        (loss / 2).backward()
    found = torch.load(folder / f"{family}-{wrapper}-{recomputed}.pt")
    assert distance(gradients(reference), found) <= 1e-5
