"""What each of two or four gloo ranks runs, started by test_meshes.py.

Every case of so many ranks loads its model by transformers' own mesh and takes one packed step. Ranks that share a
batch get the same samples, data ranks their own. Rank 0 writes what it saw to FOLDER/CASE.pt.
"""

import os
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from equality import VISION
from model.two_ranks import samples_of
from peft import LoraConfig, get_peft_model
from ranks import save_cases, whole
from teachers import taught
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.distributed import DistributedConfig

from vlmpack.context_parallel import Parallel, plan_for
from vlmpack.errors import ConfigError, LayoutError
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import SlotRule
from vlmpack.model import Distillation, PackedStep, StepConfig, disable_packing, enable_packing
from vlmpack.model.engine import packing_state
from vlmpack.model.head import Scoring, score_targets
from vlmpack.testing import Sample, alone, padded


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step on a mesh."""

    family: str
    sizes: dict[str, Any] = field(default_factory=dict)
    """The mesh, as `DistributedConfig` takes it."""
    context: int = 1
    """Data ranks that share a row."""
    passes: int = 1
    """Backward passes whose gradients are accumulated; FSDP2 exchanges them in the last."""
    aux_loss: str = "row"
    """See `StepConfig`; "step" also has a z-loss."""

    @property
    def ranks(self) -> int:
        """Return how many processes it takes."""
        return self.data_ranks * self.context * self.sizes.get("tp_size", 1)

    @property
    def data_ranks(self) -> int:
        return self.sizes.get("fsdp_size", 1) * self.sizes.get("dp_replicate_size", 1) // self.context

    @property
    def has_experts(self) -> bool:
        return FAMILIES[self.family].has("experts")

    def __str__(self) -> str:
        sizes = [f"{name.removesuffix('_size')} {size}" for name, size in self.sizes.items()]
        return " ".join([self.family, *sizes, *self._others])

    @property
    def _others(self) -> list[str]:
        counts = [f"{name} {n}" for name, n in (("context", self.context), ("passes", self.passes)) if n > 1]
        return counts + ["routers of all ranks"] * (self.aux_loss == "step")

    @property
    def config(self) -> StepConfig:
        """The settings. Of two FSDP ranks, one has one chunk of targets and one has two; rows of expert ranks end with
        padding."""
        of_routers = {"aux_loss": "step", "z_loss_coef": Z_LOSS} if self.aux_loss == "step" else {}
        settings = {"head_chunk": 50 if "fsdp_size" in self.sizes else 2048, "distillation": DISTILLATION}
        slots = SlotRule(row_multiple=WIDTH if "ep_size" in self.sizes else 1)
        return StepConfig(slots=slots, **settings, **of_routers)

    def shares(self, samples: list[Sample]) -> list[list[Sample]]:
        """The samples of each data rank. Of two data ranks, the second has no image."""
        return [samples[rank :: self.data_ranks] for rank in range(self.data_ranks)]


def _on(sizes: dict[str, Any], *families: str, **settings: Any) -> list[Case]:
    return [Case(family=family, sizes=sizes, **settings) for family in families]


TEXT, MOE, VL, DELTA = "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_5"
DISTILLATION = Distillation(weight=0.5)
"""Half of the loss is cross-entropy."""
WIDTH = 64
"""Of rows with padding, a multiple."""
Z_LOSS = 0.01
"""Factor of the z-loss."""
CASES = [
    *_on({"fsdp_size": 2}, VL, DELTA, MOE),
    *_on({"tp_size": 2}, TEXT, VL, DELTA, MOE),
    *_on({"tp_size": 2}, TEXT, passes=2),
    *_on({"tp_size": 2, "ep_size": 2, "ep_implementation": "all_to_all"}, MOE),
    *_on({"tp_size": 2, "ep_size": 2, "ep_implementation": "all_reduce"}, MOE),
    *_on({"fsdp_size": 2, "ep_size": 2}, MOE),
    *_on({"fsdp_size": 2}, MOE, aux_loss="step"),
    *_on({"fsdp_size": 2}, VL, DELTA, MOE, context=2),
    *_on({"dp_replicate_size": 2}, VL, MOE),
    *_on({"fsdp_size": 2, "tp_size": 2}, VL, DELTA, MOE),
    *_on({"fsdp_size": 2, "tp_size": 2}, TEXT, passes=2),
    *_on({"fsdp_size": 2, "tp_size": 2, "ep_size": 2}, MOE),
    *_on({"fsdp_size": 2, "tp_size": 2, "ep_size": 4}, MOE),
    *_on({"fsdp_size": 2, "tp_size": 2}, VL, DELTA, MOE, context=2),
    *_on({"fsdp_size": 2, "tp_size": 2, "ep_size": 2}, MOE, context=2),
    *_on({"fsdp_size": 4}, VL, context=2),
    *_on({"fsdp_size": 4}, MOE, context=2, aux_loss="step"),
    *_on({"fsdp_size": 2, "dp_replicate_size": 2}, VL, MOE),
]


ADAPTERS = LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear")
MISFITS = (
    (Case(family=DELTA, sizes={"tp_size": 2}), {"target_modules": ["in_proj_qkv"]}),
    (Case(family=MOE, sizes={"fsdp_size": 2, "ep_size": 2}), {"target_parameters": ["mlp.experts.down_proj"]}),
    (Case(family=MOE, sizes={"tp_size": 2}), {"target_parameters": ["mlp.experts.gate_up_proj"]}),
)
"""Adapters that PEFT cannot make for a mesh."""

WHERE = (([Shard(1)], 4), ([Shard(1)], 11), ([Replicate()], 4))
"""Where the logits of a head of 13 ids are, and how many at a time."""


def main(folder: Path) -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    cases: dict[str, Any] = {
        str(case): partial(step, case, folder / case.family) for case in CASES if case.ranks == ranks
    }
    save_cases(
        folder,
        cases | ({"parts": partial(parts, folder), "mean": partial(mean_loss, folder / MOE)} if ranks == 2 else {}),
    )


def parts(folder: Path) -> dict[str, Any]:
    found = {str(number): scores(*where) for number, where in enumerate(WHERE)}
    found |= {"towers": other_towers(), "mesh": other_mesh(folder), "adapters": adapters(folder / TEXT)}
    return found | {"misfits": [misfits(*case, folder / case[0].family) for case in MISFITS]}


def adapters(folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The weights and gradients of adapters on all layers that tensor ranks divide."""
    model = loaded(Case(family=TEXT, sizes={"tp_size": 2}), folder)
    torch.manual_seed(0)
    model = enable_packing(get_peft_model(model, ADAPTERS))
    PackedStep(model)(padded(samples_of(model.get_base_model()))).loss.backward()
    return {name: (whole(p.detach()), whole(p.grad)) for name, p in model.named_parameters() if p.requires_grad}


