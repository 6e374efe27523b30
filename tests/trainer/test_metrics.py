"""loss_metrics on predictions written by hand."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import EvalPrediction

from vlmpack.errors import ConfigError
from vlmpack.model import enable_packing
from vlmpack.testing import tiny_model
from vlmpack.trainer import loss_metrics

LABELS = np.zeros((3, 5), np.int64)


def bound():
    return loss_metrics(enable_packing(tiny_model("qwen3", hidden=16, heads=2, layers=1)))


def metrics(predictions):
    return bound()(EvalPrediction(predictions=predictions, label_ids=LABELS))


CASES = {
    "tokens and samples are weighted as named": (
        (np.float32([1.0, 3.0, 5.0]), np.int64([1, 2, 7])),
        {"loss": 4.2, "token_loss": 4.2, "sample_loss": 3.0, "perplexity": np.exp(4.2), "num_targets": 10.0,
         "num_samples": 3.0},
    ),
    "a sample without targets": (
        (np.float32([2.0, 0.0]), np.int64([3, 0])), {"token_loss": 2.0, "sample_loss": 2.0, "num_samples": 1.0}
    ),
    "no target at all": ((np.float32([0.0]), np.int64([0])), {"token_loss": 0.0, "sample_loss": 0.0}),
    "a loss beyond measure": ((np.float32([1e4]), np.int64([1])), {"perplexity": np.inf}),
    "batches kept apart": (
        [(np.float32([1.0, 3.0]), np.int64([1, 1])), (np.float32([5.0]), np.int64([2]))], {"token_loss": 3.5}
    ),
    "logits before": ((np.zeros((2, 5, 13)), np.float32([1.0, 3.0]), np.int64([1, 1])), {"token_loss": 2.0}),
}  # fmt: skip


@pytest.mark.parametrize(("predictions", "expected"), CASES.values(), ids=CASES)
def test_metrics(predictions, expected):
    found = metrics(predictions)
    assert {name: found[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("predictions", "shapes"),
    [
        (np.zeros((2, 5, 13)), "[2, 5, 13]"),
        ((np.zeros((2, 5, 13)), np.zeros((2, 5))), "[[2, 5, 13], [2, 5]]"),
        ((np.zeros(3), np.zeros(3)), "[[3], [3]]"),
    ],
)
def test_predictions_of_another_model_are_refused(predictions, shapes):
    with pytest.raises(ConfigError) as error:
        metrics(predictions)
    assert shapes in str(error.value)
    assert "Trainer(model=enable_packing(model)" in str(error.value)


def test_one_batch_at_a_time_is_refused():
    whole = EvalPrediction(predictions=(np.float32([1.0]), np.int64([1])), label_ids=LABELS)
    with pytest.raises(ConfigError, match="batch_eval_metrics=True hands over one batch at a time"):
        bound()(whole, compute_result=False)
