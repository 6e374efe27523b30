"""Packed equals alone: logits, loss and every parameter's gradient, vision tower included.

Compared three ways: a padded batch packed inside the forward pass, a packed row given as such, and every sample on
its own through the untouched model.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from samples import alone, mixed_samples, padded

from vlmpack.families.tiny import tiny_model
from vlmpack.layout import SlotRule, pack
from vlmpack.step import PackedStep, StepConfig, disable_packing, enable_packing

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
BATCHES = {
    "pair": ("image", "text"),
    "mixed": ("image", "text", "images", "image", "text"),
    "eight": ("text", "image", "images", "text", "image", "images", "text", "image"),
    "video": ("video", "image", "images_and_video", "text"),
}
LOGITS, LOSS, GRADIENT = 2e-5, 1e-6, 1e-5
"""Largest differences allowed in float32: of logits; of the loss, relative; of gradients, of their largest entry."""


@functools.cache
def reference(family, batch):
    """(model, samples, logits of each, loss, gradients) of every sample on its own, losses summed."""
    model = tiny_model(family, seed=3, layers=3)  # more than there are deepstack features, so that all get gradients
    samples = mixed_samples(model.config, seed=5, kinds=BATCHES[batch], text=(1, 12))
    logits, loss_sum, targets = [], torch.zeros(()), 0
    for sample in samples:
        logits.append(model(**{**alone(sample), "labels": None}).logits[0])
        loss_sum = loss_sum + F.cross_entropy(logits[-1][:-1], sample["labels"][1:], reduction="sum")
        targets += int((sample["labels"][1:] != -100).sum())
    loss = loss_sum / targets
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return model, samples, [x.detach() for x in logits], loss.detach(), gradients


@pytest.mark.parametrize("given", ["padded", "left padded", "row"])
@pytest.mark.parametrize("multiple", [1, 4, 8])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_alone(family, batch, multiple, given):
    model, samples, logits, loss, gradients = reference(family, batch)
    rule = SlotRule(multiple=multiple)
    inputs = padded(samples, "left" if given == "left padded" else "right", facts=given != "left padded")
    if given == "row":
        inputs = pack(inputs, rule=rule, pad_token_id=17)
    step = PackedStep(model, StepConfig(slots=rule))
    result = step(inputs, logits=True)
    result.loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    disable_packing(model)

    assert torch.isclose(result.loss, loss, rtol=LOSS, atol=0)
    for (start, stop), truth in zip(result.segments.spans, logits, strict=True):
        assert (result.row_logits[0, start:stop] - truth).abs().max() <= LOGITS
    assert found.keys() == gradients.keys()
    for name, truth in gradients.items():
        assert truth.abs().max() > 0, f"{name}: no gradient, nothing compared"
        assert (found[name] - truth).abs().max() <= GRADIENT * truth.abs().max(), name
    # Equal outputs do not prove that padding was skipped: so does the work.
    lengths = [len(sample["input_ids"]) for sample in samples]
    assert result.work.real_tokens == sum(lengths)
    assert result.work.physical_tokens == sum(-(-n // multiple) * multiple for n in lengths)
    assert result.work.attended_pairs == sum(n * (n + 1) // 2 for n in lengths)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_step_is_what_hugging_face_computes_on_the_padded_batch(family):
    model, samples, *_ = reference(family, "mixed")
    batch = padded(samples).to_hf()
    theirs = model(**{name: x for name, x in batch.items() if name != "vlmpack"}, num_items_in_batch=11)
    enable_packing(model)
    ours = model(**batch, num_items_in_batch=11, output_logits=True)
    disable_packing(model)
    assert torch.isclose(ours.loss, theirs.loss, rtol=LOSS, atol=0)
    real = batch["attention_mask"].bool()
    assert (ours.logits[real] - theirs.logits[real]).abs().max() <= LOGITS
    assert (ours.logits[~real] == 0).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_results_come_back_one_a_sample(family):
    model, samples, logits, *_ = reference(family, "mixed")
    enable_packing(model)
    result = PackedStep(model)(padded(samples, "left"))
    disable_packing(model)
    width = max(len(sample["input_ids"]) for sample in samples)
    for i, (sample, truth) in enumerate(zip(samples, logits, strict=True)):
        targets = sample["labels"][1:]
        logprobs = truth[:-1].log_softmax(-1).gather(-1, targets.clamp(min=0)[:, None])[:, 0] * (targets != -100)
        at = width - len(sample["input_ids"])
        assert (result.logprobs[i, at : width - 1] - logprobs).abs().max() <= LOGITS
        assert (result.logprobs[i, :at] == 0).all()
        mean = -logprobs.sum() / (targets != -100).sum()
        assert torch.isclose(result.sample_losses[i], mean, rtol=1e-5)
        assert result.sample_targets[i] == (targets != -100).sum()
    assert result.num_targets == result.sample_targets.sum()


@pytest.mark.parametrize("backend", ["sdpa_segments", "eager_mask"])
def test_back_ends_give_the_same_step(backend):
    model, samples, logits, loss, _ = reference("qwen3_vl", "mixed")
    result = PackedStep(model, StepConfig(attention=backend, slots=SlotRule(multiple=4)))(padded(samples), logits=True)
    disable_packing(model)
    assert torch.isclose(result.loss, loss, rtol=LOSS, atol=0)
    for (start, stop), truth in zip(result.segments.spans, logits, strict=True):
        assert (result.row_logits[0, start:stop] - truth).abs().max() <= LOGITS


@pytest.mark.parametrize("family", FAMILIES)
def test_what_stands_in_gaps_does_not_matter(family):
    model, samples, *_ = reference(family, "mixed")
    step = PackedStep(model)
    losses = []
    for pad_token_id in (0, 99):
        row = pack(padded(samples), rule=SlotRule(multiple=8, row_multiple=64), pad_token_id=pad_token_id)
        losses.append(step(row).loss)
    disable_packing(model)
    assert torch.equal(*losses)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_comparison_sees_a_leak(family):
    """Boundaries that join two samples: what the whole file would look like if nothing kept them apart."""
    model, samples, logits, *_ = reference(family, "pair")
    row = pack(padded(samples)).to_hf()
    row.pop("vlmpack")
    row["cu_seqlens_q"] = row["cu_seqlens_q_padded"] = [0, row["input_ids"].shape[1]]
    enable_packing(model)
    joined = model(**row, output_logits=True).logits[0]
    disable_packing(model)
    start = len(samples[0]["input_ids"])
    assert (joined[:start] - logits[0]).abs().max() <= LOGITS
    assert (joined[start:] - logits[1]).abs().max() > 0.1
