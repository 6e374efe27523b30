"""What each of four gloo ranks runs, started by test_context.py.

Every case goes through one step on one rank alone and through one shared by several. Rank 0 writes what it saw to
FOLDER/result.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from host_syncs import own_lines, recorded_syncs
from ranks import whole
from shared_rows import CASES, DATA_CASES, WAIT_CASES, WORLD, Case, relative, rows_of, targets
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from vlmpack.context_parallel import Parallel, sum_counts
from vlmpack.context_parallel.mesh import sum_gradients
from vlmpack.families import family_of
from vlmpack.model import PackedStep, StepConfig, StepResult, enable_packing
from vlmpack.testing import tiny_model

Seen = dict[str, Any]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    chosen = json.loads((folder / "chosen.json").read_text())
    meshes = {n: init_device_mesh("cpu", (WORLD // n, n), mesh_dim_names=("data", "context")) for n in (1, 2, 4)}
    seen = {
        "shared": dict(shared_rows(meshes, chosen)),
        "data": {
            name: data_parallel(*case, meshes[case[1]])
            for case in DATA_CASES
            if (name := " ".join(map(str, case))) in chosen
        },
        "waits": {str(case): waits(case, meshes[case.ranks]["context"]) for case in WAIT_CASES if str(case) in chosen},
    }
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(seen))
    dist.barrier()  # nobody leaves while another still talks
    dist.destroy_process_group()


# ---------------------------------------------------------------------- one row over several ranks


def shared_rows(meshes: dict[int, DeviceMesh], chosen: list[str]) -> Iterator[tuple[str, Seen]]:
    alone: dict[str, tuple[StepResult, dict[str, torch.Tensor]]] = {}
    for case in CASES:
        if str(case) not in chosen or dist.get_rank() >= case.ranks:  # the others do the next ones
            continue
        if dist.get_rank() == 0 and case.row_key not in alone:
            alone[case.row_key] = one_step(case, None)[:2]
        mesh = meshes[case.ranks]["context"]
        result, own, parallel = one_step(case, mesh)
        summed = {name: gradient.clone() for name, gradient in own.items()}
        for gradient in summed.values():
            dist.all_reduce(gradient, group=mesh.get_group())
        sent: list[Any] = [None] * case.ranks
        dist.all_gather_object(sent, parallel.sent, group=mesh.get_group())
        if dist.get_rank() == 0:
            truth, gradients = alone[case.row_key]
            yield str(case), compared(truth, gradients, result, own, summed) | {"sent": sent}


def one_step(case: Case, mesh: DeviceMesh | None) -> tuple[StepResult, dict[str, torch.Tensor], Any]:
    """(result, gradients of this rank's part, the ranks)."""
    model = case.model()
    parallel = None if mesh is None else Parallel(mesh)
    enable_packing(model, case.config(), parallel=parallel)
    routers = {"output_router_logits": True} if case.has_experts else {}
    result = PackedStep(model)(case.row(model), logits=True, **routers)
    result.loss.backward()
    return result, gradients_of(model), parallel


def compared(
    truth: StepResult,
    gradients: dict[str, torch.Tensor],
    found: StepResult,
    own: dict[str, torch.Tensor],
    summed: dict[str, torch.Tensor],
) -> Seen:
    """How far apart one rank alone and several are. Parameters that take no part alone must not take part together."""
    taking_part = [name for name, gradient in gradients.items() if gradient.any()]
    assert truth.row_logits is not None
    assert found.row_logits is not None
    seen = {
        "loss": relative(found.loss.detach(), truth.loss.detach()),
        "logits": float((found.row_logits - truth.row_logits).detach()[0, real(truth)].abs().max()),
        "sample losses": float((found.sample_losses - truth.sample_losses).abs().max()),
        "targets": [truth.num_targets, found.num_targets],
        "gradient": max(relative(summed[name], gradients[name]) for name in taking_part),
        "own gradient": max(relative(own[name], gradients[name]) for name in taking_part),
        "left out": sorted(name for name in gradients.keys() - {*taking_part} if summed[name].any()),
        "compared": len(taking_part),
    }
    if truth.routers is not None:
        assert found.expert_counts is not None
        assert truth.aux_loss is not None
        assert found.aux_loss is not None
        seen["aux loss"] = relative(found.aux_loss.detach(), truth.aux_loss.detach())
        seen["expert counts"] = bool((found.expert_counts == truth.expert_counts).all())
    return seen


def real(result: StepResult) -> torch.Tensor:
    return result.segments.real_index()


def waits(case: Case, mesh: DeviceMesh) -> list[str]:
    """Where a recomputed step of a row with host metadata would make the host wait for an accelerator."""
    model = enable_packing(case.model().train(), parallel=Parallel(mesh))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    routers = {"output_router_logits": True} if case.has_experts else {}
    row = case.row(model, metadata=True)
    with recorded_syncs(torch.device("cpu")) as recorded:
        PackedStep(model)(row, **routers).loss.backward()
    return [f"{Path(line.filename).stem}.{line.name}" for line in own_lines(recorded)]


# ---------------------------------------------------------------------- rows of several groups of ranks


def data_parallel(family: str, ranks: int, adding: str, mesh: DeviceMesh) -> Seen:
    """One recomputed step of all ranks: `ranks` share a row, groups have their own."""
    model = fresh(family, None)
    rows = rows_of(model, WORLD // ranks)
    total = sum(map(targets, rows))
    if dist.get_rank() == 0:
        for row in rows:
            PackedStep(model)(row, num_items_in_batch=total).loss.backward()
    truth = gradients_of(model)

    model = fresh(family, Parallel(mesh))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    wrapped, added = wrapped_in(model, adding, mesh)
    row = rows[mesh.get_local_rank("data")]
    items = sum_counts(targets(row), mesh["data"])
    loss = PackedStep(wrapped)(row, num_items_in_batch=items).loss
    (loss * added).backward()
    if adding == "sums":
        sum_gradients(wrapped, mesh)
    if adding == "fsdp2":
        sum_gradients(wrapped, mesh["context"])
    found = {name.removeprefix("module."): whole(p.grad) for name, p in wrapped.named_parameters()}
    if dist.get_rank():
        return {}
    return {
        "targets": [total, items],
        "gradient": max(relative(found[name], truth[name]) for name in truth),
        "compared": len(truth),
    }


def fresh(family: str, parallel: Parallel | None) -> Any:
    return enable_packing(tiny_model(family, seed=3), StepConfig(keep_empty=True), parallel=parallel)


def wrapped_in(model: Any, adding: str, mesh: DeviceMesh) -> tuple[Any, int]:
    """(the model to call, what its gradients are divided by)."""
    if adding == "sums":
        return model, 1
    if adding == "ddp":
        return DistributedDataParallel(model), WORLD
    family = family_of(model)
    over = mesh["data"] if adding == "fsdp2" else mesh["data", "context"]._flatten("all")
    tower = family.vision_tower(model)
    assert tower is not None
    for part in (*tower.get_submodule("blocks"), *family.language_model(model).get_submodule("layers")):  # pyright: ignore
        fully_shard(part, mesh=over)
    return fully_shard(model, mesh=over), over.size()


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    """Of every parameter; zeros where it takes no part."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
