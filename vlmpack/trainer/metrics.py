"""The exact loss of an evaluation set, from two numbers a sample."""

from __future__ import annotations

from typing import Any, final

import numpy as np
from torch import nn
from transformers import EvalPrediction

from vlmpack.errors import ConfigError
from vlmpack.model.enable import bind_loss_metrics, is_packing
from vlmpack.model.engine import packing_state
from vlmpack.model.loss_count import LossCount
from vlmpack.model.plain import find_model


@final
class LossMetrics:
    """Compute losses of an evaluation set from HF Trainer's predictions, see `loss_metrics`."""

    def __init__(self, loss_count: LossCount) -> None:
        self._loss_count = loss_count

    def is_bound_to(self, model: Any) -> bool:
        """Return whether `loss_metrics` was called with this model, or with a wrapper around it."""
        return is_packing(model) and packing_state(find_model(model)).loss_count is self._loss_count

    def __call__(self, prediction: EvalPrediction, compute_result: bool | None = None) -> dict[str, float]:
        """Return the losses by name.

        Args:
            prediction: what an enabled model's `PackedOutput` becomes in Trainer: `predictions` ends in
                (sample_losses [B], sample_targets [B]) of the whole set, or is a list of such pairs, one a batch. Where
                `Seq2SeqTrainer` generated, ids [B, S]: the losses are those that the model kept.
            compute_result: given by Trainer only with `batch_eval_metrics=True`, which is refused.

        Raises:
            ConfigError: the predictions are not those of a model with packing enabled, come a batch at a time, or are
                of fewer samples than were computed.
        """
        unread = self._loss_count.take()
        if compute_result is not None:
            raise ConfigError(
                "batch_eval_metrics=True hands over one batch at a time, but loss_metrics needs the whole set; set it "
                "to False: an enabled model keeps two numbers a sample, no logits"
            )
        computed = [(losses.cpu().numpy(), targets.cpu().numpy()) for losses, targets in unread]
        batches = prediction.predictions if isinstance(prediction.predictions, list) else [prediction.predictions]
        generated = bool(computed) and all(_is_generated(batch) for batch in batches)
        pairs = computed if generated else [_pair(batch) for batch in batches]
        num_computed = sum(len(losses) for losses, _ in computed)
        num_given = sum(len(batch) for batch in (batches if generated else [losses for losses, _ in pairs]))
        if num_computed not in (0, num_given):  # 0: PackedTrainer's evaluation, which is exact by itself
            raise ConfigError(
                f"HF Trainer computed {num_computed} losses and handed over {num_given} samples: of packed rows "
                "accelerate cuts the last batch to as many samples as there are rows left. Use PackedTrainer of "
                "vlmpack.trainer, or evaluate of vlmpack; after an evaluation that was interrupted, evaluate again"
            )
        losses, targets = (np.concatenate(parts).astype(np.float64) for parts in zip(*pairs, strict=True))
        metrics = losses_of_set(losses, targets)
        return {"loss": metrics["token_loss"], **metrics}


def loss_metrics(model: nn.Module) -> LossMetrics:
    """Make HF Trainer's evaluation on one rank exact: `Trainer(model, ..., compute_metrics=loss_metrics(model))`.

    Trainer's own `eval_loss` counts for each sample the mean over the targets of its whole batch, so it changes with
    `per_device_eval_batch_size` and with the order of the samples. An enabled model refuses such an evaluation unless
    these metrics are bound to it. They do not change with batches, and the first replaces `eval_loss`, also where
    `Seq2SeqTrainer` generates (`predict_with_generate=True`):

        loss           the same as token_loss; Trainer reports it as `eval_loss`, and chooses the best model by it
        token_loss     cross-entropy (nats) of all targets / number of targets
        sample_loss    mean over samples of each sample's mean; samples without targets are left out
        perplexity     exp(token_loss)
        num_targets    targets of the whole set
        num_samples    samples that have any

    Args:
        model: the model that is evaluated, or a wrapper around it (PEFT, `torch.compile`, DDP), with packing enabled.

    Raises:
        ConfigError: packing is not enabled on the model.
    """
    return LossMetrics(bind_loss_metrics(model))


def losses_of_set(losses: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Return the numbers of `loss_metrics` by name, without `loss`.

    Args:
        losses: float64 [B]: mean loss of each sample.
        targets: [B]: targets of each sample.
    """
    num_targets, learnt = float(targets.sum()), targets > 0
    token_loss = (losses * targets).sum() / max(num_targets, 1.0)
    with np.errstate(over="ignore"):
        perplexity = float(np.exp(token_loss))
    return {
        "token_loss": float(token_loss),
        "sample_loss": float(losses[learnt].mean()) if learnt.any() else 0.0,
        "perplexity": perplexity,
        "num_targets": num_targets,
        "num_samples": float(learnt.sum()),
    }


def _is_generated(batch: Any) -> bool:
    """Return whether the predictions of a batch are generated ids [B, S], where Seq2SeqTrainer hands over no losses."""
    return isinstance(batch, np.ndarray) and batch.ndim == 2 and np.issubdtype(batch.dtype, np.integer)


def _pair(batch: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the last two entries of a batch's predictions; logits come before them where they were requested."""
    if isinstance(batch, tuple) and len(batch) >= 2:
        losses, targets = (np.asarray(values) for values in batch[-2:])
        if losses.ndim == 1 and losses.shape == targets.shape and np.issubdtype(targets.dtype, np.integer):
            return losses, targets
    shapes = [list(np.shape(part)) for part in batch] if isinstance(batch, tuple) else list(np.shape(batch))
    raise ConfigError(
        f"loss_metrics needs one loss and one target count a sample, got predictions of shape {shapes}; train with "
        "Trainer(model=enable_packing(model), ...), and leave preprocess_logits_for_metrics out"
    )
