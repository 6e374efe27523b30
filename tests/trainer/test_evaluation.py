"""Evaluation with HF Trainer: per-sample losses equal to the samples alone, and a loss that no batch size changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from training import LAYOUTS, Samples, arguments, collator, loss_sums, receipts, trainer

from vlmpack.errors import ConfigError
from vlmpack.model import enable_packing
from vlmpack.testing import tiny_model
from vlmpack.trainer import PackedTrainer
from vlmpack.trainer.evaluation import BatchLosses

FAMILIES = ("qwen2_5_vl", "qwen3_vl_moe", "qwen3_5")


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


# ---------------------------------------------------------------------- several ranks, in words


class Others:
    """accelerate on the first of two ranks. The other one has these losses; its last sample was filled up."""

    num_processes = 2

    def __init__(self, *batches: tuple[list[float], list[int]]) -> None:
        self._batches = iter(batches)

    def gather_for_metrics(self, losses: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        theirs = next(self._batches)
        return [torch.cat([ours, torch.tensor(other)]) for ours, other in zip(losses, theirs, strict=True)]


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield {}


def result_of(sums: list[float], targets: list[int]) -> Any:
    return SimpleNamespace(sample_loss_sums=torch.tensor(sums), sample_targets=torch.tensor(targets))


def test_losses_of_all_ranks_weigh_every_target_alike():
    losses = BatchLosses(Others(([5.0, 1.0], [1, 1]), ([8.0], [4])), 2, Samples([]))
    losses.add(result_of([3.0, 1.0], [3, 1]))
    losses.add(result_of([2.0, 4.0], [2, 2]))
    assert losses.token_loss() == (3 + 1 + 5 + 1 + 2 + 4 + 8) / (3 + 1 + 1 + 1 + 2 + 2 + 4)


@pytest.mark.parametrize(("result", "seen"), [(None, "is not packed"), (result_of([3.0], [3]), "has 1 samples, not 2")])
def test_batches_of_which_samples_may_count_twice_are_refused(result, seen):
    losses = BatchLosses(Others(), 2, Samples([]))
    with pytest.raises(ConfigError, match=f"a batch of the evaluation {seen}, so on 2 ranks .*eval_capacity="):
        losses.add(result)


def test_a_set_without_a_length_is_refused():
    with pytest.raises(ConfigError, match="give the evaluation set a length"):
        BatchLosses(Others(), 2, Endless())


def test_on_one_rank_a_loss_that_is_not_complete_is_none():
    losses = BatchLosses(SimpleNamespace(gather_for_metrics=None, num_processes=1), 2, Samples([]))
    losses.add(result_of([3.0], [3]))
    assert losses.token_loss() == 1.0
    losses.add(None)
    assert losses.token_loss() is None
