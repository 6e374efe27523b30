"""Images by a family's own processor: measured as they are made, compared with the whole processor, refused by name."""

import re

import pytest
import torch
from chats import BEYOND, SHOWN, chat, fast_and_slow, needs, of_family, picture, says, text, user
from fixtures.processors import tiny_processor
from stores import encoded

from vlmpack.collate import VLMCollator
from vlmpack.collate.media import TRIALS
from vlmpack.errors import ConfigError, FamilyError, SampleError

COUNTED = {"exaone4_5", "gemma3", "gemma4", "internvl", "llava", "llava_next", "llava_onevision", "glm4v", "paligemma"}
COUNTED |= {"glm4v_moe", "glm46v", "glm_ocr", "ernie4_5_vl_moe", "gemma4_unified", "kimi_k25", "lighton_ocr", "lfm3_vl"}
"""Families whose processors count an image's tokens as they write them: that is relied on, and nothing is cut."""
SIZES = ((40, 30), (61, 143), (400, 90), (90, 400), (257, 256), (33, 31))
"""Widths and heights."""


def feature_of(family, *images, answer="75,000"):
    return of_family(family, "Total?", answer, *images)


def media_of(batch):
    return batch.media.to_hf()


def collator_of(family, **settings):
    return VLMCollator(tiny_processor(family), **settings)


@pytest.mark.parametrize("family", fast_and_slow(BEYOND, SHOWN))
def test_samples_are_measured_as_they_are_collated(family):
    collator = collator_of(family, layout="packed")
    features = [feature_of(family, encoded(picture(*size))) for size in SIZES]
    features.append(feature_of(family, *(encoded(picture(*size)) for size in SIZES[:3])))
    measured = [collator.measure(feature) for feature in features]
    row = collator.collate(features)
    assert [sample.num_tokens for sample in measured] == list(row.segments.lengths)
    assert all(image.pixels is None for sample in measured for image in sample.images)
    decoded = collator.decode(measured)
    assert torch.equal(decoded.input_ids, row.input_ids)
    assert torch.equal(decoded.shift_labels, row.shift_labels)
    assert sorted(media_of(decoded)) == sorted(media_of(row))
    assert all(torch.equal(media_of(decoded)[name], tensor) for name, tensor in media_of(row).items())
    assert decoded.metadata == row.metadata
    assert (collator.encoder.media._counted is not None) == (family in COUNTED)


def test_a_count_that_the_trials_contradict_is_not_relied_on(monkeypatch):
    processor = tiny_processor("internvl")
    counts = type(processor)._get_num_multimodal_tokens

    def one_more_when_wide(self, image_sizes):
        counted = counts(self, image_sizes=image_sizes)
        ((_, width),) = image_sizes
        return {"num_image_tokens": [n + (width > 500) for n in counted["num_image_tokens"]]}

    monkeypatch.setattr(type(processor), "_get_num_multimodal_tokens", one_more_when_wide)
    collator = VLMCollator(processor)
    assert collator.encoder.media._counted is None
    wide = chat("?", "5", encoded(picture(900, 100)))
    assert collator.measure(wide).num_tokens == collator.collate([wide]).metadata.lengths[0]
    assert any(width > 500 for _, width in TRIALS)


@needs("gemma3")
def test_crops_of_gemma_3_are_written_and_measured_as_its_processor_writes_them():
    processor = tiny_processor("gemma3")
    processor.images_kwargs = {**processor.images_kwargs, "do_pan_and_scan": True}
    collator = VLMCollator(processor)
    wide = chat("?", "5", encoded(picture(1100, 300)))
    sample = collator.measure(wide)
    assert sample.images[0].runs == (9,) * 5
    batch = collator([wide])
    assert len(batch["pixel_values"]) == 5
    assert "here are some crops to help you see better" in processor.tokenizer.decode(batch["input_ids"][0])
    assert batch["input_ids"].shape[1] == sample.num_tokens


# ---------------------------------------------------------------------- compared with the whole processor


