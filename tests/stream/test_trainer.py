"""HF Trainer on the rows of a plan: ranks end together on an odd number of rows, and a run continues exactly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from stream.trainers import lengths_of, packed_trainer


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_finish_the_same_steps_and_share_every_sample_of_every_epoch(tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    script = Path(__file__).with_name("trainers.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*launch, str(script), str(tmp_path)], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, other = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert one["steps"] == other["steps"] > 2
    assert one["weights"] == other["weights"]
    assert len(one["rows"]) == len(other["rows"]) == one["steps"]
    alone = packed_trainer(tmp_path)
    everything = sorted(lengths_of(alone.train_dataset.samples))
    half = one["steps"] // 2
    assert one["rows"][:half] != one["rows"][half:]  # the guard: another epoch is another order
    for epoch in (slice(0, half), slice(half, None)):
        assert sorted(n for rows in (one, other) for row in rows["rows"][epoch] for n in row) == everything


def test_a_run_that_was_stopped_in_the_middle_of_an_epoch_ends_with_the_same_weights(tmp_path):
    whole = packed_trainer(tmp_path / "whole")
    whole.train()
    steps = whole.state.global_step
    assert whole.rows[: steps // 2] != whole.rows[steps // 2 :]  # the guard: another epoch is another order
    stop_at = steps // 2 + 1  # inside the second epoch
    stopped = packed_trainer(tmp_path / "stopped", save_strategy="steps", save_steps=stop_at)
    stopped.train()
    resumed = packed_trainer(tmp_path / "stopped")
    resumed.train(resume_from_checkpoint=str(tmp_path / "stopped" / f"checkpoint-{stop_at}"))
    assert resumed.state.global_step == steps
    assert resumed.rows == whole.rows[stop_at:]  # and no more was loaded
    for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
