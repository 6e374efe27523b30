"""The collator's prefix trees: equal to `share` of the plain row, each image cut and joined once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from chats import BEYOND, chat, fast_and_slow, of_family, picture, processor_of, tokenized
from fixtures.processors import tiny_model, tiny_processor
from stores import encoded

from vlmpack.collate import SharePrefixes, VLMCollator
from vlmpack.collate.media import MediaReader
from vlmpack.errors import ConfigError, SampleError
from vlmpack.families import family_named
from vlmpack.families.media import media_reader
from vlmpack.layout import PackedRow, SlotRule, share, unshare

LOW = SharePrefixes(min_shared=8)
TURNS = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{}<|im_end|>\n<|im_start|>assistant\nx<|im_end|>\n"
)


def collator(**settings) -> VLMCollator:
    return VLMCollator(processor_of(), **{"layout": "packed", "share_prefixes": LOW, **settings})


def questions(*sources) -> list[dict]:
    return [chat(f"What is in line {i}?", f"Total {i}", source) for i, source in enumerate(sources)]


@pytest.fixture
def cuts(monkeypatch) -> list:
    """The images that are loaded and cut."""
    refs, cut = [], MediaReader._image
    monkeypatch.setattr(MediaReader, "_image", lambda reader, ref: refs.append(ref) or cut(reader, ref))
    return refs


def assert_equal_rows(row: PackedRow, other: PackedRow) -> None:
    assert (row.tree, row.metadata) == (other.tree, other.metadata)
    for name, tensor in {**row.media.to_hf(), "ids": row.input_ids, "labels": row.shift_labels}.items():
        theirs = {**other.media.to_hf(), "ids": other.input_ids, "labels": other.shift_labels}[name]
        assert torch.equal(tensor, theirs)


def mixed() -> list[dict]:
    """One image in three forms, a twin of another grid, a text, and two films of the same frames."""
    image, other = picture(), picture(seed=1)
    film = {"type": "video", "video": [picture(64, 64, seed=i) for i in range(4)]}
    films = [chat(question, "There") for question in ("Who?", "Where?")]
    for sample in films:
        sample["messages"][0]["content"].insert(0, film)
    return [*questions(image, encoded(image), {"bytes": encoded(image), "path": None}, other), chat("Text"), *films]


def test_the_row_is_the_shared_plain_row():
    row = collator().collate(mixed())
    plain = collator(share_prefixes=False).collate(mixed())
    assert plain.tree is None
    assert_equal_rows(row, share(plain, min_shared=8))
    assert_equal_rows(unshare(row), unshare(share(plain, min_shared=8)))
    assert [at.tolist() for at in row.metadata.media.chosen(row.tree).values()] == [[0, 3], [0], []]
    assert torch.equal(unshare(row).media.pixel_values, plain.media.pixel_values)


@pytest.mark.parametrize("family", fast_and_slow(BEYOND, ["idefics3", "llava_onevision"]))
def test_so_it_is_of_every_family(family):
    first, twin, other = picture(120, 90), picture(120, 90, seed=1), picture(257, 140, seed=2)
    pairs = ("a", twin), ("a", other), ("b", twin)
    samples = [
        *(of_family(family, "What is the total?", answer, first) for answer in ("75", "none")),
        *(of_family(family, "Who is it?", "a", image) for image in (first, twin)),
        *(of_family(family, "Which?", answer, first, image) for answer, image in pairs),
    ]
    processor = tiny_processor(family)
    config = tiny_model(family, processor=processor).config
    row, plain = (VLMCollator(processor, layout="packed", share_prefixes=how).collate(samples) for how in (LOW, False))
    read_media = media_reader(family_named(family), config)
    assert_equal_rows(row, share(plain, min_shared=8, read_media=read_media))
    assert len(row.metadata.media.in_tree(row.tree).images) < 10
    assert row.tree.num_tokens < plain.segments.num_tokens
    for name, tensor in plain.media.to_hf().items():
        assert torch.equal(unshare(row, read_media=read_media).media.to_hf()[name], tensor)


@pytest.mark.parametrize("shared", [LOW, False])
def test_an_image_is_cut_once_a_batch_whatever_holds_it(cuts, tmp_path, shared):
    image, path = picture(), tmp_path / "a.png"
    path.write_bytes(encoded(image))
    sources = [path, str(path), {"bytes": None, "path": str(path)}, encoded(image), {"bytes": encoded(image)}, image]
    batch = collator(share_prefixes=shared).collate(questions(*sources, picture(seed=1), image))
    assert len(cuts) == 4  # a path, bytes, a picture, another picture
    assert batch.media.image_grid_thw.shape[0] == (2 if shared else 8)
    assert Path(cuts[0].source) == path


def test_samples_that_were_tokenized_before_are_shared_too():
    samples = [tokenized("qwen3_vl", TURNS.format(word), picture()) for word in ("Who?", "Where?")]
    row = collator().collate(samples)
    assert row.metadata.media.in_tree(row.tree).images == row.metadata.media.images[:1]
    labels = samples[1]["input_ids"].clone()
    labels[-2] += 1
    with pytest.raises(SampleError, match=r"sample 1: token \d+ has the label \d+ and the id"):
        collator().collate([samples[0], {**samples[1], "labels": labels}])
    skipping = collator(on_bad="skip")
    assert skipping.collate([samples[0], {**samples[1], "labels": labels}]).segments.num_samples == 1
    assert skipping.skip_log.reasons == {"label_not_its_id": 1}
    assert collator(share_prefixes=False).collate([samples[0], {**samples[1], "labels": labels}]).tree is None


def test_every_sample_of_an_image_that_is_not_finite_is_refused():
    samples = [tokenized("qwen3_vl", TURNS.format(word), picture()) for word in ("Who?", "Where?", "Why?")]
    broken = samples[0]["pixel_values"].clone()
    broken[0, 0] = np.nan
    samples[0]["pixel_values"] = samples[1]["pixel_values"] = broken
    maker = collator(on_bad="skip")
    assert maker.collate(samples).metadata.sample_ids == (2,)
    assert maker.skip_log.reasons == {"pixels_not_finite": 2}


def test_a_row_multiple_pads_only_rows_without_a_tree():
    samples = [tokenized("qwen3_vl", TURNS.format(word), picture()) for word in ("Who?", "Where?", "Why?")]
    maker = collator(slots=SlotRule(row_multiple=64))
    shared, alone = maker.collate(samples), maker.collate(samples[:1])
    assert shared.tree is not None
    assert shared.input_ids.shape[1] == shared.segments.real[-1]
    assert shared.input_ids.shape[1] % 64
    assert (alone.tree, alone.input_ids.shape[1] % 64) == (None, 0)
    assert torch.equal(alone.media.pixel_values, collator().collate(samples[:1]).media.pixel_values)


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"layout": "padded"}, "choose layout='packed'"),
        ({"slots": SlotRule(multiple=8)}, "needs a row without padding.*leave one of them out"),
        ({"slots": SlotRule(pad_to=512)}, "needs a row without padding"),
        ({"share_prefixes": 64}, r"share_prefixes has to be a SharePrefixes, such as SharePrefixes\(min_shared=64\)"),
    ],
)
def test_settings_without_a_place_for_a_tree_are_refused(settings, fault):
    with pytest.raises(ConfigError, match=fault):
        collator(**settings)
    with pytest.raises(ConfigError, match="min_shared"):
        SharePrefixes(min_shared=0)
