"""What each gloo rank runs, started by test_balanced.py: balanced_ranks.py FOLDER CASE ...

Each case is one step whose images are dealt to all ranks. Rank 0 writes what came out to FOLDER/CASE.pt.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from peft import LoraConfig, get_peft_model
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))
from ranks import save_cases, whole

from vlmpack.context_parallel import Parallel
from vlmpack.families import family_named
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import IGNORE, SlotRule, pack, share
from vlmpack.model import PackedStep, enable_packing
from vlmpack.testing import Sample, mixed_samples, padded, tiny_model
from vlmpack.testing.branching import joined
from vlmpack.testing.samples import num_targets

TEXT, MANY = ("text", "text"), ("images", "video", "image", "images_and_video")


class Case(NamedTuple):
    """One step."""

    family: str
    rows: tuple[tuple[str, ...], ...] = (TEXT, MANY)
    """The kinds of the samples of each row."""
    context: int = 1
    """Number of ranks that share a row."""
    how: str = "checkpointed"
    """What else is done to the model, or to its rows: the last one has no targets, or samples share a prefix."""

    def __str__(self) -> str:
        return f"{self.family} {' + '.join(map('-'.join, self.rows))} context={self.context} {self.how}"

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.rows) * self.context

    def model(self) -> Any:
        """Two blocks of vision; with `lora`, adapters in both towers."""
        model = tiny_model(self.family, seed=3, vision_depth=2)
        if self.how != "lora":
            return model
        torch.manual_seed(5)
        adapters = LoraConfig(r=4, target_modules=r".*(qkv|linear_fc1|q_proj|v_proj)", init_lora_weights=False)
        return get_peft_model(model, adapters)

    def samples(self) -> list[list[Sample]]:
        """The samples of each row, of a kind that the family takes."""
        family, config, found = family_named(self.family), tiny_model(self.family).config, []
        for seed, kinds in enumerate(self.rows):
            taken = [kind.replace("images_and_", "") if family.videos_as_images else kind for kind in kinds]
            taken = [kind if family.has_videos or "video" not in kind else "image" for kind in taken]
            samples = mixed_samples(config, seed=seed, kinds=cast(Any, taken))
            if self.how == "shared prefix":
                samples = [joined([samples[0], sample]) for sample in samples[1:]]
            found.append(samples)
        if self.how == "no targets":
            for sample in found[-1]:
                sample["labels"].fill_(IGNORE)
        return found


TOGETHER = [name for name, family in FAMILIES.items() if family.has_vision and not family.not_over_ranks]
QUICK = [
    Case("qwen3_vl"),
    Case("qwen2_5_vl", (MANY, TEXT)),
    Case("gemma3"),
    Case("glm4v"),
    Case("qwen3_vl", (TEXT, TEXT)),
]
OF_TWO = [
    *(Case(name) for name in TOGETHER if name not in {case.family for case in QUICK}),
    *(Case("qwen3_vl", how=how) for how in ("ddp", "fsdp2", "lora", "shared prefix", "no targets")),
]
OF_FOUR = [
    Case("qwen3_vl", (("image",), TEXT, MANY, ("video", "images"))),
    Case("qwen3_vl", (("image",), TEXT, ("video",), ("text", "image")), how="fsdp2"),
    *(Case(name, context=2) for name in ("qwen3_vl", "qwen2_5_vl", "glm4v", "gemma3", "internvl")),
]
CASES = [*QUICK, *OF_TWO, *OF_FOUR]


def main(folder: Path, names: list[str]) -> None:
    save_cases(folder, {str(case): partial(step, case) for case in CASES if str(case) in names})


def step(case: Case) -> dict[str, Any]:
    """Sample losses, sums of gradients, and for each rank the patches of its tower and the bytes that it sent."""
    mesh = None
    if case.context > 1:
        mesh = init_device_mesh("cpu", (len(case.rows), case.context), mesh_dim_names=("data", "context"))
    parallel = Parallel(mesh, balance_vision=True)
    model = enable_packing(case.model(), parallel=parallel).train()
    core = model.get_base_model() if case.how == "lora" else model
    core.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    patches: list[int] = []
    tower = core.get_submodule(family_named(case.family).vision_path)
    tower.register_forward_pre_hook(
        lambda _, args, kwargs: patches.append(len(args[0] if args else kwargs["pixel_values"])), with_kwargs=True
    )
    rows = case.samples()
    targets = sum(num_targets(sample) for samples in rows for sample in samples)
    row = pack(padded(rows[parallel.data_rank]), rule=SlotRule(row_multiple=case.context))
    if case.how == "shared prefix":
        row = share(row, min_shared=1, read_media=family_named(case.family).media_reader(core.config))
        assert (row.tree is None) == (len(rows[parallel.data_rank]) == 1)
    run = PackedStep(wrapped(case, model))  # kept until the backward pass: so are DDP's hooks
    result = run(row, num_items_in_batch=targets)
    (result.loss * (case.ranks if case.how in ("ddp", "fsdp2") else 1)).backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        if case.how not in ("ddp", "fsdp2"):
            dist.all_reduce(grad)
        if parameter.requires_grad:
            gradients[name] = whole(grad)
    of_ranks: list[Any] = [None] * case.ranks
    dist.all_gather_object(of_ranks, (result.sample_losses.detach(), patches, parallel.sent))
    losses, computed, sent = zip(*of_ranks, strict=True)
    return {
        "losses": torch.cat(losses[:: case.context]),
        "gradients": gradients,
        "patches": [count for (count,) in computed],
        "sent": sent,
    }


def wrapped(case: Case, model: Any) -> Any:
    """The model to call."""
    if case.how == "ddp":
        return DistributedDataParallel(model)
    if case.how == "fsdp2":
        mesh = init_device_mesh("cpu", (case.ranks,))
        for part in (*model.model.visual.blocks, *model.model.language_model.layers):
            fully_shard(part, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return model


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
