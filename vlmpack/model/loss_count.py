"""Loss counting for HF Trainer: targets of accumulated batches, and the losses of its own evaluation.

Trainer asks an enabled model for `accepts_loss_kwargs` before each batch: with gradients enabled in training, without
them in its own evaluation. That evaluation takes the mean loss of each batch and averages these means over samples
(over rows, if the batches are packed rows). On several ranks it also multiplies each rank's share of the loss by the
number of ranks, and drops some losses with the last batch. We therefore refuse such an evaluation, unless
`loss_metrics(model)` replaces its loss. This has to hold for plain Trainers, in programs that never import
`vlmpack.trainer`, so it belongs to the model and not there.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import distributed as dist
from torch import nn

from vlmpack.errors import ConfigError
from vlmpack.model.result import PackedOutput


@final
class LossCount:
    """Keeps the per-sample losses of HF Trainer's own evaluation until `loss_metrics` reads them."""

    def __init__(self) -> None:
        self.unread: list[tuple[torch.Tensor, torch.Tensor]] = []
        """(sample_losses [B], sample_targets [B]) of each batch that `loss_metrics` has not read."""
        self.is_evaluating = False
        """True if the next forward pass is a batch of Trainer's evaluation."""

    def add(self, output: Any) -> None:
        """Keep the losses of an evaluation batch."""
        if self.is_evaluating and not torch.is_grad_enabled() and isinstance(output, PackedOutput):
            losses, targets = output.sample_losses, output.sample_targets
            self.unread += [] if losses is None or targets is None else [(losses, targets)]
        self.is_evaluating = False

    def take(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the unread losses and clear them."""
        unread, self.unread = self.unread, []
        return unread


@final
class CountsTargets:
    """`accepts_loss_kwargs` of an enabled model: true, so that HF Trainer counts targets over accumulated batches."""

    def __init__(self, core: nn.Module) -> None:
        self._core = core

    def __bool__(self) -> bool:
        """Return True.

        Raises:
            ConfigError: HF Trainer's own evaluation begins, on several ranks or without `loss_metrics(model)`; or an
                evaluation has ended and `loss_metrics` never received its losses.
        """
        if not torch.is_grad_enabled():
            begin_batch(self._core)
            return True
        state = getattr(self._core, "_vlmpack_state", None)
        if state is not None and state.loss_count is not None and (unread := state.loss_count.take()):
            raise ConfigError(
                f"HF Trainer evaluated {sum(len(losses) for losses, _ in unread)} samples and did not call "
                "loss_metrics(model) with their losses, so eval_loss was a mean of batches' means: give this Trainer "
                "compute_metrics=loss_metrics(model), without prediction_loss_only, or use PackedTrainer of "
                "vlmpack.trainer. After an evaluation that was interrupted, train again"
            )
        return True


def begin_batch(core: nn.Module) -> None:
    """Check that the loss of HF Trainer's own evaluation will be exact, and record the losses of its next batch."""
    state = getattr(core, "_vlmpack_state", None)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"HF Trainer's own evaluation over {dist.get_world_size()} ranks weighs the losses of packed batches "
            "wrongly, so eval_loss would be no mean of them, and load_best_model_at_end would choose by it: use "
            "PackedTrainer of vlmpack.trainer, which takes the same arguments (eval_packing=False: the same "
            "batches; eval_capacity=: in planned rows); or evaluate of vlmpack. Seq2SeqTrainer that generates: on one "
            "rank, or with labels under another name"
        )
    if state is None:
        return
    if state.loss_count is None:
        raise ConfigError(
            "HF Trainer's own evaluation averages the mean losses of batches over samples, so eval_loss would change "
            "with the batch size, and load_best_model_at_end would choose by it: use PackedTrainer of "
            "vlmpack.trainer, which takes the same arguments (eval_packing=False: the same batches); or, on one rank, "
            "compute_metrics=loss_metrics(model), which makes eval_loss the mean over all targets (with metrics of "
            "your own, as where Seq2SeqTrainer generates: both dictionaries in one)"
        )
    state.loss_count.is_evaluating = True
