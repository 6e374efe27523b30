"""The batch that steps are measured on: lengths 5:1, and real to an unmodified model."""

from __future__ import annotations

import pytest
import torch

from benchmarks.receipts import MEASURED, ReceiptShapes, hf_inputs, receipt_batch, receipt_config, receipt_model
from benchmarks.receipts import receipt_samples as samples_of
from vlmpack.families import family_named
from vlmpack.layout import lengths_from_mask
from vlmpack.testing import padded

TINY = ReceiptShapes(
    hidden=64, layers=2, kv_heads=2, vision_hidden=32, vision_depth=1, vocab_size=131, samples=5, longest=50
)
NAMES = ("qwen3_vl", "gemma3", "qwen2_5_omni_thinker", "qwen3")


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


@pytest.mark.parametrize("name", NAMES)
def test_padded_and_alone_are_the_same_samples_to_an_unmodified_model(name):
    family = family_named(name)
    model = receipt_model(family, TINY)
    samples = samples_of(family, model.config, TINY)
    with torch.no_grad():
        together = model(**hf_inputs(padded(samples))).logits
        for row, sample in enumerate(samples):
            logits = model(**hf_inputs(padded([sample]))).logits[0]
            torch.testing.assert_close(together[row, : len(logits)], logits, atol=2e-5, rtol=0)


def test_the_same_seed_gives_the_same_batch_and_the_same_weights():
    family = family_named("qwen3_vl")
    config = receipt_config(family, TINY)
    for make in (
        lambda seed: receipt_batch(family, config, TINY, seed=seed).input_ids,
        lambda seed: receipt_model(family, TINY, seed=seed).lm_head.weight,
    ):
        assert torch.equal(make(1), make(1))
        assert not torch.equal(make(1), make(2))


def test_experts_share_the_width_of_a_dense_mlp_and_gated_delta_layers_have_heads_of_128():
    shapes = ReceiptShapes()
    text = receipt_config(family_named("qwen3_5_moe"), shapes).text_config
    assert text.num_experts_per_tok * text.moe_intermediate_size == 3 * shapes.hidden
    assert text.shared_expert_intermediate_size == text.moe_intermediate_size
    assert text.linear_num_key_heads * text.linear_key_head_dim == shapes.hidden
    assert text.linear_num_value_heads * text.linear_value_head_dim == 2 * shapes.hidden
    assert text.layer_types == 3 * ["linear_attention"] + ["full_attention"]
