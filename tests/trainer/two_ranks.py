"""What each of two gloo ranks runs, started by test_two_ranks.py: python -m torch.distributed.run ... FOLDER.

Rank 0 writes what it saw to FOLDER/result.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from training import Samples, Stream, arguments, collator, logged, receipts, trainer
from transformers import Trainer

from vlmpack.errors import LayoutError
from vlmpack.families.tiny import tiny_model
from vlmpack.step import enable_packing
from vlmpack.trainer import loss_metrics


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    model = enable_packing(tiny_model())
    samples = receipts(model)
    result = {"losses": trained(model, samples, folder), "weights": float(sum(p.sum() for p in model.parameters()))}
    torch.save({name: p.detach() for name, p in model.named_parameters()}, folder / f"weights{rank()}.pt")

    run = trainer(enable_packing(tiny_model()), samples, folder, "packed")
    run.compute_metrics = loss_metrics
    losses, targets = run.predict(Samples(samples)).predictions
    result |= {"sample_losses": losses.tolist(), "sample_targets": targets.tolist(), "metrics": run.evaluate()}
    result["dispatched"] = dispatched(samples, folder)
    if rank() == 0:
        (folder / "result.json").write_text(json.dumps(result))


def rank() -> int:
    return torch.distributed.get_rank()


def trained(model, samples, folder):
    """Two ranks, two batches a step on each, one sample a batch: four samples a step."""
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 1}
    run = trainer(model, samples, folder, "packed", **settings)
    run.train()
    return logged(run)


def dispatched(samples, folder) -> str:
    """The error of a stream under accelerate's default, which cuts batches up for the ranks."""
    model = enable_packing(tiny_model())
    same = [samples[0]] * 8  # rows of one width: otherwise accelerate itself stops at concatenating them
    run = Trainer(model, arguments(folder), collator("packed"), Stream(same))
    try:
        run.train()
    except (LayoutError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
