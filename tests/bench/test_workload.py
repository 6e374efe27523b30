"""The batch that steps are measured on: lengths 5:1, and real to an unmodified model."""

from __future__ import annotations

from math import prod

import pytest
import torch

from vlmpack.bench.workload import ReceiptShapes, alone, hf_inputs, on_device, receipt_batch, receipt_model
from vlmpack.layout import lengths_from_mask

TINY = ReceiptShapes(
    hidden=64, layers=2, kv_heads=2, vision_hidden=32, vision_depth=1, vocab_size=131, samples=5, longest=50
)


def test_lengths_reach_from_a_fifth_to_the_longest():
    assert sorted(TINY.lengths) == [10, 15, 22, 33, 50]
    assert ReceiptShapes(samples=1).lengths == (ReceiptShapes().longest,)
    assert max(ReceiptShapes().lengths) == pytest.approx(5 * min(ReceiptShapes().lengths), rel=0.01)


def test_the_facts_are_those_of_the_tensors():
    config = receipt_model(TINY).config
    batch = receipt_batch(config, TINY)
    facts = batch.facts
    assert facts is not None
    assert facts.lengths == lengths_from_mask(batch.attention_mask).lengths == TINY.lengths
    assert batch.labels is not None
    assert facts.num_targets == int((batch.labels[:, 1:] != -100).sum())
    assert batch.media.pixel_values is not None
    assert sum(map(prod, facts.image_grids)) == len(batch.media.pixel_values)
    per_row = (batch.input_ids == config.image_token_id).sum(1)
    assert per_row.tolist() == [prod(grid) // 4 for grid in facts.image_grids]


def test_padded_and_alone_are_the_same_samples_to_an_unmodified_model():
    model = receipt_model(TINY)
    batch = receipt_batch(model.config, TINY)
    together = model(**hf_inputs(batch)).logits
    for row, inputs in enumerate(alone(batch)):
        length = inputs["input_ids"].shape[1]
        torch.testing.assert_close(together[row, :length], model(**inputs).logits[0], atol=2e-5, rtol=0)


def test_the_same_seed_gives_the_same_batch():
    config = receipt_model(TINY).config
    one, same, other = (receipt_batch(config, TINY, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.input_ids, same.input_ids)
    assert not torch.equal(one.input_ids, other.input_ids)
    assert torch.equal(on_device(one, "cpu").input_ids, one.input_ids)
