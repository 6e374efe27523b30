"""What each of two gloo ranks runs, started by test_two_ranks.py.

A DeepSpeed engine over packed rows: two rows a step on each rank, clipped gradients, saved and resumed. Rank 0 writes
losses, the norms of the gradients and the weights to FOLDER/zero<STAGE>.pt.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import deepspeed
import torch
from torch import distributed as dist
from training import collator, receipts

from vlmpack.context_parallel import Parallel
from vlmpack.model import PackedStep, enable_packing
from vlmpack.testing import tiny_model

STEPS, RESUMED_AT = 10, 4


def settings(stage: int) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }


def engine_of(stage: int):
    model = enable_packing(tiny_model(), parallel=Parallel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings(stage))[0]


def main(stage: int, folder: Path) -> None:
    torch.set_num_threads(1)
    engine = engine_of(stage)
    samples = receipts(tiny_model())
    rank = dist.get_rank()
    rows = [[samples[0], samples[1]], [samples[2]], [samples[3], samples[4]], [samples[5], samples[6]]]
    mine = [collator("packed")(rows[2 * rank + at]) for at in range(2)]
    targets = sum(collator("packed")(row)["vlmpack"].num_targets for row in rows)
    losses, norms = [], []
    for at in range(STEPS):
        if at == RESUMED_AT:
            engine.save_checkpoint(str(folder / f"checkpoint{stage}"))
            engine = engine_of(stage)
            engine.load_checkpoint(str(folder / f"checkpoint{stage}"))
        step, total = PackedStep(engine), torch.zeros(())
        for row in mine:
            result = step(row, num_items_in_batch=targets)
            engine.backward(result.loss * dist.get_world_size() * 2)  # means over ranks and over the rows of a step
            engine.step()
            total += result.loss.detach()
        dist.all_reduce(total)
        losses.append(total.item())
        norms.append(float(engine.get_global_grad_norm()))
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
        weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    if rank == 0:
        torch.save({"losses": losses, "norms": norms, "weights": weights}, folder / f"zero{stage}.pt")
    dist.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    os._exit(0)  # threads of gloo sometimes abort a process that takes itself apart
