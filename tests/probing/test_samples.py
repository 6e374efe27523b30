"""The samples of a probe: every kind, the same every time, and wholly another one when perturbed."""

from __future__ import annotations

import pytest
import torch

from vlmpack.families import family_named
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import IGNORE, pack
from vlmpack.probing.forward_passes import rule_with_gaps
from vlmpack.testing import tiny_config, tiny_processor
from vlmpack.testing.samples import (
    grids_of,
    kind_of,
    num_targets,
    padded,
    perturbed,
    processed_samples,
    synthetic_samples,
    with_adversarial_lengths,
    word_ids,
)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_kind_is_there_and_has_its_tokens(family: str) -> None:
    kind, config = family_named(family), tiny_config(family)
    samples = synthetic_samples(config)
    kinds = ["image", "text", "2 images", "video"] if kind.has_vision else ["text"] * 3
    assert [kind_of(sample) for sample in samples] == kinds
    lengths = [len(sample["input_ids"]) for sample in samples]
    assert len(set(lengths)) == len(lengths), "two samples of one length could be taken for each other"
    for sample in samples:
        assert sample["labels"][0] == sample["input_ids"][0], "the first token must be labelled, to see it masked"
        assert 0 < num_targets(sample) < len(sample["input_ids"]) - 1
        types = kind.media_types(sample["input_ids"], config)
        for modality, name in ((1, "image"), (2, "video")):
            assert int((types == modality).sum()) == kind.media_tokens(grids_of(sample, name), config)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3"])
def test_kernels_that_choose_by_number_and_by_length_are_reached(family: str) -> None:
    config = tiny_config(family)
    lengths = [len(s["input_ids"]) for s in with_adversarial_lengths(synthetic_samples(config), config)]
    assert len(lengths) > 4
    assert max(lengths) > 128
    assert len(set(lengths)) == len(lengths) - 1


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_perturbing_changes_every_word_and_pixel_and_nothing_else(family: str) -> None:
    config = tiny_config(family)
    words = word_ids(config)
    for sample in synthetic_samples(config):
        other = perturbed(sample, config)
        is_word = (sample["input_ids"] >= words.start) & (sample["input_ids"] < words.stop)
        assert is_word.any()
        assert other.keys() == sample.keys()
        for name, x in sample.items():
            changed = x != other[name]
            expected = is_word if name == "input_ids" else torch.full_like(changed, name.startswith("pixel"))
            assert torch.equal(changed, expected), name


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_words_are_never_special(family: str) -> None:
    processor = tiny_processor(family)
    words = word_ids(tiny_config(family, processor=processor))
    assert len(words) > 256
    special = set(processor.tokenizer.all_special_ids)
    assert special
    assert not any(i in words for i in special)


@pytest.mark.parametrize("lengths", [(8, 16), (24, 24), (5, 11), (120, 240), (1, 1)])
def test_a_row_has_gaps_whatever_the_lengths(lengths: tuple[int, ...]) -> None:
    ids = [torch.arange(10, 10 + n) for n in lengths]
    samples = [{"input_ids": x, "labels": x} for x in ids]
    row = pack(padded(samples), rule=rule_with_gaps(samples))
    gaps = row.segments.padding_mask("cpu")
    assert gaps[-1] or gaps[: row.segments.stride[-1]].any()
    assert any(slot > n for slot, n in zip(row.segments.slots, row.segments.lengths, strict=True))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_receipts_are_small_and_the_same_every_time(family: str) -> None:
    processor = tiny_processor(family)
    samples, again = processed_samples(processor), processed_samples(processor)
    assert [kind_of(sample) for sample in samples] == ["image", "text", "2 images", "video"]
    for sample, other in zip(samples, again, strict=True):
        assert torch.equal(sample["input_ids"], other["input_ids"])
        assert torch.equal(sample["labels"], other["labels"])
        assert (sample["labels"][1:] != IGNORE).any()
        assert len(sample["input_ids"]) < 120
