# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""A user's script, for type checkers alone: `make lint` gives it to mypy --strict and to pyright.

Each public name is used as its documentation shows. A line with an ignored error is wrong on purpose: where the checker
does not see our types, it reports an ignore without an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from vlmpack import (
    PackedBatchSampler,
    PackedRow,
    PackedStep,
    PackedStream,
    PackedTrainer,
    PaddedBatch,
    Plan,
    Segments,
    SlotRule,
    StepConfig,
    StepResult,
    VLMCollator,
    VlmpackError,
    compile_layers,
    disable_packing,
    enable_packing,
    pack,
    plan_bins,
    probe,
    unpack,
)
from vlmpack.data import OpenDataset, load_processor, open_dataset
from vlmpack.lengths import measure_lengths
from vlmpack.plan import LengthTable
from vlmpack.rows import PackedDataset, StoreSettings, write_rows
from vlmpack.testing import tiny_model


class Net(torch.nn.Module):
    """Stands for a model."""


def collate(samples: Sequence[Mapping[str, Any]]) -> PackedRow:
    """Make one row, and look at it."""
    collator = VLMCollator(load_processor("a/model"), layout="packed", max_length=4096, slots=SlotRule(multiple=8))
    row = collator.collate(samples)
    assert isinstance(row, PackedRow)
    segments: Segments = row.segments
    lengths: tuple[int, ...] = segments.lengths
    boundaries: torch.Tensor = segments.cu_seqlens()
    wrong: str = segments.lengths  # type: ignore[assignment]
    print(lengths, boundaries, wrong, Segments.from_lengths([3, 5, 2]).total)
    return row


def convert(batch: PaddedBatch) -> PaddedBatch | torch.Tensor:
    """Pack a batch and take it apart again."""
    row: PackedRow = pack(batch)
    return unpack(row.input_ids, row.segments)


def train(row: PackedRow) -> float:
    """Train one step of a loop."""
    model = enable_packing(Net(), StepConfig(attention="auto"))
    compile_layers(model)
    step = PackedStep(model)
    result: StepResult = step(row, num_items_in_batch=10)
    result.loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    losses: torch.Tensor = result.sample_losses
    plain: Net = disable_packing(model)
    print(losses, plain, result.work.real_tokens + result.num_targets)
    return float(result.loss_sum)


def plan_rows(collator: VLMCollator) -> Plan:
    """Plan rows of a data set, and train on them."""
    dataset: OpenDataset = open_dataset("chats.jsonl")
    table: LengthTable = measure_lengths(dataset, collator, workers=2)
    plan = plan_bins(table, capacity=4096, strategy="exact_fill")
    sampler = PackedBatchSampler(plan, ranks=1, rank=0, seed=0)
    for row in DataLoader(dataset, batch_sampler=sampler, collate_fn=collator.collate):
        print(row)
    state: dict[str, Any] = sampler.state_dict()
    trainer = PackedTrainer(model=Net(), data_collator=collator, train_dataset=dataset, plan=plan)
    trainer.train()
    plan_bins([3, 5], capacity="large")  # type: ignore[arg-type]
    print(state, PackedStream)
    return plan


def store_rows(dataset: OpenDataset, collator: VLMCollator) -> PackedDataset:
    """Write rows ahead of training."""
    manifest = write_rows(dataset, Path("rows"), collator, StoreSettings(capacity=4096))
    rows: int = manifest.counts.rows
    print(rows)
    return PackedDataset("rows", load_processor("a/model"))


def check() -> bool:
    """Probe a model."""
    try:
        report = probe(tiny_model("qwen3_vl"))
    except VlmpackError:
        return False
    return report.verdict == "exact"