def test_a_processor_that_writes_images_otherwise_as_a_whole_is_refused(monkeypatch):
    processor = tiny_processor("internvl")
    whole = type(processor).__call__

    def other(self, *args, **options):
        out = whole(self, *args, **options)
        return {**out, "pixel_values": out["pixel_values"].flip(0), "image_flags": torch.ones(1)}

    monkeypatch.setattr(type(processor), "__call__", other)
    with pytest.raises(FamilyError) as caught:
        VLMCollator(processor)([chat("?", "5", picture())])
    assert "makes image_flags, which is not in its family's media; other pixel_values of two" in str(caught.value)
    VLMCollator(processor)([chat("?", "5")])  # of a text nothing is asked


# ---------------------------------------------------------------------- refused


def refusal(feature, *, family="internvl", **settings):
    with pytest.raises((SampleError, ConfigError)) as caught:
        collator_of(family, **settings)([feature])
    return caught.value


REFUSED = {
    "no_video": (
        {"messages": [user([{"type": "video", "video": [picture(), picture()]}]), says("A cat")]},
        "video 0: videos are not read for a LlavaProcessor, which takes none; give frames as images",
    ),
    "vision_key": (
        chat("?", "A cat", {"image": picture(), "max_pixels": 4096}),
        "image 0: it has max_pixels beside it; the LlavaProcessor sizes images alike: leave them out",
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_its_processor_does_not_read_is_refused_by_name(reason):
    feature, seen = REFUSED[reason]
    error = refusal(feature, family="llava")
    assert error.reason == reason
    assert seen in str(error)


def test_a_tokenized_sample_with_pixels_is_refused():
    feature = {"input_ids": [5, 6, 7], "labels": [5, 6, 7], "pixel_values": torch.zeros(1, 3, 28, 28)}
    assert "but no grids of its images; give messages and images" in str(refusal(feature))


# ---------------------------------------------------------------------- skipping


# ---------------------------------------------------------------------- too long samples


@pytest.mark.parametrize("family", fast_and_slow(["internvl", "idefics3", "kimi_k25"], ["internvl"]))
def test_a_sample_that_is_too_long_is_cut_at_the_limit_or_before_an_image(family):
    processor = tiny_processor(family)
    parts = [{"type": "text", "text": "One"}, {"type": "image"}, {"type": "text", "text": "and more"}]
    turns = [user(parts), says("A receipt")]
    feature = {"messages": turns * 2, "images": [picture(90, 61), picture(90, 61)]}
    whole = VLMCollator(processor)([feature])["input_ids"][0].tolist()
    first = VLMCollator(processor)([{"messages": turns, "images": [picture(90, 61)]}])["input_ids"].shape[1]
    text = processor.tokenizer.decode(whole)
    images = [match.span() for match in re.finditer(r"One(.*?)and more", text, re.S)]
    lengths = set()
    for max_length in range(first, len(whole), 4):
        collator = VLMCollator(processor, max_length=max_length, overlength="truncate")
        batch = collator.collate([feature])
        ids = batch.input_ids[0].tolist()
        assert ids == whole[: len(ids)]
        place = len(processor.tokenizer.decode(whole[:max_length]))
        assert len(ids) == max_length or any(start < place < stop for start, stop in images)
        tokens = [image.tokens for image in batch.metadata.media.images]
        assert sum(tokens) == ids.count(processor.image_token_ids[0])
        lengths.add((len(ids), len(tokens)))
    assert min(lengths) == (first, 1)
    assert {images for _, images in lengths} == {1, 2}


@needs("llava_onevision")
def test_a_sample_whose_images_are_cut_together_keeps_them_all():
    parts = [{"type": "image"}, text("One")]
    turns = [user(parts), says("A receipt")] * 2
    feature = {"messages": turns, "images": [picture(), picture()]}
    collator = collator_of("llava_onevision", max_length=40, overlength="truncate", on_bad="skip")
    collator.collate([feature])
    assert dict(collator.skip_log.reasons) == {"truncated_away": 1}
