"""kill -9 at any moment of writing a store: the next run goes on, ends with the same bytes, and does nothing twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What killed runs left, and what the next ones made of it."""
    folder = tmp_path_factory.mktemp("kills")
    script = Path(__file__).with_name("kills.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, str(script), str(folder)], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "seen.json").read_text())


def test_runs_are_killed_before_every_row_and_before_every_name(seen):
    assert {run["status"] for run in seen["killed"]} == {-signal.SIGKILL}
    before = Counter(run["before"] for run in seen["killed"])
    assert before["write_table"] >= 5  # in the middle of files, too
    assert before["replace"] >= len(seen["whole"])


def test_no_file_that_is_not_whole_ever_has_its_name(seen):
    for run in seen["killed"]:
        assert run["left"].items() <= seen["whole"].items()
    assert len({len(run["left"]) for run in seen["killed"]}) > 4  # the guard: kills left more and more


def test_the_next_run_ends_with_the_bytes_of_an_unbroken_one(seen):
    assert len(seen["whole"]) >= 7
    for run in seen["killed"]:
        assert run["again"] == 0
        assert run["files"] == seen["whole"]


def test_what_is_finished_is_not_done_again(seen):
    """Samples are read to measure them until there is a plan, and once more: to be written, or compared if they are."""
    samples, rows = 13, max(run["rows"] for run in seen["killed"])
    for run in seen["killed"]:
        planned, files = "plan.zip" in run["left"], [name for name in run["left"] if name.startswith("rows-")]
        assert sum(run["reads"].values()) == samples + samples * (not planned)
        assert run["rows"] <= rows - 2 * (len(files) - 1)  # the last one is written anew if it was not yet noted down
    assert min(run["rows"] for run in seen["killed"]) == 0  # nothing but the manifest was left


def test_a_run_with_workers_is_continued_at_once(seen):
    run = seen["workers"]
    assert (run["status"], run["again"]) == (-signal.SIGKILL, 0)
    assert run["left"].items() <= seen["whole"].items()
    assert not {name for name in seen["whole"] if name.startswith("rows-")} <= run["left"].keys()  # it was cut short
    assert run["files"] == seen["whole"]
