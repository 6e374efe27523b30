"""The loss that HF Trainer optimises: every target weighs the same, however the samples fall into batches."""

from __future__ import annotations

import json

import pytest
import torch
from chats import chat, picture, processor_of
from trainer.packed_runs import fresh
from training import (
    LAYOUTS,
    Gradients,
    Samples,
    arguments,
    channel_of,
    collator,
    distance,
    gradients,
    lengths_of,
    logged,
    loss_alone,
    receipts,
    weighing,
)
from transformers import Trainer

from vlmpack.collate import SharePrefixes, SkipLimit, VLMCollator
from vlmpack.errors import ConfigError, LayoutError
from vlmpack.model import PackedStep, enable_packing
from vlmpack.plan import plan_bins
from vlmpack.testing import tiny_model
from vlmpack.trainer import PackedTrainer


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", ["token", "sample", "square"])
def test_a_step_of_weighted_targets_is_that_of_the_samples_alone(loss, layout, tmp_path):
    """An epoch is one step of several rows, or batches."""
    reference, model = fresh(), enable_packing(fresh())
    samples = receipts(model)
    samples[3]["labels"] = torch.full_like(samples[3]["labels"], -100)
    lengths, seen = lengths_of(samples), Gradients()
    plan = plan_bins(lengths, max(lengths)) if layout == "packed" else None
    args = arguments(tmp_path, gradient_accumulation_steps=len(plan or [0] * 4), max_steps=1)
    data = Samples(samples)
    run = PackedTrainer(
        model, args, weighing(layout), data, data, plan=plan, eval_plan=plan, loss=loss, callbacks=[seen]
    )

    expected = loss_alone(reference, samples, loss)
    expected.backward()
    evaluated = run.evaluate()
    run.train()

    assert evaluated["eval_loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert logged(run) == pytest.approx([expected.item()], rel=1e-6)
    assert distance(gradients(reference), seen.steps[0]) < 1e-5
    with torch.no_grad():
        for name in ("long", "short"):
            of_channel = float(loss_alone(fresh(), [each for each in samples if channel_of(each) == name], loss))
            assert run.state.log_history[-2][f"loss/{name}"] == pytest.approx(of_channel, rel=1e-6)


def test_trees_weigh_a_shared_target_for_each_sample(tmp_path):
    """Samples that begin alike, up to an answer that each weighs otherwise."""
    processor = processor_of()
    samples = []
    for weight, last in ((1, "It is 5"), (0.25, "No, 6"), (0, "7")):
        first = {"role": "assistant", "content": "The total is 75,000", "weight": weight}
        messages = [*chat()["messages"][:1], first, {"role": "user", "content": "Sure?"}]
        samples.append({"messages": [*messages, {"role": "assistant", "content": last}]})
    found = []
    for share_prefixes in (False, True):
        model = fresh(processor=processor)
        collate = VLMCollator(processor, layout="packed", share_prefixes=share_prefixes and SharePrefixes(min_shared=4))
        result = PackedStep(model)(collate.collate(samples))
        result.loss.backward()
        found.append((result.loss.item(), gradients(model), result.work.physical_tokens))
    (loss, plain, tokens), (shared, ours, fewer) = found
    assert fewer < tokens
    assert shared == pytest.approx(loss, rel=1e-6)
    assert distance(plain, ours) < 1e-5


def test_weights_are_never_ignored(tmp_path):
    model = fresh()
    samples = receipts(model)
    batch, row = weighing("padded")(samples), weighing("packed")(samples)
    for made in (batch, row):
        with pytest.raises(ConfigError, match="reached a model without passing through the packed forward"):
            model(**made)
    data = Samples(samples)
    run = PackedTrainer(model, arguments(tmp_path), collator("padded"), data, loss="sample")
    with pytest.raises(ConfigError, match="loss='sample' needs a model with packing"):
        run.train()
    with pytest.raises(ConfigError, match="loss must be one of token, sample, square"):
        PackedTrainer(model, arguments(tmp_path), collator("padded"), data, loss="mean")
    enable_packing(model)
    batch["use_cache"] = False
    with pytest.raises(ConfigError, match="loss_weights would be ignored, because this batch is not packed: inputs_em"):
        model(**batch, inputs_embeds=torch.zeros(7, 9, 16))
    for match, given in {
        "shift_weights belong to a packed row": {**batch, "shift_weights": batch["loss_weights"]},
        "loss_weights belong to a padded batch": {**row, "loss_weights": row["shift_weights"]},
        "loss_weights must be floats .*, one for each label, got": {**batch, "loss_weights": batch["labels"]},
        "loss_weights hold 0 at a label, .*: set labels": {**batch, "loss_weights": 0 * batch["loss_weights"]},
    }.items():
        with pytest.raises(LayoutError, match=match):
            model(**given)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_trainer_counts_the_targets_that_the_collator_counted(layout, side, tmp_path):
    """Also when everything is learnt and padding is on the left, where the first token of a sample is labelled."""
    processor = processor_of()
    collate = VLMCollator(processor, layout=layout, train_on="all")
    rows = [chat("short", "yes"), chat("a longer question", "a longer answer", picture())]
    before = processor.tokenizer.padding_side
    processor.tokenizer.padding_side = side
    try:
        batch = collate(rows)
        run = Trainer(enable_packing(tiny_model(processor=processor)), arguments(tmp_path), collate)
        counted = run._get_num_items_in_batch([batch, batch], torch.device("cpu"))
    finally:
        processor.tokenizer.padding_side = before
    assert int(counted) == 2 * batch["vlmpack"].num_targets


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_whose_samples_were_all_refused_costs_a_step_of_nothing(layout, tmp_path):
    """The good batch beside it in the same step counts as if it were alone."""
    processor = processor_of()
    good = [chat("What?", "This.", picture()), chat("And?", "That.")]
    bad = [{"messages": [{"role": "user", "content": "no answer"}]}] * 2
    skip = {"on_bad": "skip", "skip_log": tmp_path / "refused.jsonl", "skip_limit": SkipLimit(max_bad_fraction=1.0)}
    losses = []
    for rows, accumulate in ((good, 1), (good + bad, 2)):
        collate = VLMCollator(processor, layout=layout, **skip)
        model = enable_packing(tiny_model(processor=processor))
        settings = {"remove_unused_columns": False, "train_sampling_strategy": "sequential", "max_steps": 1}
        args = arguments(tmp_path, gradient_accumulation_steps=accumulate, **settings)
        run = Trainer(model, args, collate, rows)
        run.train()
        losses += logged(run)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert len([json.loads(line) for line in skip["skip_log"].read_text().splitlines()]) == 2
