"""What each of two gloo ranks runs, started by test_two_ranks.py.

Each rank takes half of the samples through one step of models with experts, under DDP and under FSDP2, with and
without gradient checkpointing. Rank 0 writes the gradients to FOLDER/CASE.pt.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))
from moe import decoder_layers, fresh, samples_of

from vlmpack.layout import SlotRule
from vlmpack.model import PackedStep, StepConfig, enable_packing
from vlmpack.testing import padded

FAMILIES = ("qwen3_vl_moe", "qwen3_5_moe", "gpt_oss")
"""With vision, with gated delta layers, and of text alone; tests/model has all of them in one process."""
WRAPPERS = ("ddp", "fsdp2")
CONFIG = StepConfig(slots=SlotRule(multiple=8), z_loss_coef=0.25)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for family in FAMILIES:
        for wrapper in WRAPPERS:
            for recomputed in (False, True):
                found = gradients(family, wrapper, recomputed=recomputed)
                if dist.get_rank() == 0:
                    torch.save(found, folder / f"{family}-{wrapper}-{recomputed}.pt")
    dist.barrier()  # nobody leaves while another still talks
    dist.destroy_process_group()


def gradients(family, wrapper, *, recomputed):
    """The gradients of one step, the mean over the ranks."""
    model = enable_packing(fresh(family), CONFIG)
    if recomputed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    samples = samples_of(model)
    targets = padded(samples).metadata.num_targets
    mine = padded(samples[:2] if dist.get_rank() == 0 else samples[2:])
    if wrapper == "ddp":
        step = PackedStep(DistributedDataParallel(model, find_unused_parameters=True))  # an indexer only chooses
    else:
        mesh = init_device_mesh("cpu", (2,))
        for part in (*decoder_layers(model), model):
            fully_shard(part, mesh=mesh)
        step = PackedStep(model)
    step(mine, num_items_in_batch=targets, output_router_logits=True).loss.backward()
    learnt = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: (grad if wrapper == "ddp" else grad.full_tensor()).clone() for name, grad in learnt.items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)  # threads of gloo and of DDP sometimes abort a process that takes itself apart
