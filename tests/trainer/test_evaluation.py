"""Evaluation with HF Trainer: per-sample losses equal to the samples alone, and a loss that no batch size changes."""

from __future__ import annotations

import pytest
import torch
from training import LAYOUTS, Samples, arguments, collator, loss_sums, receipts, trainer

from vlmpack.model import enable_packing
from vlmpack.testing import tiny_model
from vlmpack.trainer import PackedTrainer

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_predictions_are_the_losses_of_the_samples_alone(family, layout, tmp_path):
    model = tiny_model(family)
    samples = receipts(model)
    with torch.no_grad():
        sums, counts = loss_sums(model, samples)

    run = trainer(enable_packing(model), samples, tmp_path, layout, per_device_eval_batch_size=3)
    losses, targets = run.predict(Samples(samples)).predictions

    assert targets.tolist() == counts.tolist()
    torch.testing.assert_close(torch.from_numpy(losses), sums / counts, rtol=1e-6, atol=1e-6)


def test_a_cache_that_the_text_model_is_configured_with_does_not_leak(tmp_path):
    """Gradient checkpointing would hide such a leak while training, never in evaluation."""
    model = tiny_model()
    model.config.text_config.use_cache = True
    samples = receipts(model)
    with torch.no_grad():
        sums, counts = loss_sums(model, samples)
    run = trainer(enable_packing(model), samples, tmp_path, per_device_eval_batch_size=7)
    losses, _ = run.predict(Samples(samples)).predictions
    torch.testing.assert_close(torch.from_numpy(losses), sums / counts, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [1, 3, 7])
@pytest.mark.parametrize("concat", [True, False])
def test_metrics_are_exact_whatever_the_batches(layout, batch, concat, tmp_path):
    model = tiny_model()
    samples = receipts(model)
    with torch.no_grad():
        sums, counts = loss_sums(model, samples)

    settings = {"per_device_eval_batch_size": batch, "eval_do_concat_batches": concat}
    run = trainer(enable_packing(model), samples, tmp_path, layout, **settings)
    metrics = run.evaluate()

    assert metrics["eval_token_loss"] == pytest.approx(float(sums.sum() / counts.sum()), rel=1e-6)
    assert metrics["eval_loss"] == metrics["eval_token_loss"]
    assert metrics["eval_sample_loss"] == pytest.approx(float((sums / counts).mean()), rel=1e-6)
    assert metrics["eval_num_targets"] == int(counts.sum())
    assert metrics["eval_num_samples"] == len(samples)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [2, 3, 7])
def test_packed_trainers_batches_give_the_loss_of_the_set(batch, layout, tmp_path):
    """Also of the best model, and in `predict`; over several ranks, see test_two_ranks.py."""
    model = tiny_model()
    samples = receipts(model)
    with torch.no_grad():
        sums, counts = loss_sums(model, samples)
    exact = pytest.approx(float(sums.sum() / counts.sum()), rel=1e-6)
    args, data = arguments(tmp_path, per_device_eval_batch_size=batch), Samples(samples)
    run = PackedTrainer(enable_packing(model), args, collator(layout), data, data, eval_packing=False)
    assert run.evaluate()["eval_loss"] == exact
    assert run.predict(data).metrics["test_loss"] == exact


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_without_targets_does_not_count_as_a_loss_of_0(layout, tmp_path):
    """The unmodified model's loss of it is NaN, which Trainer leaves out."""
    model = tiny_model()
    samples = receipts(model)
    for sample in samples[:2]:
        sample["labels"][:] = -100
    with torch.no_grad():
        sums, counts = loss_sums(model, samples)
    exact = float(sums[2:].sum() / counts[2:].sum())
    run = trainer(enable_packing(model), samples, tmp_path, layout, per_device_eval_batch_size=2)
    assert run.evaluate()["eval_loss"] == pytest.approx(exact, rel=1e-6)


def test_logits_are_not_kept_unless_asked_for(tmp_path):
    model = tiny_model()
    run = trainer(enable_packing(model), receipts(model), tmp_path)
    predictions = run.predict(Samples(receipts(model))).predictions
    assert [part.shape for part in predictions] == [(7,), (7,)]
