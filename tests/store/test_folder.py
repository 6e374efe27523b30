"""The folder of a store: its manifest, files that are lost or damaged, and what the system does not allow."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from chats import chat
from store.stores import CAPACITY, digests, packing, store, texts

from vlmpack.collate import SkipLimit, VLMCollator
from vlmpack.errors import ConfigError
from vlmpack.plan import plan_bins
from vlmpack.store import LengthCache, PackedDataset, measure_lengths
from vlmpack.store.manifest import Manifest, differences, fingerprint
from vlmpack.testing import tiny_processor

# ---------------------------------------------------------------------- the manifest


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


# ---------------------------------------------------------------------- files that are lost

BESIDE = ("lengths.zip", "plan.zip", "left_out.jsonl")
"""Files of a store besides its rows and its manifest."""


def samples() -> list[dict]:
    """Some texts, one that is too long for a row, and one that cannot be used."""
    line_end = "a line separator \u2028 in an id"
    broken = {"messages": [{"role": "user", "content": "?"}], "id": line_end}
    return [*texts(8), chat("?", "a " * 200, id="long"), broken]


def write(folder, rows=None) -> Manifest:
    collator = packing(on_bad="skip", skip_limit=SkipLimit(max_bad_fraction=0.5))
    return store(folder, samples() if rows is None else rows, collator, oversize="drop")


@pytest.fixture
def whole(tmp_path) -> dict[str, str]:
    """Digests of the store that lies in `tmp_path`."""
    manifest = write(tmp_path)
    assert manifest.reasons == {"oversize": 1, "no_targets": 1}
    return digests(tmp_path)


@pytest.mark.parametrize(
    ("name", "kept"), [*((name, None) for name in (*BESIDE, "rows-00000")), *(("rows-00000", n) for n in (0, 50, -1))]
)
def test_a_file_that_is_gone_or_cut_is_refused_with_the_remedy(tmp_path, whole, name, kept):
    """`kept` bytes of it are left; None: the file is gone, -1: all but the last one."""
    (path,) = (path for path in tmp_path.iterdir() if path.name.startswith(name))
    data = path.read_bytes()
    path.unlink()
    if kept is not None:
        path.write_bytes(data[:kept])
    left = digests(tmp_path)
    with pytest.raises(ConfigError, match=rf"{path.name}.*; restore it, or remove the folder and pack again") as caught:
        write(tmp_path)
    assert "\n" not in str(caught.value)
    assert digests(tmp_path) == left
    path.write_bytes(data)
    write(tmp_path)
    assert digests(tmp_path) == whole


def test_a_run_that_was_killed_after_its_last_file_leaves_only_its_work_folder_to_remove(tmp_path, whole):
    (tmp_path / ".work").mkdir()
    times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir() if path.is_file()}
    write(tmp_path)
    assert digests(tmp_path) == whole and not (tmp_path / ".work").exists()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == times


# ---------------------------------------------------------------------- what the system does not allow


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "Make room and run it again: what is finished is kept"),
        (errno.EROFS, "Get the right to write there, or choose another folder"),
        (errno.EACCES, "Get the right to write there, or choose another folder"),
        (errno.EIO, "See to the disk and run it again"),
    ],
)
@pytest.mark.parametrize("name", ["replace", "mkdir", "write_text"])
def test_every_refusal_of_the_system_is_one_line_with_a_remedy(tmp_path, monkeypatch, number, remedy, name):
    original = getattr(Path, name)

    def refused(self: Path, *args: object, **settings: object) -> object:
        if "out" in self.parts:
            raise OSError(number, os.strerror(number), str(self))
        return original(self, *args, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(Path, name, refused)
        with pytest.raises(ConfigError) as caught:
            store(tmp_path / "out", texts())
    assert "\n" not in str(caught.value) and os.strerror(number) in str(caught.value)
    assert remedy in str(caught.value) or "name another one" in str(caught.value) or "see to" in str(caught.value)
    store(tmp_path / "out", texts())
    store(tmp_path / "whole", texts())
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_what_a_data_set_raises_of_its_own_is_no_error_of_the_folder(tmp_path):
    class Failing(list):
        def __getitem__(self, at):  # pyright: ignore
            if at == 3:
                raise PermissionError(errno.EACCES, "of the data set")
            return super().__getitem__(at)

    with pytest.raises(PermissionError, match="of the data set"):
        store(tmp_path, Failing(texts()))


def test_a_file_in_the_way_is_named_wherever_a_file_is_written_or_read(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    for attempt in (
        lambda: store(blocked, texts()),
        lambda: store(blocked / "out", texts()),
        lambda: plan_bins([1, 2], 4).save(blocked / "plan.zip"),
        lambda: measure_lengths(texts(), packing(), cache=blocked / "lengths"),
        lambda: LengthCache(blocked / "deep" / "lengths"),
        lambda: PackedDataset(blocked),
        lambda: Manifest.load(blocked / "out"),
    ):
        with pytest.raises(ConfigError, match="file"):
            attempt()
    assert blocked.read_text() == ""
