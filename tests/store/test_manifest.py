"""The manifest: read back as written, or refused with what is wrong."""

from __future__ import annotations

import hashlib
import json

import pytest
from store.stores import CAPACITY, store, texts

from vlmpack.collate import VLMCollator
from vlmpack.errors import ConfigError
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


def test_one_that_was_changed_since_is_refused(kept):
    change(kept, fill_ratio=0.5)
    with pytest.raises(ConfigError, match="its digest is another one"):
        Manifest.load(kept)


def test_a_folder_without_one_is_no_store(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no manifest.json.*`vlmpack pack`"):
        PackedDataset(tmp_path)


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"version": 1}, "is vlmpack.rows of version 1, and this vlmpack reads vlmpack.rows of version 3; pack again"),
        ({"format": "vlmpack.plan"}, "is vlmpack.plan of version 3"),
        ({"counts": {"rows": 1}}, "is damaged .TypeError"),
        ({"shards": [{}]}, "is damaged .TypeError"),
    ],
)
def test_one_that_cannot_be_read_is_named(kept, entries, told):
    change(kept, **entries)
    with pytest.raises(ConfigError, match=told):
        Manifest.load(kept)


def test_text_that_is_no_json_is_named(kept):
    (kept / "manifest.json").write_text("{")
    with pytest.raises(ConfigError, match=r"manifest.json is damaged .JSONDecodeError"):
        Manifest.load(kept)


def signed(found):
    """A changed manifest with the digest that belongs to it."""
    content = {name: value for name, value in found.items() if name != "digest"}
    return {**content, "digest": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}


@pytest.mark.parametrize("is_signed", [False, True])
@pytest.mark.parametrize("edit", ["rows", "order", "outside", "twice"])
def test_files_that_are_counted_ordered_or_named_otherwise_are_refused(tmp_path, edit, is_signed):
    store(tmp_path, texts(12))
    found = json.loads((tmp_path / "manifest.json").read_text())
    shards = found["shards"]
    assert len(shards) > 1
    if edit == "rows":
        found["counts"]["rows"] -= 1
    elif edit == "order":
        shards[0], shards[1] = shards[1], shards[0]
    elif edit == "outside":
        shards[0]["file"] = f"../{tmp_path.name}/{shards[0]['file']}"
    else:
        shards[0] = shards[1]
    (tmp_path / "manifest.json").write_text(json.dumps(signed(found) if is_signed else found))
    with pytest.raises(ConfigError, match=r"manifest.json is damaged .*; restore it, or remove the folder and pack"):
        PackedDataset(tmp_path)


def test_another_file_of_the_same_size_is_seen_when_it_is_read(tmp_path):
    store(tmp_path, texts(4), seed=0)
    path = tmp_path / Manifest.load(tmp_path).shards[0].file
    data = bytearray(path.read_bytes())
    data[data.index(b"vlmpack.checksums") + 30] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"cannot be read: its footer is not the one that manifest.json lists"):
        PackedDataset(tmp_path).measured(0)
