"""Runs of PackedTrainer that tests and the processes they start have in common."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from training import KINDS, Samples, arguments, collator, lengths_of, logged, receipts, weighing

from vlmpack.loading import PackedStream, RowSettings
from vlmpack.model import enable_packing
from vlmpack.plan import Plan, plan_bins
from vlmpack.testing import tiny_model
from vlmpack.trainer import PackedTrainer


class Noting:
    """A collator that keeps the lengths of each row's samples, in the order in which it was asked."""

    def __init__(self, collate: Any = None) -> None:
        self.rows: list[list[int]] = []
        self._collate = collate or collator("packed")

    def __call__(self, features: list[Any]) -> dict[str, Any]:
        self.rows.append(lengths_of(features))
        return self._collate(features)


def fresh(**settings: Any) -> Any:
    """A model that is always the same, as small as can be."""
    return tiny_model(hidden=16, heads=2, layers=1, vision_depth=1, **settings)


def scene(dropout: float = 0.1) -> tuple[Any, list[Any]]:
    """(such a model with packing, which uses random numbers in training; samples of unlike length)."""
    torch.manual_seed(0)
    model = fresh()
    for layer in model.model.language_model.layers:
        layer.self_attn.attention_dropout = dropout
    return enable_packing(model), receipts(model, kinds=KINDS * 2)


def plan_of(samples: list[Any]) -> Plan:
    """An odd number of rows."""
    lengths = lengths_of(samples)
    plan = plan_bins(lengths, max(lengths))
    assert len(plan) % 2 == 1
    return plan


def planned(folder: Path, *, dropout: float = 0.1, loss: Any = "token", **settings: Any) -> PackedTrainer:
    """Two epochs over the rows of a plan; of another loss than "token" with weights and channels."""
    model, samples = scene(dropout)
    settings = {"max_steps": -1, "num_train_epochs": 2, **settings}
    return PackedTrainer(
        model,
        arguments(folder, **settings),
        Noting(None if loss == "token" else weighing("packed")),
        Samples(samples),
        Samples(samples),
        plan=plan_of(samples),
        eval_plan=plan_of(samples),
        loss=loss,
    )


def streamed(folder: Path, **settings: Any) -> PackedTrainer:
    """So many steps over a stream of rows that begins anew in between."""
    model, samples = scene()
    args = arguments(folder, **{"max_steps": 9, **settings})
    stream = PackedStream(
        samples,
        RowSettings(capacity=max(lengths_of(samples))),
        length=lambda sample: len(sample["input_ids"]),
        ranks=args.world_size,
        rank=args.process_index,
        repeat=True,
    )
    return PackedTrainer(model, args, Noting(), stream)


def fingerprint(run: PackedTrainer) -> dict[str, Any]:
    """What two runs share only if they are equal bit for bit."""
    digest = hashlib.sha256()
    for parameter in run.model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    steps = [entry for entry in run.state.log_history if "loss" in entry]
    channels = {name: [entry.get(name, 0.0) for entry in steps] for name in ("loss/long", "loss/short")}
    return {"steps": run.state.global_step, "losses": logged(run), "weights": digest.hexdigest(), **channels}
