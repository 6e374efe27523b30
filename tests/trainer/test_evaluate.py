"""evaluate: every sample's loss out of shared rows, equal to the sample alone in the unmodified model."""

from __future__ import annotations

import io
import math

import pytest
import torch
from chats import chat, picture, processor_of
from equality import VISION
from training import KINDS, LAYOUTS, Samples, collator, lengths_of, losses_alone, receipts

from vlmpack.collate import VLMCollator
from vlmpack.errors import ConfigError, SampleError
from vlmpack.layout import METADATA_KEY
from vlmpack.model import PackedStep, enable_packing, is_packing
from vlmpack.plan import plan_bins
from vlmpack.testing import tiny_model
from vlmpack.trainer import evaluate

FAMILIES = ("qwen3_vl", "qwen3_5", "qwen3")
"""With images; with images and gated delta layers; of text."""


def scene(family="qwen3_vl"):
    """(a model, an odd number of samples in its training mode, one of them without targets)."""
    model = tiny_model(family)
    samples = receipts(model, kinds=KINDS if model.config.model_type in VISION else ("text",) * 7)
    samples[2]["labels"] = torch.full_like(samples[2]["labels"], -100)
    return model.train(), samples


def rows_of(samples, rows=3):
    """A plan with about so many rows; the longest sample may exceed one."""
    lengths = lengths_of(samples)
    return plan_bins(lengths, sum(lengths) // rows, overlength="own_row")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_those_of_the_samples_alone_and_of_the_set_the_means(family, layout):
    model, samples = scene(family)
    sums, counts = losses_alone(model, samples)
    plan = rows_of(samples)

    seen = evaluate(model, Samples(samples), collator(layout), plan=plan)

    assert 1 < seen.rows == len(plan) < len(samples)
    assert [*plan.sample_ids] != sorted(plan.sample_ids)  # the guard: rows are in another order
    assert seen.sample_ids.tolist() == list(range(7))
    assert seen.sample_targets.tolist() == counts.tolist()
    assert seen.refused == ()
    alone = (sums / counts.clamp(1)).double()
    torch.testing.assert_close(torch.from_numpy(seen.sample_losses), alone, rtol=1e-6, atol=1e-6)

    learnt = counts > 0
    assert not learnt.all()
    assert seen.token_loss == pytest.approx(float(sums.sum() / counts.sum()), rel=1e-6)
    assert seen.sample_loss == pytest.approx(float((sums / counts)[learnt].mean()), rel=1e-6)
    assert seen.perplexity == pytest.approx(math.exp(seen.token_loss))
    assert (seen.num_targets, seen.metrics["num_samples"]) == (counts.sum(), 6)
    lengths = lengths_of(samples)
    assert seen.work.real_tokens == seen.work.physical_tokens == sum(lengths)
    assert seen.work.attended_pairs == sum(n * (n + 1) // 2 for n in lengths)
    assert seen.work.vision_patches == sum(len(sample.get("pixel_values", ())) for sample in samples)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_model_is_left_as_it_was_module_by_module(enabled):
    model, samples = scene()
    model.model.visual.eval()  # frozen, as some train
    if enabled:
        enable_packing(model)
    modes = [module.training for module in model.modules()]
    assert len(set(modes)) == 2
    evaluate(model, Samples(samples), collator("packed"), plan=rows_of(samples))
    assert [module.training for module in model.modules()] == modes
    assert is_packing(model) is enabled


def test_a_model_is_left_as_it_was_after_an_error_too():
    model, samples = scene()

    def broken(features):
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        evaluate(model, Samples(samples), broken, plan=rows_of(samples))
    assert model.training
    assert not is_packing(model)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("family", FAMILIES)
def test_training_goes_on_bit_for_bit_after_an_evaluation(family):
    """Whatever a layer keeps from the evaluation must not be what autograd refuses to save."""
    after = []
    for evaluates in (False, True):
        model, samples = scene(family)
        step = PackedStep(model)
        if evaluates:
            before = torch.random.get_rng_state()
            evaluate(model, Samples(samples), collator("packed"), plan=rows_of(samples))
            assert torch.equal(torch.random.get_rng_state(), before), "a random number was drawn"
        step(collator("packed")(samples)).loss.backward()
        after.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert after[0].keys() == after[1].keys()
    assert all(torch.equal(after[0][name], after[1][name]) for name in after[0])


# ---------------------------------------------------------------------- samples that are left out


def test_what_a_plan_dropped_is_listed():
    model, samples = scene()
    lengths = lengths_of(samples)
    longest = lengths.index(max(lengths))
    assert lengths.count(max(lengths)) == 1
    seen = evaluate(
        model, Samples(samples), collator("packed"), plan=plan_bins(lengths, max(lengths) - 1, overlength="drop")
    )
    assert [one.index for one in seen.refused] == [longest]
    assert f"{max(lengths)} tokens (a row holds {max(lengths) - 1})" in seen.refused[0].detail
    assert seen.sample_ids.tolist() == [at for at in range(7) if at != longest]


def receipts_with_faults():
    """Six conversations: a text, a header that is cut off, an image whose pixels are, and others that are fine."""
    whole, cut = io.BytesIO(), io.BytesIO()
    picture(seed=9).save(whole, "PNG")
    cut.write(whole.getvalue()[: len(whole.getvalue()) // 2])
    return [
        chat("What is it?", "A receipt of 12,000", picture(seed=1), id="a"),
        chat("Say something", "Something"),
        chat("What is it?", "Nobody knows", {"bytes": b"no picture"}, id="no header"),
        chat("What is it?", "Nobody knows", {"bytes": cut.getvalue()}, id="half"),
        chat("What are they?", "Two receipts", picture(90, 40, seed=2), picture(40, 90, seed=3), id=7),
        chat("What is it?", "A very long receipt", picture(300, 280, seed=4)),
    ]


def test_rows_are_planned_from_headers_and_refused_samples_are_listed_whenever_they_are_found():
    model, samples = tiny_model("qwen3_vl", processor=processor_of()), receipts_with_faults()
    collate = VLMCollator(processor_of(), layout="packed", on_bad="skip")
    fine = [0, 1, 4, 5]
    padded = VLMCollator(processor_of())
    batches = [padded([samples[at]]) for at in fine]
    lengths = [batch["input_ids"].numel() for batch in batches]
    capacity = max(lengths) - 1
    assert capacity > sum(lengths[:2])  # the guard: two share a row, one exceeds it
    with torch.no_grad():
        alone = [float(model(**{k: v for k, v in batch.items() if k != METADATA_KEY}).loss) for batch in batches]

    seen = evaluate(model, samples, collate, capacity=capacity)

    assert seen.sample_ids.tolist() == fine
    assert seen.sample_losses.tolist() == pytest.approx(alone, rel=1e-6)
    assert [(one.index, one.reason) for one in seen.refused] == [(2, "image_undecodable"), (3, "left_out")]
    assert seen.rows < len(samples)
    assert [sample.get("id") for sample in samples] == ["a", None, "no header", "half", 7, None]


def test_a_sample_that_is_alone_in_its_row_and_refused_is_not_counted():
    model, samples = tiny_model("qwen3_vl", processor=processor_of()), receipts_with_faults()[2:4]
    collate = VLMCollator(processor_of(), layout="packed", on_bad="skip")
    seen = evaluate(model, samples, collate, plan=plan_bins([10, 10], 10))
    assert seen.sample_ids.tolist() == []
    assert [one.index for one in seen.refused] == [0, 1]
    assert (seen.num_targets, seen.token_loss) == (0, 0.0)


def test_a_collator_that_is_told_to_raise_does_so_before_the_first_row():
    model, samples = tiny_model("qwen3_vl", processor=processor_of()), receipts_with_faults()
    with pytest.raises(SampleError, match=r"sample 2 \(id 'no header'\)") as caught:
        evaluate(model, samples, VLMCollator(processor_of()), capacity=500)
    assert caught.value.index == 2


@pytest.mark.parametrize(("workers", "named"), [(0, True), (1, True), (0, False)])
def test_damage_that_is_found_late_is_of_the_sample_in_the_data_set(workers, named):
    faults = receipts_with_faults()
    samples = [faults[0], faults[1], faults[4], faults[5], faults[1], faults[3]]
    if not named:
        del samples[5]["id"]
    plan = plan_bins([30] * 6, 61)
    assert next(row.tolist().index(5) for row in plan if 5 in row) == 1  # the guard: its place in its row is another
    model, collate = tiny_model("qwen3_vl", processor=processor_of()), VLMCollator(processor_of())
    with pytest.raises(
        SampleError, match=r"^sample 5 \(id 'half'\): " if named and not workers else "sample 5"
    ) as caught:
        evaluate(model, samples, collate, plan=plan, workers=workers)
    if not workers:  # torch hands on no more than the text
        assert (caught.value.index, caught.value.sample_id) == (5, "half" if named else None)
        assert "5" not in caught.value.detail


def test_what_the_collator_drops_on_purpose_is_listed_and_not_raised():
    model, samples = tiny_model("qwen3_vl", processor=processor_of()), receipts_with_faults()
    collate = VLMCollator(processor_of(), max_length=60, overlength="drop")
    seen = evaluate(model, [samples[at] for at in (0, 1, 5)], collate, capacity=500)
    assert seen.sample_ids.tolist() == [0, 1]
    assert [(one.index, one.reason) for one in seen.refused] == [(2, "overlength")]


def test_nothing_that_can_be_used_is_refused():
    model, samples = tiny_model("qwen3_vl", processor=processor_of()), receipts_with_faults()[2:3]
    with pytest.raises(ConfigError, match=r"no sample of the evaluation set can be used \([a-z_]+ 1\)"):
        evaluate(model, samples, VLMCollator(processor_of(), on_bad="skip"), capacity=500)


def test_a_collator_that_leaves_out_samples_and_does_not_say_which_is_refused():
    model, samples = scene()
    plan = rows_of(samples)

    def forgetful(features):
        return collator("packed")(features[:1])

    assert any(len(row) > 1 for row in plan)
    with pytest.raises(ConfigError, match=r"of samples \[.*\] there are only 1 in the batch, and it does"):
        evaluate(model, Samples(samples), forgetful, plan=plan)


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give capacity=, the tokens of a row, or plan="),
        ({"capacity": 100, "plan": rows_of}, "give capacity=, the tokens of a row, or plan="),
        ({"plan": lambda samples: rows_of(samples[:6])}, "the plan is of 6 samples, but the data set has 7"),
        ({"capacity": 100}, "a function cannot measure lengths, as VLMCollator can; give plan="),
    ],
)
def test_settings_that_make_no_rows_are_refused(settings, message):
    model, samples = scene()
    settings = {name: value(samples) if callable(value) else value for name, value in settings.items()}
    with pytest.raises(ConfigError, match=message):
        evaluate(model, Samples(samples), collator("packed"), **settings)
