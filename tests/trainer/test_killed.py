"""kill -9 between two checkpoints of a training run: what goes on ends as if nothing had happened, bit for bit.

`python test_killed.py FOLDER` makes the runs, each in a process that is forked before anything was computed. One runs
unbroken, one is killed by SIGKILL between two checkpoints, one goes on from the last of them. FOLDER/CASE.json has what
the first and the last came to.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).parents[1]))
from trainer.packed_runs import fingerprint, planned, streamed

pytestmark = [pytest.mark.dist, pytest.mark.slow]
SAVE_EVERY, KILLED_AFTER = 3, 5
"""Steps; the last checkpoint before the end is not the one at hand."""

CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "plan with a worker": (
        planned,
        {"gradient_accumulation_steps": 2, "num_train_epochs": 2, "dataloader_num_workers": 1},
    ),
    "stream with a worker": (streamed, {"dataloader_num_workers": 1}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the killed runs left what they came to."""
    folder = tmp_path_factory.mktemp("killed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, __file__, str(folder)], capture_output=True, text=True, timeout=300, env=environment
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


# ---------------------------------------------------------------------- the runs


class Killed(TrainerCallback):
    """Ends this process as nobody can prevent, in the middle of a step's work."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == KILLED_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name, (make, settings) in CASES.items():
        here = folder / name
        ended = {
            "whole": forked(lambda m=make, s=settings, f=here: run(m(f / "whole", **s), f / "whole.json")),
            "killed": forked(lambda m=make, s=settings, f=here: killed(m, f / "killed", s)),
            "resumed": forked(lambda m=make, s=settings, f=here: resumed(m, f, s)),
        }
        seen = {one: json.loads((here / f"{one}.json").read_text()) for one in ("whole", "resumed")}
        (folder / f"{name}.json").write_text(json.dumps({**seen, "ended": ended}))


def forked(work: Callable[[], None]) -> int:
    """How a process of its own ended: the signal's number, negative, or what it returned."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(trainer: Any, out: Path, resume: str | None = None) -> None:
    trainer.train(resume_from_checkpoint=resume)
    out.write_text(json.dumps({**fingerprint(trainer), "rows": trainer.data_collator.rows}))


def killed(make: Callable[..., Any], folder: Path, settings: dict[str, Any]) -> None:
    trainer = make(folder, save_strategy="steps", save_steps=SAVE_EVERY, **settings)
    trainer.add_callback(Killed())
    trainer.train()


def resumed(make: Callable[..., Any], folder: Path, settings: dict[str, Any]) -> None:
    run(make(folder / "killed", **settings), folder / "resumed.json", resume=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
