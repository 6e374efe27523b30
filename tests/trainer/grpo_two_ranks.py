"""What each of two gloo ranks runs, started by test_two_ranks.py.

Both trainers, one after the other, under DDP. Rank 0 writes losses and weights to FOLDER/TRAINER.pt.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from trl_runs import finish, run_of, saved, trl

from vlmpack.trainer import PackedGRPOTrainer

SETTINGS = {"beta": 0.2, "num_iterations": 2, "gradient_accumulation_steps": 2, "ddp_backend": "gloo", "max_steps": 2}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    own = folder / os.environ["RANK"]  # each rank has a policy of its own on disk, of equal weights
    own.mkdir()
    for trainer in (trl.GRPOTrainer, PackedGRPOTrainer):
        run = run_of("GRPO", trainer, saved(own), own, **SETTINGS)
        found, weights = finish(run)
        assert run.model_wrapped is not run.model
        if dist.get_rank() == 0:
            torch.save((found.losses, weights), folder / f"{trainer.__name__}.pt")
    dist.barrier()  # no rank leaves while another still communicates
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)  # threads of gloo and of DDP sometimes abort a process that takes itself apart
