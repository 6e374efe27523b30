"""The loss that HF Trainer optimises: every target weighs the same, however the samples fall into batches."""

from __future__ import annotations

import pytest
from cases import slow
from training import KINDS, LAYOUTS, descend, distance, logged, receipts, train, trainer, weights

from vlmpack.model import enable_packing
from vlmpack.testing import padded, tiny_model

TWELVE = (*KINDS, *KINDS[:5])


@pytest.mark.parametrize(
    ("family", "layout"), [("qwen2_5_vl", "packed"), ("qwen3_vl_moe", "padded"), ("qwen3_5", "packed")]
)
def test_accumulated_batches_equal_one_big_batch_of_samples_alone(family, layout, tmp_path):
    reference, model = tiny_model(family), enable_packing(tiny_model(family))
    samples = receipts(model, kinds=TWELVE)

    expected = descend(reference, samples, size=6, steps=2)
    run = train(model, samples, tmp_path, layout, gradient_accumulation_steps=3)

    assert run.losses == pytest.approx(expected.losses, rel=1e-6)
    for ours, theirs in zip(run.gradients, expected.gradients, strict=True):
        assert distance(theirs, ours) < 1e-5


def test_a_last_accumulation_of_fewer_batches(tmp_path):
    """Seven samples in twos, three batches to a step: the second step has one batch of one sample."""
    reference, model = tiny_model(), enable_packing(tiny_model())
    samples = receipts(model)
    expected = descend(reference, samples, size=6, steps=2)
    run = train(model, samples, tmp_path, gradient_accumulation_steps=3)
    assert run.losses == pytest.approx(expected.losses, rel=1e-6)


@pytest.mark.parametrize(
    ("family", "averages"),
    [("qwen2_vl", False), ("qwen3_vl", True), pytest.param("qwen2_5_vl", True, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("accumulate", [1, *slow(4)])
def test_a_collator_of_ones_own_trains_as_before_unless_trainer_averaged_batches(
    family, averages, accumulate, tmp_path
):
    """The unmodified model's loss counts every sample's first label, so there is none."""
    runs = []
    for enable in (enable_packing, lambda model: model):
        model = enable(tiny_model(family))
        samples = receipts(model, kinds=KINDS * 4)
        for sample in samples:
            sample["labels"][0] = -100
        run = trainer(model, samples, tmp_path, "padded", gradient_accumulation_steps=accumulate, max_steps=3)
        run.data_collator = lambda features: {**padded(features, metadata=False).to_hf()}
        run.train()
        runs.append((logged(run), weights(model)))
    (ours, our_weights), (plain, plain_weights) = runs
    apart = max(abs(a - b) for a, b in zip(ours, plain, strict=True))
    if averages and accumulate > 1:
        assert apart > 0.01
        assert distance(plain_weights, our_weights) > 0.01
    else:
        assert apart < 1e-5
        assert distance(plain_weights, our_weights) < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_that_the_text_model_is_configured_with_changes_nothing(layout, tmp_path):
    """Trainer switches the cache off on the outer configuration only; the text model reads its own."""
    losses = []
    for use_cache in (True, False):
        model = enable_packing(tiny_model())
        model.config.text_config.use_cache = use_cache
        losses.append(train(model, receipts(model), tmp_path, layout).losses)
        assert model.config.text_config.use_cache is use_cache
    assert losses[0] == losses[1]
