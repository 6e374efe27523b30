"""What each of two gloo ranks runs, started by test_sharding.py, and the samples that it and test_meshes.py compare.

Each rank takes its half of the samples through one step of every case. Rank 0 writes the gradients to FOLDER/CASE.pt.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trees
from equality import VISION
from ranks import save_cases, whole
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from vlmpack.families import family_of
from vlmpack.layout import SlotRule, pack
from vlmpack.model import PackedStep, StepConfig, enable_packing
from vlmpack.testing import Sample, mixed_samples, padded, tiny_model

CASES = (
    ("qwen3_5", "ddp", "left padded"),
    ("qwen3_5", "fsdp2", "row with gaps"),
    ("qwen3_5", "fsdp2 of layers' parts", "left padded"),
    ("qwen3", "ddp", "row with gaps"),
    ("qwen3", "fsdp2", "left padded"),
    *((family, "ddp", "left padded") for family in ("qwen3_vl_moe", "gpt_oss")),
    ("qwen3_vl", "ddp", "group"),
    ("qwen3_vl", "fsdp2", "group"),
    ("qwen3_5", "fsdp2 of layers' parts", "group"),
    ("qwen3_5", "ddp", "group, one loss"),
)
"""(family, wrapper, how the samples are handed in)."""


def fresh(family: str) -> Any:
    """Two gated delta layers and one with attention, in a hybrid family."""
    return tiny_model(family, seed=3, layers=3, vision_depth=1)


def samples_of(model: Any, layout: str = "") -> list[Sample]:
    """Five samples: two for the first rank and three for the second, images on both. Of a group, the first rank has no
    image and a row that fits."""
    if layout.startswith("group"):
        return trees.samples_of(model.config, trees.rollouts(3, 4, images=0), trees.rollouts(5, 1, 9), masked=(0, 6))
    kinds = ("image", "text", "images", "text", "text") if model.config.model_type in VISION else ("text",) * 5
    return mixed_samples(model.config, seed=4, kinds=kinds, side=(1, 2))


def main(folder: Path) -> None:
    save_cases(folder, {" ".join(case): partial(gradients, *case) for case in CASES})


def gradients(family: str, wrapper: str, layout: str) -> dict[str, torch.Tensor]:
    """The gradients of one recomputed step, the mean over the ranks; their halves have neither number nor lengths in
    common."""
    model = enable_packing(fresh(family))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    samples = samples_of(model, layout)
    targets, rank = padded(samples).metadata.num_targets, dist.get_rank()
    mine = samples[:2] if rank == 0 else samples[2:]
    batch = padded(mine, "left") if layout == "left padded" else pack(padded(mine), rule=SlotRule(multiple=8))
    finds = {"find_unused_parameters": "one loss" in layout}  # of a step, the first rank has no image
    step = PackedStep(DistributedDataParallel(model, **finds) if wrapper == "ddp" else sharded(model, wrapper))
    if layout == "group":
        group = step.group(trees.shared(mine), capacity=(40, 20)[rank], num_items_in_batch=targets)
        assert (len(group) == 1) is (rank == 0)
        group.forward()
        group.backward()
    else:
        if layout.startswith("group"):
            batch, step = trees.shared(mine), PackedStep(step.model, StepConfig(capacity=(40, 12)[rank]))
        step(batch, num_items_in_batch=targets).loss.backward()
    return {name.removeprefix("module."): whole(p.grad).clone() for name, p in step.model.named_parameters()}


def sharded(model, wrapper: str):
    mesh = init_device_mesh("cpu", (2,))
    layers = family_of(model).language_model(model).get_submodule("layers").children()
    for layer in layers:
        if "parts" in wrapper:
            for part in layer.children():
                if any(True for _ in part.parameters()):
                    fully_shard(part, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
