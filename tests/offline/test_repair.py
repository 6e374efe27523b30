"""A finished store that lost files: the same call writes them again, with the same bytes, or says why it cannot."""

from __future__ import annotations

import json

import pytest
from chats import chat
from offline.stores import digests, packing, store, texts

from vlmpack.collate import SkipLimit
from vlmpack.errors import ConfigError
from vlmpack.offline import Manifest
from vlmpack.offline.repair import lost_files
from vlmpack.plan import Plan, plan_bins

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
    assert lost_files(tmp_path, manifest) == []
    return digests(tmp_path)


@pytest.mark.parametrize("kept", [None, 0, 50, -1])
@pytest.mark.parametrize("names", [*[(name,) for name in BESIDE], BESIDE, ("plan.zip", "rows-00000")])
def test_files_that_are_gone_or_cut_are_written_again(tmp_path, whole, names, kept):
    """`kept` bytes of each are left; None: the file is gone, -1: all but the last one."""
    for path in list(tmp_path.iterdir()):
        if path.name.startswith(names):
            data = path.read_bytes()
            path.unlink()
            if kept is not None:
                path.write_bytes(data[:kept])
    assert digests(tmp_path) != whole
    write(tmp_path)
    assert digests(tmp_path) == whole


def test_the_plan_of_other_rows_is_not_taken_for_the_stores(tmp_path, whole):
    plan_bins([5, 3], 10).save(tmp_path / "plan.zip")
    write(tmp_path)
    assert digests(tmp_path) == whole


def test_a_list_that_misses_a_sample_is_written_again(tmp_path, whole):
    path = tmp_path / "left_out.jsonl"
    first, second = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    assert json.loads(first)["sample_id"] == "long"
    path.write_text(second + "\n", encoding="utf-8")
    write(tmp_path)
    assert digests(tmp_path) == whole


def test_nothing_else_is_touched(tmp_path, whole):
    times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    (tmp_path / "plan.zip").unlink()
    write(tmp_path)
    assert {path.name for path, time in times.items() if path.stat().st_mtime_ns != time} == {"plan.zip"}
    assert Plan.load(tmp_path / "plan.zip").digest == Manifest.load(tmp_path).plan


@pytest.mark.parametrize("name", ["lengths.zip", "plan.zip"])
@pytest.mark.parametrize("length", [3, 9])
def test_a_changed_data_set_makes_no_file_of_the_old_one(tmp_path, name, length):
    """Whether the sample that was changed kept its length or not."""
    before = [chat(f"{n}?", "because " * (1 + n % 5), id=n) for n in range(30)]
    write(tmp_path, before)
    whole = digests(tmp_path)
    changed = [*before[:2], chat("2?", "for my " + "because " * (length - 2), id=2), *before[3:]]
    (tmp_path / name).unlink()
    with pytest.raises(ConfigError, match=r"that was lost cannot be made again|holds other samples than the data set"):
        write(tmp_path, changed)
    left = {file: digest for file, digest in digests(tmp_path).items() if not file.startswith(".work")}
    assert left.items() <= whole.items()
    write(tmp_path, before)
    assert digests(tmp_path) == whole
