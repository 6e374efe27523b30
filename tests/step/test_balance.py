"""The routers' load-balancing loss of a packed row: what transformers computes on the padded batch with its 2D mask."""

from __future__ import annotations

import pytest
import torch
from samples import alone, padded
from training import Gradients, collator, distance, gradients, receipts, trainer

from vlmpack.errors import ConfigError
from vlmpack.families.tiny import tiny_model
from vlmpack.layout import SlotRule, pack
from vlmpack.step import PackedStep, StepConfig, enable_packing
from vlmpack.trainer import loss_metrics

FAMILY, COEFFICIENT = "qwen3_vl_moe", 0.5
"""Hugging Face's default coefficient of 0.001 would hide a wrong loss in the rounding of the other one."""
RELATIVE, GRADIENT = 1e-6, 1e-5
KINDS = ("image", "text", "images", "text")
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")


def fresh(*, layers=3, coefficient=COEFFICIENT, always=False):
    model = tiny_model(FAMILY, seed=3, layers=layers)
    model.config.text_config.router_aux_loss_coef = coefficient
    if always:
        model.config.text_config.output_router_logits = True
    return model


def samples_of(model):
    return receipts(model, kinds=KINDS)


def stock(batch):
    """The batch as unmodified transformers takes it."""
    return {name: value for name, value in batch.to_hf().items() if name != "vlmpack"}


def close(a, b):
    return torch.isclose(a, b, rtol=RELATIVE, atol=0)


@pytest.mark.parametrize("given", ["padded", "left padded", "row"])
@pytest.mark.parametrize("multiple", [1, 4, 8, 64])
def test_it_is_that_of_the_padded_batch(multiple, given):
    model, reference = fresh(), fresh()
    batch = padded(samples_of(model), "left" if given == "left padded" else "right")
    theirs = reference(**stock(batch), output_router_logits=True, num_items_in_batch=40)
    rule = SlotRule(multiple=multiple)
    enable_packing(model, StepConfig(slots=rule))
    inputs = (pack(batch, rule=rule) if given == "row" else batch).to_hf()
    ours = model(**inputs, output_router_logits=True, num_items_in_batch=40)
    # With left padding Hugging Face's own cross-entropy learns first tokens from padding.
    compared = "aux_loss" if given == "left padded" else "loss"
    for output in (ours, theirs):
        output[compared].backward()

    assert close(ours[compared], theirs[compared])
    assert close(ours.aux_loss, theirs.aux_loss)
    assert distance(gradients(reference), gradients(model)) <= GRADIENT
    real = batch.attention_mask.bool().flatten()
    assert len(ours.router_logits) == 3
    for seen, expected in zip(ours.router_logits, theirs.router_logits, strict=True):
        assert (seen - expected[real]).abs().max() <= 2e-5


def test_its_gradient_is_compared_with_teeth():
    """What the routers' gradients would be without it."""
    with_loss, without = fresh(), fresh()
    for model, asked in ((with_loss, True), (without, False)):
        PackedStep(model)(padded(samples_of(model)), output_router_logits=asked).loss.backward()
    assert distance(gradients(with_loss), gradients(without)) > 0.01


@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("always", [True, False])
def test_it_is_computed_when_the_model_would(always, asked):
    """By argument; by configuration where the installed transformers reads that (5.17 does not)."""
    model = fresh(always=always)
    batch = padded(samples_of(model))
    more = {} if asked is None else {"output_router_logits": asked}
    theirs = model(**stock(batch), **more)
    enable_packing(model)
    ours = model(**batch.to_hf(), **more)
    assert (ours.aux_loss is None) == (theirs.aux_loss is None)
    assert close(ours.loss, theirs.loss)
    assert (ours.router_logits is not None) == (asked is True)


@pytest.mark.parametrize("multiple", [1, 8])
def test_sample_by_sample_it_is_the_mean_of_the_samples_alone(multiple):
    model, reference = fresh(), fresh()
    samples = samples_of(model)
    losses = [reference(**alone(sample), output_router_logits=True).aux_loss for sample in samples]
    expected = torch.stack(losses).mean()
    expected.backward()
    config = StepConfig(aux_loss="sample", slots=SlotRule(multiple=multiple))
    found = PackedStep(model, config)(padded(samples), output_router_logits=True)
    found.aux_loss.backward()
    assert close(found.aux_loss, expected)
    assert distance(gradients(reference), gradients(model)) <= GRADIENT
    of_the_row = PackedStep(model, StepConfig())(padded(samples), output_router_logits=True).aux_loss
    assert abs(of_the_row - expected) > 1e-3, "the two are different things"


