"""What each of two gloo ranks runs, started by test_two_ranks.py: python -m torch.distributed.run ... FOLDER.

Rank 0 writes what it saw to FOLDER/result.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from training import Samples, logged, receipts, trainer

from vlmpack.families.tiny import tiny_model
from vlmpack.step import enable_packing
from vlmpack.trainer import loss_metrics


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    model = enable_packing(tiny_model())
    samples = receipts(model)
    result = {"losses": trained(model, samples, folder)}
    torch.save({name: p.detach() for name, p in model.named_parameters()}, folder / f"weights{rank()}.pt")

    run = trainer(enable_packing(tiny_model()), samples, folder, "packed")
    run.compute_metrics = loss_metrics
    losses, targets = run.predict(Samples(samples)).predictions
    result |= {"sample_losses": losses.tolist(), "sample_targets": targets.tolist(), "metrics": run.evaluate()}
    if rank() == 0:
        (folder / "result.json").write_text(json.dumps(result))
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
