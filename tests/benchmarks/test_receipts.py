"""The batch that steps are measured on: lengths 5:1, and real to an unmodified model."""

from __future__ import annotations

import pytest

from benchmarks.receipts import MEASURED, ReceiptShapes, receipt_batch, receipt_config
from vlmpack.families import family_named
from vlmpack.layout import lengths_from_mask

TINY = ReceiptShapes(
    hidden=64, layers=2, kv_heads=2, vision_hidden=32, vision_depth=1, vocab_size=131, samples=5, longest=50
)


def test_lengths_reach_from_a_fifth_to_the_longest():
    assert sorted(TINY.lengths) == [10, 15, 22, 33, 50]
    assert ReceiptShapes(samples=1).lengths == (ReceiptShapes().longest,)


@pytest.mark.parametrize("name", MEASURED)
def test_every_sample_has_its_length_its_labels_and_about_its_share_of_image(name):
    family = family_named(name)
    config = receipt_config(family, TINY)
    batch = receipt_batch(family, config, TINY)
    assert batch.metadata is not None
    assert batch.labels is not None
    assert batch.metadata.lengths == lengths_from_mask(batch.attention_mask).lengths == TINY.lengths
    assert batch.metadata.num_targets == int((batch.labels[:, 1:] != -100).sum())
    if family.has_vision:
        token = config.audio_token_id if family.has_audio else config.image_token_id
        assert ((batch.input_ids == token).sum(1) > 0).all()
