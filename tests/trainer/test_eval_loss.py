"""Evaluation in HF Trainer's batches: exact by `loss_metrics(model)` or PackedTrainer, or refused before the first."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chats import chat, processor_of
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset
from training import LAYOUTS, Samples, arguments, collator, losses_alone, receipts, trainer
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

from vlmpack.collate import VLMCollator
from vlmpack.errors import ConfigError
from vlmpack.model import StepConfig, disable_packing, enable_packing
from vlmpack.testing import padded, tiny_model
from vlmpack.trainer import PackedTrainer, check_trainer, evaluate, loss_metrics
from vlmpack.trainer.evaluation import BatchLosses

REFUSAL = r"averages the mean losses of batches over samples.*PackedTrainer.*compute_metrics=loss_metrics\(model\)"


def small():
    return tiny_model("qwen3", hidden=16, heads=2, layers=1)


def unlike_samples(model, seed=7):
    """Texts that have few targets and many in turn, so that the mean of batches' means is far from the token mean."""
    samples = receipts(model, seed=seed, kinds=("text",) * 7)
    for sample in samples[2::2]:
        sample["labels"][3:] = -100
    return samples


def plain(model, samples, folder, layout="packed", metrics=None, **settings):
    """A Trainer that nothing was prepared for."""
    args, data = arguments(folder, **settings), Samples(samples)
    return Trainer(model, args, collator(layout), data, data, compute_metrics=metrics)


def exact_loss(model, samples):
    sums, counts = losses_alone(model, samples)
    return float(sums.sum() / counts.sum())


@pytest.mark.parametrize("way", ["padded", "packed", "generating"])
@pytest.mark.parametrize("batch", [1, 2, 7])
def test_a_plain_evaluation_is_refused_before_its_first_batch(way, batch, tmp_path):
    model, calls = enable_packing(small()), []
    model.register_forward_pre_hook(lambda *call: calls.append(call))
    samples, settings = without_first_labels(unlike_samples(model)), {"per_device_eval_batch_size": batch}
    if way == "generating":
        run = generating(model, samples, tmp_path, lambda prediction: {"n": len(prediction[0])}, **settings)
    else:
        run = plain(model, samples, tmp_path, way, **settings)
    for compute in (run.evaluate, lambda: run.predict(run.eval_dataset)):
        with pytest.raises(ConfigError, match=REFUSAL):
            compute()
    assert calls == []


