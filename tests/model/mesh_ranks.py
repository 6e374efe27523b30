"""What each of two or four gloo ranks runs, started by test_meshes.py.

Every case of so many ranks loads its model by transformers' own mesh and takes one packed step. Ranks that share a
batch get the same samples, data ranks their own. Rank 0 writes the gathered gradients to FOLDER/CASE.pt.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.distributed import DistributedConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
from model.two_ranks import samples_of

from vlmpack.context_parallel import Parallel
from vlmpack.model import PackedStep, enable_packing
from vlmpack.testing import padded
from vlmpack.testing.samples import VISION

LAYER = "model.language_model.layers.*."
ATTENTION = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
MLP = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
NORMS = ("q_norm", "k_norm")
QWEN3_VL = {
    **{f"{LAYER}self_attn.{name}": how for name, how in ATTENTION.items()},
    **{f"{LAYER}self_attn.{name}": "replicated_with_grad_allreduce" for name in NORMS},
    **{f"{LAYER}mlp.{name}": how for name, how in MLP.items()},
}
"""A plan for dense Qwen3-VL: the one of transformers divides its head alone. Norms of heads are used by each rank for
its own heads, so their gradients are summed."""
MESHES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "qwen3 tp": (2, "qwen3", {"tp_size": 2}),
    "qwen3_vl tp": (2, "qwen3_vl", {"tp_size": 2, "tp_plan": QWEN3_VL}),
    "qwen3_moe tp ep": (2, "qwen3_moe", {"tp_size": 2, "ep_size": 2, "enable_expert_parallel": True}),
    "qwen3_vl fsdp": (2, "qwen3_vl", {"fsdp_size": 2}),
    "qwen3_vl fsdp, a rank without images": (2, "qwen3_vl", {"fsdp_size": 2}),
    "qwen3_5 fsdp": (2, "qwen3_5", {"fsdp_size": 2}),
    "qwen3_vl fsdp tp": (4, "qwen3_vl", {"fsdp_size": 2, "tp_size": 2, "tp_plan": QWEN3_VL}),
    "qwen3_moe fsdp ep": (4, "qwen3_moe", {"fsdp_size": 2, "tp_size": 2, "ep_size": 2, "enable_expert_parallel": True}),
    "qwen3_vl hsdp": (4, "qwen3_vl", {"fsdp_size": 2, "dp_replicate_size": 2}),
}
"""Ranks, family and mesh of each case."""


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case, (ranks, family, mesh) in MESHES.items():
        if ranks == dist.get_world_size():
            gradients = step(folder / family, without_images="without images" in case, **mesh)
            if dist.get_rank() == 0:
                torch.save(gradients, folder / f"{case}.pt")
    dist.barrier()  # nobody leaves while another still talks
    dist.destroy_process_group()


def step(model_folder: Path, *, without_images: bool, **mesh: Any) -> dict[str, torch.Tensor]:
    """The gradients of one step over all data ranks, gathered: their mean."""
    auto = AutoModelForImageTextToText if model_folder.name in VISION else AutoModelForCausalLM
    model: Any = auto.from_pretrained(model_folder, distributed_config=DistributedConfig(**mesh))
    divided = [p for p in model.parameters() if isinstance(p, DTensor) and p.to_local().shape != p.shape]
    assert len(divided) > len(list(model.parameters())) / 5, "hardly anything is divided"
    samples, data_ranks = samples_of(model), dist.get_world_size() // mesh.get("tp_size", 1)
    half = dist.get_rank() // mesh.get("tp_size", 1) % 2  # replicas get the same half
    mine = samples if data_ranks == 1 else samples[:2] if half == 0 else samples[2:]
    if without_images:
        mine = [each for each in samples if ("pixel_values" in each) == (half == 0)]
    model = enable_packing(model, parallel=Parallel() if without_images else None)
    result = PackedStep(model)(padded(mine), num_items_in_batch=padded(samples).metadata.num_targets)
    result.loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
