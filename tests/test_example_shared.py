"""The example of rows that ranks share runs as a user would run it."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_shared_rows.py"


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_train_on_rows_that_they_share() -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*launch, str(EXAMPLE), "--context", "2", "--steps", "2", "--samples", "2"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"},
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+  loss (\S+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))
    assert losses[1] < losses[0]
