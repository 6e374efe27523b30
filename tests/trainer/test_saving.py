"""What is saved knows nothing of vlmpack, and what is resumed goes on where it stopped."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from training import KINDS, LAYOUTS, Samples, arguments, collator, distance, logged, receipts, train, weights
from transformers import AutoModelForImageTextToText, Trainer

from vlmpack.model import disable_packing, enable_packing, is_packing
from vlmpack.testing import alone, tiny_model

FAMILIES = ("qwen2_5_vl", "qwen3_vl_moe", "qwen3_5")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_is_plain_and_the_same(family, tmp_path):
    model = enable_packing(tiny_model(family))
    row = collator("packed")(receipts(model))
    train(model, receipts(model), tmp_path / "run")

    model.save_pretrained(tmp_path / "model")
    reloaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "model").train()

    assert "vlmpack" not in "".join(path.read_text() for path in (tmp_path / "model").glob("*.json"))
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["architectures"] == [type(tiny_model(family)).__name__]
    assert type(reloaded) is type(tiny_model(family))
    assert not is_packing(reloaded)
    assert all(torch.equal(a, b) for a, b in zip(reloaded.parameters(), model.parameters(), strict=True))
    assert torch.equal(enable_packing(reloaded)(**row).loss, model(**row).loss)


def test_a_checkpoint_of_trainer_is_plain_too(tmp_path):
    model = enable_packing(tiny_model())
    train(model, receipts(model), tmp_path, save_strategy="steps", save_steps=2)
    saved = tmp_path / "checkpoint-2"
    assert "vlmpack" not in "".join(path.read_text() for path in saved.glob("*.json"))
    reloaded = AutoModelForImageTextToText.from_pretrained(saved)
    assert all(torch.equal(a, b) for a, b in zip(reloaded.parameters(), model.parameters(), strict=True))


class Remembering:
    """A collator that writes down which samples each batch was made of."""

    def __init__(self, samples, layout):
        self.names = {id(sample["input_ids"]): name for name, sample in enumerate(samples)}
        self.batches = []
        self.collate = collator(layout)

    def __call__(self, features):
        self.batches.append([self.names[id(sample["input_ids"])] for sample in features])
        return self.collate(features)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resuming_in_mid_epoch_equals_never_having_stopped(layout, tmp_path):
    """Fourteen samples in pairs, two batches a step: the checkpoint after step 2 lies in the middle of the first
    epoch; shuffled, with Adam, a decaying rate and dropout, all of which have to be taken up again."""

    def run(folder, **settings):
        model = enable_packing(tiny_model())
        model.config.text_config.attention_dropout = 0.1
        for layer in model.model.language_model.layers:
            layer.self_attn.attention_dropout = 0.1
        samples = receipts(model, kinds=KINDS * 2)
        remember = Remembering(samples, layout)
        args = arguments(
            folder,
            optim="adamw_torch",
            learning_rate=0.01,
            lr_scheduler_type="linear",
            gradient_accumulation_steps=2,
            max_steps=6,
            **settings,
        )
        return model, Trainer(model, args, remember, Samples(samples)), remember

    model, whole, seen = run(tmp_path / "whole", save_strategy="steps", save_steps=2)
    whole.train()
    resumed_model, resumed, seen_again = run(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))

    epoch = [name for batch in seen.batches[:7] for name in batch]
    assert sorted(epoch) == list(range(14)) != epoch, "one epoch, shuffled"
    assert seen_again.batches == seen.batches[4:]
    assert len(logged(whole)) == 6
    assert logged(resumed) == logged(whole)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed_model.parameters(), strict=True))


def outputs(model, samples):
    """Logits and gradients of an unpacked pass over each sample."""
    model.zero_grad()
    logits = []
    for sample in samples:
        out = model(**alone(sample))
        out.loss.backward()
        logits.append(out.logits.detach())
    return logits, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_after_training_disabling_leaves_the_model_as_training_alone_would(family, tmp_path):
    """Class, attributes, configuration and outputs; the twin carries the same weights and was never enabled."""
    model, twin = enable_packing(tiny_model(family)), tiny_model(family)
    samples = receipts(model)
    twin.config.use_cache = False  # what Trainer does to every model
    train(model, samples, tmp_path)
    twin.load_state_dict(model.state_dict())

    assert disable_packing(model) is model

    assert type(model) is type(twin)
    assert vars(model).keys() - {"_is_accelerate_prepared"} == vars(twin).keys()
    assert model.config.to_dict() == twin.config.to_dict()
    assert model.config._attn_implementation == twin.config._attn_implementation
    (logits, grads), (expected, expected_grads) = outputs(model, samples), outputs(twin, samples)
    assert all(torch.equal(a, b) for a, b in zip(logits, expected, strict=True))
    assert grads.keys() == expected_grads.keys()
    assert all(torch.equal(grads[name], expected_grads[name]) for name in grads)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_learns_on_its_own(copied, tmp_path):
    model = enable_packing(tiny_model())
    samples = receipts(model)
    before = weights(model)
    twin = copied(model)
    assert type(twin) is type(model)
    losses = train(twin, samples, tmp_path / "twin").losses
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert losses == train(model, samples, tmp_path / "model").losses
    assert distance(weights(model), weights(twin)) == 0
    disable_packing(twin)
    assert is_packing(model)
