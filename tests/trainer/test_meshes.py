"""PackedTrainer under transformers' meshes: every step is that of one process, and checkpoints fit other meshes.

The model has images, gated delta layers and attention, in float64; that of "moe" runs has experts, in float32.

As a script: what each of two or four gloo ranks runs. Rank 0 writes checkpoints to FOLDER/MESH.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import ParallelismConfig
from ranks import on_ranks, save_cases, whole
from torch.distributed.device_mesh import init_device_mesh
from trainer.packed_runs import plan_of
from training import KINDS, Samples, apart, arguments, logged, receipts
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.distributed import DistributedConfig

from vlmpack.context_parallel import Parallel, plan_for
from vlmpack.errors import ConfigError
from vlmpack.layout import SlotRule, pack
from vlmpack.model import enable_packing
from vlmpack.testing import padded, tiny_model
from vlmpack.trainer import PackedTrainer

pytestmark = [pytest.mark.dist, pytest.mark.slow]
STEPS, STOP = 10, 6
WHOLE = {
    "tp": 2,
    "tp accumulated": 2,
    "fsdp": 2,
    "context": 2,
    "ddp accumulated": 2,
    "fsdp shared": 2,
    "fsdp tp": 4,
    "fsdp tp shared": 4,
    "fsdp dp_replicate": 4,
    "moe tp ep all_to_all": 2,
    "moe tp ep all_reduce": 2,
    "moe fsdp dp_replicate": 4,
}
"""Meshes under which a run goes through, and their ranks."""
CONTINUED = {
    "fsdp from fsdp tp": 2,
    "fsdp from tp accumulated": 2,
    "tp accumulated from fsdp": 2,
    "fsdp4 shared from tp accumulated": 4,
    "ddp from fsdp": 2,
    "ddp from ddp accumulated": 4,
    "alone accumulated accumulated from ddp accumulated": 1,
    "alone from tp": 1,
}
"""Runs that go on from the checkpoint of another with as many rows a step, and their ranks."""


def trained(folder: Path, name: str) -> dict[str, Any]:
    """Train through, or from the checkpoint of another mesh to the end."""
    mesh, _, before = name.partition(" from ")
    with nullcontext() if "moe" in mesh else in_float64():
        run = run_of(folder, mesh, folder / mesh, gradient_accumulation_steps=2 ** mesh.count("accumulated"))
        run.train(resume_from_checkpoint=str(folder / before / f"checkpoint-{STOP}") if before else None)
        return seen_of(run)


@contextmanager
def in_float64() -> Iterator[None]:
    """Compute in float64, even what models compute in float32 whatever they are given."""
    patch, tensor = mock.patch.object, torch.Tensor
    with patch(torch, "float32", torch.float64), patch(tensor, "float", tensor.double):
        yield


def seen_of(run: PackedTrainer) -> dict[str, Any]:
    """What a run came to, and its evaluation."""
    return {
        "losses": logged(run),
        "weights": {name: whole(p.detach()) for name, p in run.model.named_parameters()},
        "norms": [entry["grad_norm"] for entry in run.state.log_history if "grad_norm" in entry],
        "metrics": run.evaluate(),
    }


def refused(folder: Path) -> list[str]:
    """What runs with two tensor ranks end with: on Trainer's own batches, from a checkpoint without a mesh, and with
    DeepSpeed; and with two context ranks of accelerate besides."""
    *of_tensor, of_accelerate = (run_of(folder, mesh, folder / "refused") for mesh in ("tp", "tp", "tp", "context"))
    unplanned, planned, deepspeed = of_tensor
    unplanned.plan, unplanned.eval_packing = None, False
    deepspeed.is_deepspeed_enabled = True
    folder_of_others = folder / "others" / "checkpoint-1"
    folder_of_others.mkdir(parents=True, exist_ok=True)
    for file in ("trainer_state.json", "packed_plan.json", "optimizer.pt", "scheduler.pt"):
        (folder_of_others / file).write_text("{}")
    messages = []
    calls = unplanned.train, unplanned.evaluate, partial(planned.train, str(folder_of_others))
    for call in (*calls, deepspeed.train, of_accelerate.train):
        if call == of_accelerate.train:
            of_accelerate.accelerator.state.parallelism_config = ParallelismConfig(cp_size=2)
        try:
            call()
        except ConfigError as error:
            messages.append(str(error))
    return messages


def run_of(folder: Path, mesh: str, output: Path, **settings: Any) -> PackedTrainer:
    """Ten steps of AdamW with clipping over the rows of a plan, one row a step on each rank with rows of its own.

    With AdamW's own epsilon of 1e-8, gradients that are rounding errors move weights as far as any others: a nudge of
    1e-7 in one process then comes to 1e-4 in float32. With 1e-2 they move them as little as they are.
    """
    has_experts = "moe" in mesh.split()
    model = model_on(folder / ("moe" if has_experts else "model"), mesh)
    samples = receipts(model, kinds=("text",) * 16 if has_experts else KINDS * 2)
    defaults = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": STOP, "learning_rate": 5e-4}
    defaults |= {"optim": "adamw_torch", "adam_epsilon": 1e-2 if has_experts else 1e-8, "max_grad_norm": 0.5}
    args = arguments(output, **defaults | settings)
    plan = plan_of(samples)
    return PackedTrainer(model, args, rows_of_even_width, Samples(samples), Samples(samples), plan=plan, eval_plan=plan)


def rows_of_even_width(samples: list[Any]) -> dict[str, Any]:
    """A packed row that two context ranks can share."""
    return pack(padded(samples), rule=SlotRule(row_multiple=2)).to_hf()


def model_on(model_folder: Path, mesh: str) -> Any:
    names = mesh.split()
    sizes: dict[str, Any] = {f"{name}_size": 2 for name in ("tp", "ep", "fsdp", "dp_replicate") if name in names}
    sizes |= {"fsdp_size": 4} if "fsdp4" in names else {}
    sizes |= {"ep_implementation": names[-1]} if "ep" in names else {}
    if "tp_size" in sizes:
        sizes["tp_plan"] = plan_for(AutoConfig.from_pretrained(model_folder), tp_size=2)
    divided = {"distributed_config": DistributedConfig(**sizes)} if sizes else {}
    auto = AutoModelForCausalLM if "moe" in names else AutoModelForImageTextToText
    model = auto.from_pretrained(model_folder, dtype="auto", **divided)
    parallel = Parallel(context=2) if "shared" in names else None
    if mesh == "context":
        parallel = Parallel(init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "context")))
    return enable_packing(model, parallel=parallel)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs left what they came to; four ranks before and after the two whose checkpoints they exchange."""
    folder = tmp_path_factory.mktemp("meshes")
    tiny_model("qwen3_5", vision_depth=1).double().save_pretrained(folder / "model")
    tiny_model("qwen3_moe").save_pretrained(folder / "moe")
    for ranks, runs in ((4, WHOLE), (2, WHOLE | CONTINUED), (4, CONTINUED)):
        chosen = [name for name, number in runs.items() if number == ranks]
        on_ranks(Path(__file__), folder, *chosen, ranks=ranks)
    for name in ("alone from tp", "alone accumulated accumulated from ddp accumulated"):
        torch.save(trained(folder, name), folder / f"{name}.pt")
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[Any, dict]:
    """What one process comes to, with the rows of so many ranks in each step."""
    seen = {}
    for mesh, rows in (("alone", 1), ("alone", 2), ("alone", 4), ("moe alone", 1), ("moe alone", 4)):
        with nullcontext() if "moe" in mesh else in_float64():
            run = run_of(folder, mesh, folder / f"{mesh} {rows}", gradient_accumulation_steps=rows)
            run.train()
            seen[mesh, rows] = seen_of(run)
    return seen


