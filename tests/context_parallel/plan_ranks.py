"""What each of two gloo ranks runs, started by test_plans.py: one packed step of each family, divided by its plan.

Rank 0 writes the gathered gradients to FOLDER/CASE.pt.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.distributed import DistributedConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
from ranks import save_cases, whole

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
    save_cases(folder, {case: partial(step, folder / case) for case in CASES})


def step(checkpoint: Path) -> dict[str, Any]:
    """Names of parameters that are divided, and all gradients of one step."""
    config = AutoConfig.from_pretrained(checkpoint)
    auto = AutoModelForImageTextToText if FAMILIES[config.model_type].has_vision else AutoModelForCausalLM
    ep_size = 2 if "hub" in checkpoint.name else 1
    mesh = DistributedConfig(tp_size=2, ep_size=ep_size, tp_plan=plan_for(config, tp_size=2))
    model: Any = enable_packing(auto.from_pretrained(checkpoint, distributed_config=mesh))
    PackedStep(model)(padded(samples_of(model))).loss.backward()
    parameters = dict(model.named_parameters())
    divided = [name for name, p in parameters.items() if isinstance(p, DTensor) and p.to_local().shape != p.shape]
    return {
        "divided": divided,
        "gradients": {name: whole(p.grad) for name, p in parameters.items() if p.grad is not None},
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
