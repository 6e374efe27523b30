"""The folder of a store: its lock, links that lead elsewhere, and what the system does not allow."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from store.stores import digests, packing, store, texts
from typer.testing import CliRunner

from vlmpack.cli.app import app
from vlmpack.errors import ConfigError
from vlmpack.plan import plan_bins
from vlmpack.store import LengthCache, PackedDataset, measure_lengths
from vlmpack.store.manifest import Manifest

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


@pytest.mark.parametrize("verb", [["show"], ["pack", "--processor", "tiny", "--capacity", "64"]])
def test_the_command_says_in_one_line_that_a_folder_cannot_be_read(tmp_path, verb, monkeypatch):
    store(tmp_path / "out", texts())
    read_bytes = Path.read_bytes

    def refused(self: Path) -> bytes:
        if self.name == "manifest.json":
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return read_bytes(self)

    monkeypatch.setattr(Path, "read_bytes", refused)
    source = [str(tmp_path / "out")] if verb == ["show"] else ["synthetic", str(tmp_path / "out"), "--num", "2"]
    result = CliRunner().invoke(app, [verb[0], *source, *verb[1:]])
    assert result.exit_code == 2
    assert "manifest.json cannot be read: " in result.output and "get the right to read it" in result.output