def test_on_several_ranks_it_is_refused_with_its_metrics_too(monkeypatch):
    model = enable_packing(small())
    loss_metrics(model)
    begins = {  # what Trainer reads, and what Seq2SeqTrainer calls, before the first batch
        "plain": lambda: bool(model.accepts_loss_kwargs),
        "generating": lambda: model.generate(**to_left_padded(unlike_samples(model)), synced_gpus=False),
    }
    for name, value in (("is_initialized", True), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    for begin in begins.values():
        with (
            torch.no_grad(),
            pytest.raises(ConfigError, match="over 2 ranks weighs the losses of packed batches wrong"),
        ):
            begin()


@pytest.mark.parametrize("concat", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [1, 2, 3, 7])
def test_with_its_metrics_it_is_the_mean_over_targets(layout, batch, concat, tmp_path):
    model = small()
    samples = unlike_samples(model)
    sums, counts = losses_alone(model, samples)
    exact = pytest.approx(float(sums.sum() / counts.sum()), rel=1e-6)
    metrics = loss_metrics(enable_packing(model))
    settings = {"per_device_eval_batch_size": batch, "eval_do_concat_batches": concat}
    run = plain(model, samples, tmp_path, layout, metrics, **settings)
    found = run.evaluate()
    assert found["eval_loss"] == found["eval_token_loss"] == exact
    assert found["eval_sample_loss"] == pytest.approx(float((sums / counts).mean()), rel=1e-6)
    assert (found["eval_num_targets"], found["eval_num_samples"]) == (int(counts.sum()), len(samples))
    assert run.predict(run.eval_dataset).metrics["test_loss"] == exact
    run.compute_metrics = lambda prediction: {**metrics(prediction), "ones": 1}
    assert run.evaluate()["eval_loss"] == exact


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
@pytest.mark.parametrize("wrapper", ["peft", "compile", "ddp"])
def test_metrics_of_a_wrapped_model_are_bound_to_the_model_inside(wrapper, tmp_path):
    model = enable_packing(small())
    if wrapper == "peft":
        from peft import LoraConfig, get_peft_model

        outer = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    elif wrapper == "compile":
        outer = torch.compile(model, backend="eager")
    else:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            outer = DistributedDataParallel(model)
        finally:
            torch.distributed.destroy_process_group()
    metrics = loss_metrics(outer)
    assert metrics.is_bound_to(model)
    assert metrics.is_bound_to(outer)
    evaluated = outer if wrapper == "peft" else model
    run = plain(evaluated, samples := unlike_samples(model), tmp_path, metrics=metrics)
    assert run.evaluate()["eval_loss"] == pytest.approx(exact_loss(disable_packing(model), samples), rel=1e-6)


def test_another_model_is_refused_and_so_is_one_that_is_not_enabled(tmp_path):
    model, other = enable_packing(small()), enable_packing(small())
    metrics = loss_metrics(model)
    for another in (other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not metrics.is_bound_to(another)
        with pytest.raises(ConfigError, match=REFUSAL):
            plain(another, unlike_samples(model), tmp_path, metrics=metrics).evaluate()
    with pytest.raises(ConfigError, match=r"packing is not enabled on this Qwen3ForCausalLM"):
        loss_metrics(small())


def test_disabling_forgets_the_metrics_and_other_settings_do_not(tmp_path):
    model = enable_packing(small())
    samples = unlike_samples(model)
    run = plain(model, samples, tmp_path, metrics=loss_metrics(model))
    enable_packing(model, StepConfig(attention="eager_mask"))
    run.evaluate()
    enable_packing(disable_packing(model))
    with pytest.raises(ConfigError, match=REFUSAL):
        run.evaluate()


@pytest.mark.parametrize("without", ["prediction_loss_only", "compute_metrics"])
def test_metrics_that_are_bound_but_not_called_end_the_run(without, tmp_path):
    model = enable_packing(small())
    samples = unlike_samples(model)
    metrics = loss_metrics(model)
    settings = {"eval_strategy": "steps", "eval_steps": 1, "prediction_loss_only": without == "prediction_loss_only"}
    run = plain(model, samples, tmp_path, metrics=None if without == "compute_metrics" else metrics, **settings)
    with pytest.raises(ConfigError, match=r"evaluated 7 samples and did not call loss_metrics\(model\)"):
        run.train()
    assert run.state.global_step == 1
    run.args.prediction_loss_only, run.compute_metrics = False, metrics
    run.train()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [2, 3, 7])
def test_packed_trainers_batches_give_the_loss_of_the_set(batch, layout, tmp_path):
    """Also of the best model, and in `predict`; over several ranks, see test_two_ranks.py."""
    model = tiny_model()
    samples = receipts(model)
    exact = pytest.approx(exact_loss(model, samples), rel=1e-6)
    args, data = arguments(tmp_path, per_device_eval_batch_size=batch), Samples(samples)
    run = PackedTrainer(enable_packing(model), args, collator(layout), data, data)
    assert run.evaluate()["eval_loss"] == exact
    assert run.predict(data).metrics["test_loss"] == exact
    run.compute_metrics = loss_metrics(run.model)
    assert run.evaluate()["eval_loss"] == exact
    assert run.evaluation is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_without_targets_does_not_count_as_a_loss_of_0(layout, tmp_path):
    """The unmodified model's loss of it is NaN, which Trainer leaves out."""
    model = tiny_model()
    samples = receipts(model)
    for sample in samples[:2]:
        sample["labels"][:] = -100
    sums, counts = losses_alone(model, samples)
    exact = float(sums[2:].sum() / counts[2:].sum())
    run = trainer(enable_packing(model), samples, tmp_path, layout, per_device_eval_batch_size=2)
    assert run.evaluate()["eval_loss"] == pytest.approx(exact, rel=1e-6)


def generating(model, samples, folder, metrics, **settings):
    """A Seq2SeqTrainer that generates while it evaluates, from whole batches: padded on the left, with labels."""
    model.config.pad_token_id = model.generation_config.pad_token_id = 0
    model.generation_config.max_length = 30
    args = Seq2SeqTrainingArguments(str(folder), use_cpu=True, report_to=[], predict_with_generate=True, **settings)
    data = Samples(samples)
    return Seq2SeqTrainer(model, args, to_left_padded, data, data, compute_metrics=metrics)


def to_left_padded(features):
    return padded(features, "left").to_hf()


def without_first_labels(samples):
    """transformers' own loss of a step of generation takes none."""
    for sample in samples:
        sample["labels"][0] = -100
    return samples


@pytest.mark.parametrize("concat", [True, False])
@pytest.mark.parametrize("batch", [1, 2, 3, 7])
def test_with_its_metrics_an_evaluation_that_generates_is_the_mean_over_targets(batch, concat, tmp_path):
    model = small()
    samples = without_first_labels(unlike_samples(model))
    exact = pytest.approx(exact_loss(model, samples), rel=1e-6)
    metrics = loss_metrics(enable_packing(model))
    settings = {"per_device_eval_batch_size": batch, "eval_do_concat_batches": concat}
    run = generating(model, samples, tmp_path, lambda p: {**metrics(p), "ids": p.predictions}, **settings)
    result = run.evaluate()
    assert result["eval_loss"] == exact
    assert result["eval_num_samples"] == 7
    generated = result["eval_ids"] if concat else [ids for ids_of_batch in result["eval_ids"] for ids in ids_of_batch]
    assert len(generated) == 7
    assert run.predict(run.eval_dataset).metrics["test_loss"] == exact


def test_an_evaluation_that_generates_without_labels_has_no_loss_and_passes(tmp_path):
    model = enable_packing(small())
    run = generating(model, receipts(model, kinds=("text",) * 3), tmp_path, None)
    run.data_collator = lambda features: {k: v for k, v in to_left_padded(features).items() if k != "labels"}
    output = run.predict(run.eval_dataset)
    assert len(output.predictions) == 3
    assert "test_loss" not in output.metrics


def test_samples_that_the_collator_skips_do_not_count(tmp_path):
    """A whole batch of them, too."""
    model = tiny_model("qwen3_vl", processor=processor_of(), hidden=16, heads=2, layers=1, vision_depth=1)
    fine, bad = [chat(answer=f"The total is {n}") for n in (7, 12_000, 3)], {"messages": []}
    exact = evaluate(model, fine, VLMCollator(processor_of()), capacity=500).token_loss
    collate = VLMCollator(processor_of(), layout="packed", on_bad="skip")
    metrics = loss_metrics(enable_packing(model))
    for rows in ([*fine, bad], [bad, *fine], [bad, bad, *fine], [fine[0], bad, *fine[1:]], [*fine[:2], bad, fine[2]]):
        args = arguments(tmp_path, remove_unused_columns=False)
        run = Trainer(model, args, collate, eval_dataset=Samples(rows), compute_metrics=metrics)
        check_trainer(run)
        result = run.evaluate()
        assert result["eval_loss"] == pytest.approx(exact, rel=1e-6)
        assert result["eval_num_samples"] == 3


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


@pytest.mark.parametrize(("result", "seen"), [(None, "is not packed"), (result_of([3.0], [3]), "has 1 samples, not 2")])
def test_batches_of_which_samples_may_count_twice_are_refused(result, seen):
    losses = BatchLosses(Others(), 2, Samples([]))
    with pytest.raises(ConfigError, match=f"a batch of the evaluation {seen}, so on 2 ranks .*eval_capacity="):
        losses.add(result)


def test_a_set_without_a_length_is_refused():
    with pytest.raises(ConfigError, match="give the evaluation set a length"):
        BatchLosses(Others(), 2, Endless())