def misfits(case: Case, targets: dict[str, Any], folder: Path) -> str:
    """What is said of adapters that are added after packing was enabled."""
    model = enable_packing(loaded(case, folder))
    adapted = get_peft_model(model, LoraConfig(r=4, **targets))
    try:
        PackedStep(adapted)(padded(samples_of(model)))
    except ConfigError as error:
        return str(error)
    return ""


def other_mesh(folder: Path) -> str:
    """What is said of a model that is on another mesh than the one that is given."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
    try:
        enable_packing(loaded(Case(family=TEXT, sizes={"tp_size": 2}), folder / TEXT), parallel=Parallel(mesh))
    except ConfigError as error:
        return str(error)
    return ""


def loaded(case: Case, folder: Path) -> Any:
    """The plan of transformers for dense Qwen3-VL divides its head alone."""
    auto = AutoModelForImageTextToText if case.family in VISION else AutoModelForCausalLM
    planned = case.family == VL and "tp_size" in case.sizes
    plan = {"tp_plan": plan_for(AutoConfig.from_pretrained(folder), tp_size=2)} if planned else {}
    return auto.from_pretrained(folder, distributed_config=DistributedConfig(**case.sizes, **plan))


def step(case: Case, folder: Path) -> dict[str, Any]:
    """The loss and the gathered gradients of one step over all data ranks, and what this rank saw of its samples."""
    model = loaded(case, folder)
    divided = [p for p in model.parameters() if isinstance(p, DTensor) and p.to_local().shape != p.shape]
    assert len(divided) > len(list(model.parameters())) / 5 or "dp_replicate_size" in case.sizes, "nothing is divided"
    if case.passes > 1:  # transformers adds its hooks when the model runs
        model(**alone(samples_of(model)[0], labels=False))
    own_forward = vars(model.lm_head).get("forward")
    enable_packing(model, case.config, parallel=Parallel(context=case.context) if case.context > 1 else None)
    parallel = packing_state(model).parallel
    assert parallel is not None
    assert (parallel.data_ranks, parallel.ranks) == (case.data_ranks, case.context)
    samples = samples_of(model)
    mine = case.shares(samples)[parallel.data_rank]
    routers = {"output_router_logits": True} if case.has_experts else {}
    run = PackedStep(model)
    items, results = padded(samples).metadata.num_targets, []
    shares = [mine] if case.passes == 1 else [mine[:1], mine[1:]]
    with Exchanged() as exchanged:
        for number, share in enumerate(shares, 1):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(number == case.passes)
            batch = taught(padded(share), share, model.get_input_embeddings().num_embeddings)
            results.append(run(batch, num_items_in_batch=items, entropy=True, **routers))
            (results[-1].loss * parallel.data_ranks * parallel.ranks).backward()
    total = sum(result.loss_sum.detach() for result in results)
    dist.all_reduce(total)
    result = results[-1]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    error = refused(run, samples) if "tp_size" in case.sizes else ""
    if case.data_ranks * case.context == 1:  # FSDP2 changes the class
        assert vars(disable_packing(model).lm_head).get("forward") is own_forward
    return {
        "refused": error,
        "loss": total * parallel.data_ranks / dist.get_world_size(),
        "gradients": {name: whole(gradient) for name, gradient in gradients.items()},
        "logprobs": torch.cat([result.target_logprobs.detach() for result in results]),
        "entropies": torch.cat([result.target_entropies.detach() for result in results]),
        "sample losses": torch.cat([result.sample_losses for result in results]),
        "aux loss": None if result.aux_loss is None else result.aux_loss.detach(),
        "added": None if result.routers is None else result.routers.added.detach(),
        "expert counts": result.expert_counts,
        "exchanged": exchanged.calls,
        "sent": parallel.sent,
    }


def mean_loss(folder: Path) -> dict[str, Any]:
    """The mean of both ranks' losses, each divided by its own targets, and its gradients."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    enable_packing(model, StepConfig(aux_loss="step"), parallel=Parallel())
    loss = PackedStep(model)(padded(samples_of(model)[dist.get_rank() :: 2]), output_router_logits=True).loss
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters()} | {"loss": loss.detach()}
    for tensor in found.values():
        dist.all_reduce(tensor)
    return {name: tensor / 2 for name, tensor in found.items()}


