"""The exact loss of an evaluation set, from two numbers a sample."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import EvalPrediction

from vlmpack.errors import ConfigError


def loss_metrics(prediction: EvalPrediction, compute_result: bool | None = None) -> dict[str, float]:
    """Losses of an evaluation set, whatever its batches: give it to `Trainer(compute_metrics=loss_metrics)`.

    Trainer's own `eval_loss` counts for each sample the mean over the targets of its whole batch, so it changes with
    `per_device_eval_batch_size` and with the order of the samples. These numbers do not, and the first replaces it:

        loss           the same as token_loss; Trainer reports it as `eval_loss`, and chooses the best model by it
        token_loss     cross-entropy (nats) of all targets / number of targets
        sample_loss    mean over samples of each sample's mean; samples without targets are left out
        perplexity     exp(token_loss)
        num_targets    targets of the whole set
        num_samples    samples that have any

    Args:
        prediction: what an enabled model's `PackedOutput` becomes in Trainer: `predictions` ends in
            (sample_losses [B], sample_targets [B]) of the whole set, or is a list of such pairs, one a batch.
        compute_result: given by Trainer only with `batch_eval_metrics=True`, which is refused.

    Raises:
        ConfigError: the predictions are not those of a model with packing enabled, or come a batch at a time.
    """
    if compute_result is not None:
        raise ConfigError(
            "batch_eval_metrics=True hands over one batch at a time, but loss_metrics needs the whole set; set it to "
            "False: an enabled model keeps two numbers a sample, no logits"
        )
    metrics = losses_of_set(*_whole_set(prediction.predictions))
    return {"loss": metrics["token_loss"], **metrics}


def losses_of_set(losses: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """The numbers of `loss_metrics`, by name; `loss` is left out.

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


def _whole_set(predictions: Any) -> tuple[np.ndarray, np.ndarray]:
    """(losses, targets), both float64 [B]; Trainer keeps batches apart with `eval_do_concat_batches=False`."""
    batches = predictions if isinstance(predictions, list) else [predictions]
    pairs = [_pair(batch) for batch in batches]
    losses, targets = (np.concatenate([pair[i] for pair in pairs]) for i in (0, 1))
    return losses.astype(np.float64), targets.astype(np.float64)


def _pair(batch: Any) -> tuple[np.ndarray, np.ndarray]:
    """The last two entries: logits come before them where they were asked for."""
    if isinstance(batch, tuple) and len(batch) >= 2:
        losses, targets = (np.asarray(values) for values in batch[-2:])
        if losses.ndim == 1 and losses.shape == targets.shape and np.issubdtype(targets.dtype, np.integer):
            return losses, targets
    seen = [list(np.shape(part)) for part in batch] if isinstance(batch, tuple) else list(np.shape(batch))
    raise ConfigError(
        f"loss_metrics needs one loss and one target count a sample, got predictions of shape {seen}; train with "
        "Trainer(model=enable_packing(model), ...), and leave preprocess_logits_for_metrics out"
    )