@pytest.mark.parametrize("name", [*WHOLE, *CONTINUED])
def test_steps_losses_and_evaluation_are_those_of_one_process(folder: Path, alone: dict[Any, dict], name: str) -> None:
    seen = torch.load(folder / f"{name}.pt", weights_only=False)
    mesh = name.partition(" from ")[0]
    doublings = mesh.count("accumulated") - len({"tp", "context", "shared"}.intersection(mesh.split()))
    expected = alone["moe alone" if "moe" in mesh else "alone", (WHOLE | CONTINUED)[name] * 2**doublings]
    assert max(expected["norms"]) > 0.5  # the guard: gradients were clipped
    assert seen["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert seen["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert len(seen["losses"]) == STEPS
    assert apart(seen["weights"], expected["weights"]) <= (1e-6 if "moe" in mesh else 1e-11)
    for metric in ("eval_loss", "eval_sample_loss", "eval_num_samples"):
        assert seen["metrics"][metric] == pytest.approx(expected["metrics"][metric], rel=1e-6)


def test_what_trainer_cannot_do_on_ranks_that_share_rows_is_refused(folder: Path) -> None:
    trains, evaluates, resumes, deepspeed, of_accelerate = torch.load(folder / "refused.pt")
    for message in (trains, evaluates):
        assert "2 ranks share each batch, and Trainer deals batches to single ranks" in message
    assert "checkpoint-1 has no divided_optimizer: it was written without a mesh" in resumes
    assert "on a mesh of transformers (distributed_config=), and DeepSpeed would divide it again" in deepspeed
    assert "4 processes would compute each batch together, but the rows are for 2" in of_accelerate


def main(folder: Path, *names: str) -> None:
    ParallelismConfig._validate_accelerator = lambda *_: None  # accelerate allows tensor ranks on accelerators alone
    runs = {name: partial(trained, folder, name) for name in names}
    save_cases(folder, runs | ({"refused": partial(refused, folder)} if os.environ["WORLD_SIZE"] == "2" else {}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
    os._exit(0)  # threads of gloo and of DDP sometimes abort a process that takes itself apart
