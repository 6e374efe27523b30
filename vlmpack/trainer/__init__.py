"""What HF Trainer has not of its own: an exact loss of the evaluation set, and a look at its settings."""

from __future__ import annotations

from vlmpack.trainer.check import check_trainer
from vlmpack.trainer.metrics import loss_metrics

__all__ = ["check_trainer", "loss_metrics"]
