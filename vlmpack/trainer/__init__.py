"""HF Trainer on packed rows: planned rows, an exact loss of the evaluation set, and a check of its settings."""

from __future__ import annotations

from vlmpack.trainer.check import check_trainer
from vlmpack.trainer.evaluation import Evaluation, evaluate
from vlmpack.trainer.metrics import loss_metrics
from vlmpack.trainer.packed_trainer import PackedTrainer

__all__ = ["Evaluation", "PackedTrainer", "check_trainer", "evaluate", "loss_metrics"]
