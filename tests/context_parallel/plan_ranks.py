"""What each of two gloo ranks runs, started by test_plans.py: one packed step of each family, divided by its plan.

Rank 0 writes the gathered gradients to FOLDER/CASE.pt.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.distributed import DistributedConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
from vlmpack.context_parallel import plan_for
from vlmpack.families.registry import FAMILIES
from vlmpack.model import PackedStep, enable_packing
from vlmpack.testing import Sample, mixed_samples, padded

CASES = (
    *("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe_thinker", "glm4v_moe", "gemma4", "llama4_text"),
    "qwen3_vl_moe of the hub",
)
"""Families, on two tensor ranks. Checkpoints on the hub hold experts transposed: they are divided by expert ranks."""


def samples_of(model: Any) -> list[Sample]:
    kinds = ("image", "text", "images", "text") if FAMILIES[model.config.model_type].has_vision else ("text",) * 4
    return mixed_samples(model.config, seed=4, kinds=kinds, side=(1, 2))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in CASES:
        config = AutoConfig.from_pretrained(folder / case)
        auto = AutoModelForImageTextToText if FAMILIES[config.model_type].has_vision else AutoModelForCausalLM
        ep_size = 2 if "hub" in case else 1
        mesh = DistributedConfig(tp_size=2, ep_size=ep_size, tp_plan=plan_for(config, tp_size=2))
        loaded = auto.from_pretrained(folder / case, distributed_config=mesh)
        model: Any = enable_packing(loaded)
        PackedStep(model)(padded(samples_of(model))).loss.backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        divided = [
            name for name, p in model.named_parameters() if isinstance(p, DTensor) and p.to_local().shape != p.shape
        ]
        gathered = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}
        if dist.get_rank() == 0:
            torch.save({"divided": divided, "gradients": gathered}, folder / f"{case}.pt")
    dist.barrier()  # nobody leaves while another still talks
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
