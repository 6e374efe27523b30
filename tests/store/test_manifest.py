"""The manifest: read back as written, or refused with what is wrong."""

from __future__ import annotations

import json

import pytest
from store.stores import CAPACITY, store, texts

from vlmpack.collate import VLMCollator
from vlmpack.errors import ConfigError
from vlmpack.plan import plan_bins
from vlmpack.store import PackedDataset
from vlmpack.store.manifest import Manifest, differences, fingerprint
from vlmpack.testing import tiny_processor


@pytest.fixture
def kept(tmp_path):
    """A small store."""
    store(tmp_path, texts(4), seed=0)
    return tmp_path


def change(folder, **entries):
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def test_it_says_how_the_rows_were_made(kept):
    manifest = Manifest.load(kept)
    assert manifest.capacity == manifest.settings["capacity"] == CAPACITY
    assert manifest.settings["collator"]["train_on"] == "assistant"
    assert manifest.settings["data"]["samples"] == manifest.counts.total == 4
    assert manifest.processor["images"]["patch_size"] == 16
    assert manifest.bytes == sum((kept / shard.file).stat().st_size for shard in manifest.shards)


@pytest.mark.filterwarnings("ignore:Passing .min_pixels. and .max_pixels.:FutureWarning")
def test_bounds_that_are_set_on_the_processor_later_are_another_processor():
    collator = VLMCollator(tiny_processor())
    before = fingerprint(collator)
    collator.processor.image_processor.min_pixels, collator.processor.image_processor.max_pixels = 9216, 36_864
    assert [line.split(" ")[0] for line in differences(before, fingerprint(collator))] == [
        "images.max_pixels",
        "images.min_pixels",
    ]


def test_it_names_no_path_and_no_time(kept):
    """So that the same call gives the same bytes wherever and whenever."""
    text = (kept / "manifest.json").read_text()
    assert str(kept.parent) not in text
    assert not {"time", "date", "host"} & set(json.loads(text))


def test_a_folder_without_one_is_no_store(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no manifest.json.*`vlmpack pack`"):
        PackedDataset(tmp_path)


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"version": 1}, "is vlmpack.rows of version 1, and this vlmpack reads vlmpack.rows of version 4; pack again"),
        ({"format": "vlmpack.plan"}, "is vlmpack.plan of version 4"),
        ({"counts": {"rows": 1}}, "is damaged .*its digest is another one"),
    ],
)
def test_one_that_cannot_be_read_is_named(kept, entries, told):
    change(kept, **entries)
    with pytest.raises(ConfigError, match=told):
        Manifest.load(kept)


def test_a_plan_of_other_rows_is_refused(kept):
    plan_bins([5, 3], 10).save(kept / "plan.zip")
    with pytest.raises(ConfigError, match=r"plan.zip is the plan of other rows; restore it, or remove the folder"):
        len(PackedDataset(kept).plan)
