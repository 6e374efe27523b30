"""HF Trainer and TRL on packed rows: planned rows, exact evaluation losses, GRPO, and a check of settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vlmpack.errors import check_extra
from vlmpack.trainer.check import check_trainer
from vlmpack.trainer.evaluation import Evaluation, evaluate, generate_answer, loss_metrics
from vlmpack.trainer.packed_trainer import PackedTrainer

if TYPE_CHECKING:
    from vlmpack.trainer.trl import PackedGRPOTrainer

__all__ = [
    "Evaluation",
    "PackedGRPOTrainer",
    "PackedTrainer",
    "check_trainer",
    "evaluate",
    "generate_answer",
    "loss_metrics",
]


def __getattr__(name: str) -> Any:
    """Import `PackedGRPOTrainer` on first use: importing TRL takes seconds, and TRL is optional.

    Raises:
        ConfigError: TRL is not installed, or is another version than vlmpack needs.
    """
    if name != "PackedGRPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    check_extra("rl", "trl", needed_by=name)
    from vlmpack.trainer.trl import PackedGRPOTrainer

    return PackedGRPOTrainer
