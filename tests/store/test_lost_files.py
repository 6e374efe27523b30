"""A finished store that lost files, or parts of them: the same call names the file and the remedy."""

from __future__ import annotations

import pytest
from chats import chat
from store.stores import digests, packing, store, texts

from vlmpack.collate import SkipLimit
from vlmpack.errors import ConfigError
from vlmpack.store.manifest import Manifest

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
