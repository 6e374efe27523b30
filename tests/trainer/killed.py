"""Runs that are killed and go on, started by test_killed.py: python killed.py FOLDER.

Every run is a process of its own, forked before anything was computed. One runs unbroken, one is killed by SIGKILL
between two checkpoints, one goes on from the last of them. FOLDER/CASE.json has what the first and the last came to.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from trainer.packed_runs import fingerprint, planned, streamed
from transformers import TrainerCallback

SAVE_EVERY, KILLED_AFTER = 3, 5
"""Steps; the last checkpoint before the end is not the one at hand."""

CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "plan with a worker": (
        planned,
        {"gradient_accumulation_steps": 2, "num_train_epochs": 2, "dataloader_num_workers": 1},
    ),
    "stream with a worker": (streamed, {"dataloader_num_workers": 1}),
}


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
