"""Text models under HF Trainer with the collators that transformers brings: a padded batch and its 2D mask suffice."""

from __future__ import annotations

import pytest
import torch
from cases import slow
from chats import processor_of
from training import Gradients, Samples, arguments, descend, distance, logged, losses_alone, receipts
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    Trainer,
)

from vlmpack.errors import ConfigError
from vlmpack.layout import SlotRule
from vlmpack.model import StepConfig, enable_packing
from vlmpack.testing import tiny_model
from vlmpack.trainer import check_trainer, loss_metrics

TEXT_MODELS = ("qwen3", "qwen3_next", "gpt_oss")
KINDS = ("text",) * 7


def tiny(family):
    return tiny_model(family, processor=processor_of(), hidden=48, vision_depth=1)


def written(model):
    """(samples as tensors, the same as a tokenizer's user has them: lists, the prompt masked)."""
    samples = [{name: sample[name] for name in ("input_ids", "labels")} for sample in receipts(model, kinds=KINDS)]
    for sample in samples:
        sample["labels"][0] = -100
    return samples, [{name: tensor.tolist() for name, tensor in sample.items()} for sample in samples]


@pytest.fixture
def tokenizer():
    tokenizer = processor_of().tokenizer
    before = tokenizer.padding_side
    yield tokenizer
    tokenizer.padding_side = before


def tolerance(family):
    return 5e-5 if family in ("qwen3_next", "qwen3_5") else 1e-5


@pytest.mark.parametrize("family", [*TEXT_MODELS, *slow("qwen3_5", "gemma3", "llava")])
def test_training_with_the_seq2seq_collator_equals_samples_alone(family, tokenizer, tmp_path):
    tokenizer.padding_side = ("left", "right")[len(family) % 2]
    model = enable_packing(tiny(family), StepConfig(slots=SlotRule(multiple=4)))
    samples, rows = written(model)
    expected = descend(tiny(family), samples, size=6, steps=1)
    batch = DataCollatorForSeq2Seq(tokenizer)([dict(row) for row in rows[:2]])
    assert set(batch) == {"input_ids", "attention_mask", "labels"}

    args = arguments(
        tmp_path,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        max_steps=1,
        train_sampling_strategy="sequential",
    )
    run, seen = Trainer(model, args, DataCollatorForSeq2Seq(tokenizer), Samples(rows)), Gradients()
    check_trainer(run)
    run.add_callback(seen)
    run.train()

    assert logged(run) == pytest.approx(expected.losses, rel=1e-6)
    assert distance(expected.gradients[0], seen.steps[0]) < tolerance(family)


def test_evaluation_with_the_language_modelling_collator_gives_every_sample_its_loss(tokenizer, tmp_path):
    model = enable_packing(tiny("qwen3"))
    samples, _ = written(model)
    for sample in samples:
        sample["labels"] = sample["input_ids"].clone()  # what this collator makes of them
    rows = [{"input_ids": sample["input_ids"].tolist()} for sample in samples]
    args = arguments(tmp_path, per_device_eval_batch_size=3)
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    run = Trainer(model, args, collate, eval_dataset=Samples(rows), compute_metrics=loss_metrics(model))
    losses, targets = run.predict(Samples(rows)).predictions
    sums, counts = losses_alone(tiny("qwen3"), samples)
    assert targets.tolist() == counts.tolist()
    torch.testing.assert_close(torch.from_numpy(losses), sums / counts, rtol=1e-5, atol=1e-6)
    assert run.evaluate()["eval_token_loss"] == pytest.approx(float(sums.sum() / counts.sum()), rel=1e-6)


@pytest.mark.parametrize("with_names", [False, True])
def test_the_flattening_collator_is_refused_with_the_remedy(with_names, tmp_path):
    model = enable_packing(tiny("qwen3"))
    _, rows = written(model)
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=with_names)
    with pytest.raises(ConfigError, match="samples of the row mixed; give a packed row its boundaries as cu_seqlens_q"):
        Trainer(model, arguments(tmp_path), collate, Samples(rows)).train()
