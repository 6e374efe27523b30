"""What each of two gloo ranks runs, started by test_two_ranks.py.

Rank 0 writes what it saw to FOLDER/result.json; each rank what it did on planned rows to FOLDER/packed<N>.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from trainer.packed_runs import fingerprint, fresh, plan_of, planned, scene, streamed
from training import LAYOUTS, Samples, arguments, collator, lengths_of, logged, receipts, trainer

from vlmpack.context_parallel.mesh import gathered
from vlmpack.errors import ConfigError
from vlmpack.model import PackedStep, StepConfig, enable_packing
from vlmpack.plan import plan_bins
from vlmpack.testing import tiny_model
from vlmpack.trainer import PackedTrainer, evaluate, loss_metrics
from vlmpack.trainer.checkpoints import checkpoint_to_resume


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    model = enable_packing(tiny_model())
    samples = receipts(model)
    result = {"losses": trained(model, samples, folder)}
    torch.save({name: p.detach() for name, p in model.named_parameters()}, folder / f"weights{rank()}.pt")

    run = in_batches(samples, folder)
    run.compute_metrics = loss_metrics(run.model)
    losses, targets = run.predict(Samples(samples)).predictions
    result |= {"sample_losses": losses.tolist(), "sample_targets": targets.tolist(), "metrics": run.evaluate()}
    result |= {"eval_losses": eval_losses(samples, folder), "refused": refused(samples, folder)}
    result |= {"resumed_from": resumed_from(folder / "places")}
    if rank() == 0:
        (folder / "result.json").write_text(json.dumps(result))
    packed = {"planned": on_a_plan(folder), "streamed": on_a_stream(folder), "evaluated": evaluated(samples)}
    (folder / f"packed{rank()}.json").write_text(json.dumps(packed))
    torch.distributed.barrier()  # nobody leaves while another still talks
    torch.distributed.destroy_process_group()


def rank() -> int:
    return torch.distributed.get_rank()


def trained(model, samples, folder):
    """Two ranks, two batches a step on each, one sample a batch: four samples a step."""
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 1}
    run = trainer(model, samples, folder, "packed", **settings)
    run.train()
    return logged(run)


def in_batches(samples, folder, layout="packed", size=2):
    """A PackedTrainer that evaluates in batches as accelerate deals them."""
    args = arguments(folder, per_device_eval_batch_size=size)
    model, data = enable_packing(fresh()), Samples(samples)
    return PackedTrainer(model, args, collator(layout), data, data, eval_packing=False)


def eval_losses(samples, folder):
    """`eval_loss` of the first samples: [how many, a batch's size, the layout, the loss]."""
    cases = [(count, size, layout) for layout in LAYOUTS for count, size in ((1, 2), (5, 3), (7, 2))]
    return [[*case, evaluated_loss(samples[: case[0]], folder, *case[1:])] for case in cases]


def evaluated_loss(samples, folder, size, layout):
    return in_batches(samples, folder, layout, size).evaluate()["eval_loss"]


def refused(samples, folder):
    """What HF Trainer's own evaluation ends with, and how many batches went through the model before."""
    model = enable_packing(fresh())
    calls = []
    model.register_forward_pre_hook(lambda *call: calls.append(call))
    try:
        trainer(model, samples, folder).evaluate()
    except ConfigError as error:
        return [str(error), len(calls)]
    return None


def resumed_from(folder):
    """The newest checkpoint, where rank 1 was stopped before it had written its last file."""
    for step in (3, 6):
        here = folder / f"checkpoint-{step}"
        here.mkdir(parents=True, exist_ok=True)
        if rank() == 0:
            for name in ("trainer_state.json", "optimizer.pt", "scheduler.pt"):
                (here / name).write_text("{}")
        if (step, rank()) != (6, 1):
            (here / f"place{rank()}").touch()
    torch.distributed.barrier()
    return [Path(path).name for path in gathered(checkpoint_to_resume(True, folder, f"place{rank()}"))]


def on_a_plan(folder):
    """An odd number of rows for two epochs, in pieces, weighed by samples, and the evaluation of as many."""
    run = planned(folder, dropout=0.0, loss="square")
    enable_packing(run.model, StepConfig(capacity=max(lengths_of(scene()[1])) // 2))
    metrics = run.evaluate()
    before = len(run.data_collator.rows)
    run.train()
    weights = {name: p.detach() for name, p in run.model.named_parameters()}
    torch.save(weights, folder / f"planned{rank()}.pt")
    return {**fingerprint(run), "rows": run.data_collator.rows[before:], "metrics": metrics}


def on_a_stream(folder):
    """Into the second pass."""
    run = streamed(folder)
    run.train()
    return {**fingerprint(run), "rows": run.data_collator.rows}


def evaluated(samples):
    """The losses of the samples by `evaluate`, of a model under each wrapper; then it is trained a step."""
    lengths = lengths_of(samples)
    few, one = plan_of(samples), plan_bins(lengths, sum(lengths))
    seen = {}
    for wrapper in ("ddp", "fsdp2"):
        model = enable_packing(tiny_model())
        if wrapper == "ddp":
            model = DistributedDataParallel(model, find_unused_parameters=True)
        else:
            for layer in (*model.model.language_model.layers, model):
                fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
        for name, plan in (("few rows", few), ("one row", one)):
            result = evaluate(model, Samples(samples), collator("packed"), plan=plan)
            seen[f"{wrapper}, {name}"] = {
                "losses": result.sample_losses.tolist(),
                "sample_ids": result.sample_ids.tolist(),
                "rows": [result.rows, len(plan)],
                "real_tokens": result.work.real_tokens,
            }
        PackedStep(model)(collator("packed")(samples)).loss.backward()
    return seen


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)  # threads of gloo and of DDP sometimes abort a process that takes itself apart
