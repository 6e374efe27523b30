"""Receipts from lengths to weights: a plan, workers, the collator, HF Trainer; an empty row costs a step of nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from training import arguments

from vlmpack.collate import VLMCollator
from vlmpack.data import to_conversation
from vlmpack.loading import PackedBatchSampler
from vlmpack.model import enable_packing
from vlmpack.plan import plan_bins
from vlmpack.testing import SyntheticReceipts, tiny_model, tiny_processor
from vlmpack.trainer import PackedTrainer

PROCESSOR = tiny_processor("qwen3_vl", max_pixels=64 * 32 * 32)
COLLATOR = VLMCollator(PROCESSOR, layout="packed")
RECEIPTS = [{"id": at, **to_conversation(record)} for at, record in enumerate(SyntheticReceipts(num=13))]
LENGTHS = [COLLATOR.collate([receipt]).metadata.lengths[0] for receipt in RECEIPTS]
CAPACITY = 1000


class ReceiptTrainer(PackedTrainer):
    """Keeps the ids of the samples that it trains on, row by row."""

    rows: list[list[Any]]

    def training_step(self, model: Any, inputs: dict[str, Any], *more: Any, **settings: Any) -> torch.Tensor:
        self.rows.append(list(inputs["vlmpack"].sample_ids))
        return super().training_step(model, inputs, *more, **settings)


def trainer(folder: Path, **settings: Any) -> ReceiptTrainer:
    """Two epochs of an odd number of rows, two to a step, so that each epoch ends with an empty one."""
    torch.manual_seed(0)
    more = {"gradient_accumulation_steps": 2, "dataloader_num_workers": 2, "max_steps": -1, "num_train_epochs": 2}
    model = enable_packing(tiny_model(processor=PROCESSOR))
    plan = plan_bins(LENGTHS, CAPACITY)
    run = ReceiptTrainer(model, arguments(folder, **more, **settings), COLLATOR, RECEIPTS, plan=plan, remainder="empty")
    run.rows = []
    assert len(plan) % 2 == 1
    return run


@pytest.mark.slow
def test_a_run_with_empty_rows_and_workers_sees_every_receipt_and_continues_exactly(tmp_path):
    whole = trainer(tmp_path / "whole")
    whole.train()
    steps, half = whole.state.global_step, len(whole.rows) // 2
    for epoch in (whole.rows[:half], whole.rows[half:]):
        assert epoch.count([]) == 1
        assert sorted(sample for row in epoch for sample in row) == list(range(len(RECEIPTS)))
    assert all(p.isfinite().all() for p in whole.model.parameters())
    trainer(tmp_path / "stopped", save_strategy="steps", save_steps=steps - 1).train()
    resumed = trainer(tmp_path / "stopped")
    resumed.train(resume_from_checkpoint=str(tmp_path / "stopped" / f"checkpoint-{steps - 1}"))
    assert resumed.rows == whole.rows[-2:]
    for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_last_rows_of_all_ranks_are_rows_for_the_collator():
    """As many on every rank, empty ones included; those hold no sample and no target."""
    plan = plan_bins(LENGTHS, CAPACITY)
    dealt = [PackedBatchSampler(plan, ranks=2, rank=rank, remainder="empty") for rank in range(2)]
    assert len({len(mine) for mine in dealt}) == 1
    batches = [COLLATOR.collate([RECEIPTS[at] for at in row]) for mine in dealt for row in mine]
    empty = [batch for batch in batches if not batch.metadata.sample_ids]
    assert len(empty) == 1
    assert empty[0].metadata.num_targets == 0
    assert sorted(at for batch in batches for at in batch.metadata.sample_ids) == list(range(len(RECEIPTS)))