def refused(run: PackedStep, samples: list[Sample]) -> str:
    """What is said where ranks that should have the same samples have different ones."""
    try:
        run(padded(samples[dist.get_rank() :]))
    except LayoutError as error:
        return str(error)
    return ""


def scores(placement: Any, chunk: int) -> list[tuple[torch.Tensor, ...]]:
    """Log-probabilities, entropies and the gradients of both, with the logits where `placement` says and whole."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found = []
    for places in (placement, None):
        rng = torch.Generator().manual_seed(0)
        hidden, weight = (torch.randn(n, 8, generator=rng).requires_grad_() for n in (11, 13))
        targets = torch.randint(13, (11,), generator=rng)

        def head(hidden_lD: torch.Tensor, weight=weight, places=places) -> torch.Tensor:
            logits = hidden_lD @ weight.T
            logits = logits if places is None else DTensor.from_local(logits, mesh, [Replicate()])
            return logits if places is None else logits.redistribute(mesh, places)

        settings = {"chunk": chunk, "scoring": Scoring(temperature=0.7, entropy=True)}
        logprobs, entropy = score_targets(hidden[None], torch.arange(11), targets, head, **settings)
        (logprobs * torch.arange(11) + entropy.square()).sum().backward()
        found.append((logprobs.detach(), entropy.detach(), hidden.grad, weight.grad))
    return found


def other_towers() -> list[str]:
    """What is said where one data rank has an image, or audio, and one has none, and blank ones cannot be computed."""
    parallel, messages = Parallel(init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))), []
    for media, family in (("images", "llama4"), ("audio", "qwen2_5_omni_thinker")):
        try:
            parallel.check_same_towers(media, dist.get_rank(), torch.ones(1, 4).long(), family)
        except LayoutError as error:
            messages.append(str(error))
    return messages


class Exchanged(TorchDispatchMode):
    """Every collective: its name and the shape of what this rank gives."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        if space in ("c10d", "_c10d_functional") and not name.startswith(("wait", "_wrap")):
            given = args[0]
            while isinstance(given, list | tuple):
                given = given[0]
            self.calls.append((name.rstrip("_"), tuple(given.shape)))
        return func(*args, **(kwargs or {}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
