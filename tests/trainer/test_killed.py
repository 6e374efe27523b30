"""kill -9 between two checkpoints of a training run: what goes on ends as if nothing had happened, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from trainer.killed import CASES, KILLED_AFTER, SAVE_EVERY

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the killed runs left what they came to."""
    folder = tmp_path_factory.mktemp("killed")
    script = Path(__file__).with_name("killed.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(script), str(folder)], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(folder, case):
    seen = json.loads((folder / f"{case}.json").read_text())
    assert seen["ended"] == {"whole": 0, "killed": -signal.SIGKILL, "resumed": 0}
    whole, resumed = seen["whole"], seen["resumed"]
    assert [path.name for path in (folder / case / "killed").glob("checkpoint-*")] == [f"checkpoint-{SAVE_EVERY}"]
    assert whole["steps"] > KILLED_AFTER > SAVE_EVERY
    assert len(set(whole["losses"])) == whole["steps"]  # the guard: no two steps are alike
    assert resumed["losses"] == whole["losses"]
    assert resumed["weights"] == whole["weights"]
