"""The batch that steps are measured on: lengths 5:1, and real to an unmodified model."""

from __future__ import annotations

from math import prod

import pytest
import torch

from benchmarks.receipts import (
    BY_FORMULA,
    MEASURED,
    ReceiptShapes,
    alone,
    hf_inputs,
    receipt_batch,
    receipt_config,
    receipt_model,
)
from vlmpack.families import family_named
from vlmpack.layout import lengths_from_mask

TINY = ReceiptShapes(
    hidden=64, layers=2, kv_heads=2, vision_hidden=32, vision_depth=1, vocab_size=131, samples=5, longest=50
)


def test_lengths_reach_from_a_fifth_to_the_longest():
    assert sorted(TINY.lengths) == [10, 15, 22, 33, 50]
    assert ReceiptShapes(samples=1).lengths == (ReceiptShapes().longest,)
    assert max(ReceiptShapes().lengths) == pytest.approx(5 * min(ReceiptShapes().lengths), rel=0.01)


@pytest.mark.every_family
@pytest.mark.parametrize("name", MEASURED)
def test_the_metadata_are_those_of_the_tensors(name):
    _, batch = model_and_batch(name)
    metadata = batch.metadata
    assert metadata is not None
    assert metadata.lengths == lengths_from_mask(batch.attention_mask).lengths == TINY.lengths
    assert batch.labels is not None
    assert metadata.num_targets == int((batch.labels[:, 1:] != -100).sum())


@pytest.mark.parametrize("name", [name for name in BY_FORMULA if family_named(name).has_grids])
def test_every_sample_has_an_image_and_its_placeholders(name):
    model, batch = model_and_batch(name)
    metadata = batch.metadata
    assert metadata is not None
    assert batch.media.pixel_values is not None
    assert sum(map(prod, metadata.image_grids)) == len(batch.media.pixel_values)
    per_row = (batch.input_ids == model.config.image_token_id).sum(1)
    assert per_row.tolist() == [prod(grid) // 4 for grid in metadata.image_grids]
    assert min(per_row) > 0


@pytest.mark.every_family
@pytest.mark.parametrize("name", ["mistral3", "gemma3", "paligemma"])
def test_images_without_grids_have_placeholders_too(name):
    model, batch = model_and_batch(name)
    metadata = batch.metadata
    assert metadata is not None
    assert metadata.images_per_sample == (1,) * TINY.samples
    per_row = (batch.input_ids == model.config.image_token_id).sum(1)
    assert per_row.tolist() == list(metadata.image_tokens)
    assert min(per_row) > 0


@pytest.mark.every_family
def test_a_family_that_hears_gets_audio_of_as_many_tokens():
    model, batch = model_and_batch("qwen2_5_omni_thinker")
    metadata = batch.metadata
    assert metadata is not None
    assert metadata.audios_per_sample == (1,) * TINY.samples
    per_row = (batch.input_ids == model.config.audio_token_id).sum(1)
    assert per_row.tolist() == [round(n * TINY.image_share) for n in TINY.lengths]


@pytest.mark.every_family
def test_a_prefix_ends_where_labels_begin_and_chunks_are_shorter_than_samples():
    _, batch = model_and_batch("paligemma")
    assert batch.labels is not None
    suffix, labelled = batch.extras["token_type_ids"] == 1, batch.labels != -100
    assert torch.equal(suffix[:, 1:], labelled[:, 1:])  # its first token is labelled too
    assert receipt_config(family_named("llama4_text"), TINY).attention_chunk_size == TINY.longest // 3


def test_a_family_without_vision_gets_text_of_the_same_lengths():
    _, text = model_and_batch("qwen3")
    _, images = model_and_batch("qwen3_vl")
    assert not text.media.to_hf()
    assert text.mm_token_type_ids is None
    assert torch.equal(text.attention_mask, images.attention_mask)


@pytest.mark.parametrize("name", BY_FORMULA)
def test_padded_and_alone_are_the_same_samples_to_an_unmodified_model(name):
    model, batch = model_and_batch(name)
    together = model(**hf_inputs(batch)).logits
    samples = alone(batch)
    assert len(samples) == TINY.samples
    for row, inputs in enumerate(samples):
        length = inputs["input_ids"].shape[1]
        torch.testing.assert_close(together[row, :length], model(**inputs).logits[0], atol=2e-5, rtol=0)


def test_the_same_seed_gives_the_same_batch_and_the_same_weights():
    family = family_named("qwen3_vl")
    config = receipt_config(family, TINY)
    one, same, other = (receipt_batch(family, config, TINY, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.input_ids, same.input_ids)
    assert not torch.equal(one.input_ids, other.input_ids)
    one, same, other = (receipt_model(family, TINY, seed=seed).lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_experts_share_the_width_of_a_dense_mlp_and_gated_delta_layers_have_heads_of_128():
    shapes = ReceiptShapes()
    text = receipt_config(family_named("qwen3_5_moe"), shapes).text_config
    assert text.num_experts_per_tok * text.moe_intermediate_size == 3 * shapes.hidden
    assert text.shared_expert_intermediate_size == text.moe_intermediate_size
    assert text.linear_num_key_heads * text.linear_key_head_dim == shapes.hidden
    assert text.linear_num_value_heads * text.linear_value_head_dim == 2 * shapes.hidden
    assert text.linear_key_head_dim == 128
    assert text.layer_types == 3 * ["linear_attention"] + ["full_attention"]


def model_and_batch(name: str):
    family = family_named(name)
    model = receipt_model(family, TINY)
    return model, receipt_batch(family, model.config, TINY)
