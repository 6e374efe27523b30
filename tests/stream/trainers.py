"""HF Trainer over the rows of a plan: what the tests share, and what each of two gloo ranks runs.

Started by test_trainer.py as `python -m torch.distributed.run ... trainers.py FOLDER`; each rank writes what it did to
FOLDER/rank<N>.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer

sys.path.insert(0, str(Path(__file__).parents[1]))
from training import KINDS, Samples, arguments, collator, receipts

from vlmpack.families.tiny import tiny_model
from vlmpack.plan import Plan, plan_bins
from vlmpack.step import enable_packing
from vlmpack.stream import PackedBatchSampler, Remainder


class PackedTrainer(Trainer):
    """The README's: Trainer with a batch sampler of rows. It keeps what it was given to train on."""

    plan: Plan
    rows: list[list[int]]
    """Lengths of the samples of each row, in the order of training."""
    remainder: Remainder = "split"

    def get_train_dataloader(self) -> DataLoader:
        sampler = PackedBatchSampler(
            self.plan,
            ranks=self.args.world_size,
            accumulation=self.args.gradient_accumulation_steps,
            remainder=self.remainder,
        )
        workers = self.args.dataloader_num_workers
        loader = DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.note, num_workers=workers)
        return self.accelerator.prepare(loader)

    def note(self, features: list[Any]) -> dict[str, Any]:
        self.rows.append([lengths_of([feature])[0] for feature in features])
        return self.data_collator(features)


def lengths_of(samples: list[Any]) -> list[int]:
    """Tokens of each sample."""
    return [int(sample["input_ids"].numel()) for sample in samples]


def packed_trainer(folder: Path, **settings: Any) -> PackedTrainer:
    """Samples of unlike length in an odd number of rows."""
    torch.manual_seed(0)
    model = enable_packing(tiny_model())
    samples = receipts(model, kinds=KINDS * 2)
    lengths = lengths_of(samples)
    settings = {"accelerator_config": {"even_batches": False}, "max_steps": -1, "num_train_epochs": 2, **settings}
    trainer = PackedTrainer(model, arguments(folder, **settings), collator("packed"), Samples(samples))
    trainer.plan, trainer.rows = plan_bins(lengths, max(lengths)), []
    assert len(trainer.plan) % 2 == 1
    return trainer


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    trainer = packed_trainer(folder)
    trainer.train()
    rank = torch.distributed.get_rank()
    weights = float(sum(p.detach().double().sum() for p in trainer.model.parameters()))
    seen = {"steps": trainer.state.global_step, "rows": trainer.rows, "weights": weights}
    (folder / f"rank{rank}.json").write_text(json.dumps(seen))
    torch.distributed.barrier()  # nobody leaves while another still talks
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