def test_a_segment_of_length_0_has_no_say():
    model = enable_packing(fresh(), StepConfig(aux_loss="sample", keep_empty=True))
    samples = samples_of(model)
    batch = stock(padded(samples))
    grown = {**batch, **{k: torch.cat([batch[k], batch[k][1:2]]) for k in ("input_ids", "labels")}}
    grown["attention_mask"] = torch.cat([batch["attention_mask"], torch.zeros_like(batch["attention_mask"][:1])])
    del grown["mm_token_type_ids"], batch["mm_token_type_ids"]
    losses = [model(**inputs, output_router_logits=True).aux_loss for inputs in (batch, grown)]
    assert torch.equal(*losses)


def checkpointed(model, *, reentrant):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return model


def test_recomputed_layers_give_the_same_gradient():
    reference, model = fresh(), checkpointed(fresh(), reentrant=False)
    row = pack(padded(samples_of(model)), rule=SlotRule(multiple=8))
    for each in (reference, model):
        PackedStep(each)(row, output_router_logits=True).loss.backward()
    assert distance(gradients(reference), gradients(model)) <= GRADIENT


def test_reentrant_checkpointing_would_silently_cut_it_off_and_is_refused():
    model = checkpointed(fresh(), reentrant=True)
    batch = padded(samples_of(model))
    theirs = model(**stock(batch), output_router_logits=True)
    assert not theirs.aux_loss.requires_grad  # transformers adds it to the loss nevertheless
    enable_packing(model)
    with pytest.raises(ConfigError, match=r"router logits have no gradient.*use_reentrant"):
        model(**batch.to_hf(), output_router_logits=True)
    model(**batch.to_hf())
    model.eval()  # nothing is recomputed then
    assert close(model(**batch.to_hf(), output_router_logits=True).aux_loss, theirs.aux_loss)


def test_frozen_routers_are_no_mistake():
    model = enable_packing(fresh())
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    loss = model(**padded(samples_of(model)).to_hf(), output_router_logits=True).loss
    loss.backward()
    assert model.lm_head.weight.grad.any()


def test_without_labels_it_is_reported_and_part_of_nothing():
    model = enable_packing(fresh())
    batch = padded(samples_of(model))
    expected = model(**batch.to_hf(), output_router_logits=True).aux_loss
    given = batch.to_hf()
    del given["labels"]
    output = model(**given, output_router_logits=True)
    assert output.loss is None
    assert torch.equal(output.aux_loss, expected)


def test_a_dense_model_has_none():
    model = enable_packing(tiny_model("qwen3_vl"))
    row = pack(padded(receipts(model, kinds=KINDS))).to_hf()
    assert model(**row).aux_loss is None
    with pytest.raises(ConfigError, match="output_router_logits cannot be combined with a packed row"):
        model(**row, output_router_logits=True)


def test_another_way_to_average_is_refused():
    with pytest.raises(ConfigError, match=r"""aux_loss is 'segment'; it is "row" or "sample\""""):
        StepConfig(aux_loss="segment")


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_micro_batches_of_trainer_add_up_as_in_transformers(layout, tmp_path):
    """Cross-entropy is divided by the targets of the whole step, the load-balancing loss by nothing."""
    reference, model = fresh(), enable_packing(fresh())
    samples = receipts(model)[:4]
    batches = [padded(samples[:2]), padded(samples[2:])]
    targets = sum(batch.facts.num_targets for batch in batches)
    for batch in batches:
        reference(**stock(batch), output_router_logits=True, num_items_in_batch=targets).loss.backward()
    run = trainer(model, samples, tmp_path, layout, max_steps=1, gradient_accumulation_steps=2)
    run.data_collator = collator(layout, output_router_logits=True)
    seen = Gradients()
    run.add_callback(seen)
    run.train()
    assert distance(gradients(reference), seen.steps[0]) <= GRADIENT


def test_metrics_of_an_evaluation_are_found(tmp_path):
    """The load-balancing loss comes among Trainer's predictions, before the two numbers of each sample."""
    model = enable_packing(fresh())
    found = []
    for asked in (False, True):
        run = trainer(model, receipts(model), tmp_path, "packed")
        run.data_collator = collator("packed", output_router_logits=asked)
        run.compute_metrics = loss_metrics
        found.append({name: x for name, x in run.evaluate().items() if name.endswith(("_loss", "_targets"))})
    assert found[1]["eval_loss"] > found[0].pop("eval_loss") + 0.1
    assert {name: found[1][name] for name in found[0]} == found[0]


def test_a_configuration_that_wants_tuples_changes_nothing():
    model = enable_packing(fresh())
    batch = padded(samples_of(model)).to_hf()
    expected = model(**batch, output_router_logits=True)
    model.config.return_dict = False
    assert torch.equal(model(**batch, output_router_logits=True)["aux_loss"], expected.aux_loss)
