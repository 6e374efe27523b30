"""The samples of a probe: every kind, the same every time, and wholly another one when perturbed."""

from __future__ import annotations

from math import prod

import pytest
import torch

from vlmpack.families import FAMILIES, family_named
from vlmpack.layout import IGNORE, pack
from vlmpack.proof.circumstances import gappy
from vlmpack.proof.receipts import processed_samples
from vlmpack.proof.samples import Words, batch_of, perturbed, synthetic_samples
from vlmpack.testing import tiny_config, tiny_processor


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_kind_is_there_and_has_its_tokens(family: str) -> None:
    kind, config = family_named(family), tiny_config(family)
    samples = synthetic_samples(kind, config)
    kinds = ["image", "text", "two images", "video"] if kind.has_vision else ["text"] * 3
    assert [sample.kind for sample in samples] == kinds
    lengths = [len(sample.input_ids) for sample in samples]
    assert len(set(lengths)) == len(lengths), "two samples of one length could be taken for each other"
    for sample in samples:
        assert sample.labels[0] == sample.input_ids[0], "the first token must be labelled, to see that it is masked"
        assert 0 < sample.num_targets < len(sample.input_ids) - 1
        types = kind.media_types(sample.input_ids, config)
        for modality, grids in ((1, sample.image_grids), (2, sample.video_grids)):
            assert int((types == modality).sum()) == kind.media_tokens(grids, config)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_perturbing_changes_every_word_and_pixel_and_nothing_else(family: str) -> None:
    kind, config = family_named(family), tiny_config(family)
    words = Words.of(kind, config)
    for sample in synthetic_samples(kind, config):
        other = perturbed(sample, words)
        is_word = (sample.input_ids >= words.low) & (sample.input_ids < words.high)
        assert is_word.any()
        assert ((sample.input_ids != other.input_ids) == is_word).all()
        assert torch.equal(sample.labels, other.labels)
        for name, pixels in sample.media.to_hf().items():
            changed = other.media.to_hf()[name]
            assert (pixels != changed).all() if "pixel" in name else torch.equal(pixels, changed)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_words_are_never_special(family: str) -> None:
    processor = tiny_processor(family)
    words = Words.of(family_named(family), tiny_config(family, processor=processor))
    assert words.high - words.low > 256
    special = set(processor.tokenizer.all_special_ids)
    assert special
    assert not any(words.low <= i < words.high for i in special)
    assert all(words.low <= i < words.high for i in words.draw(50, torch.Generator().manual_seed(0)).tolist())


def test_a_batch_knows_what_a_collator_knows() -> None:
    kind, config = family_named("qwen2_5_vl"), tiny_config("qwen2_5_vl")
    samples = synthetic_samples(kind, config)
    batch = batch_of(samples)
    metadata, media = batch.metadata, batch.media
    assert metadata is not None
    assert metadata.lengths == tuple(batch.attention_mask.sum(1).tolist())
    assert metadata.images_per_sample == (1, 0, 2, 0)
    assert metadata.videos_per_sample == (0, 0, 0, 1)
    assert media.image_grid_thw is not None
    assert media.pixel_values is not None
    assert media.second_per_grid_ts is not None
    assert media.image_grid_thw.tolist() == [list(grid) for grid in metadata.image_grids]
    assert len(media.pixel_values) == sum(map(prod, metadata.image_grids))
    assert media.second_per_grid_ts.tolist() == list(metadata.seconds_per_grid) == [1.5]


@pytest.mark.parametrize("lengths", [(8, 16), (24, 24), (5, 11), (120, 240), (1, 1)])
def test_a_row_has_gaps_whatever_the_lengths(lengths: tuple[int, ...]) -> None:
    sample = synthetic_samples(family_named("qwen3"), tiny_config("qwen3"))[0]
    ids = [torch.arange(10, 10 + n) for n in lengths]
    samples = [type(sample)(kind="text", input_ids=x, labels=x, media=sample.media) for x in ids]
    row = pack(batch_of(samples), rule=gappy(samples))
    gaps = row.segments.padding_mask("cpu")
    assert gaps[-1] or gaps[: row.segments.stride[-1]].any()
    assert any(slot > n for slot, n in zip(row.segments.slots, row.segments.lengths, strict=True))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_receipts_are_small_and_the_same_every_time(family: str) -> None:
    processor = tiny_processor(family)
    samples, again = processed_samples(processor), processed_samples(processor)
    assert [sample.kind for sample in samples] == ["image", "text", "two images", "video"]
    assert [len(sample.image_grids) for sample in samples] == [1, 0, 2, 0]
    assert [len(sample.video_grids) for sample in samples] == [0, 0, 0, 1]
    for one, other in zip(samples, again, strict=True):
        assert torch.equal(one.input_ids, other.input_ids)
        assert torch.equal(one.labels, other.labels)
        assert (one.labels[1:] != IGNORE).any()
        assert len(one.input_ids) < 120
