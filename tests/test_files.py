"""A file that is written atomically is there whole or not at all, and an error names it with the remedy."""

from __future__ import annotations

import errno
import os

import pytest

from vlmpack.errors import ConfigError
from vlmpack.files import atomic_file, left_behind_in, unreadable, write_text, writing


def test_a_file_has_the_permissions_of_any_other(tmp_path):
    (tmp_path / "plain.txt").write_text("a")
    write_text(tmp_path / "atomic.txt", "ä")
    modes = [(tmp_path / name).stat().st_mode for name in ("plain.txt", "atomic.txt")]
    assert modes[0] == modes[1]
    assert (tmp_path / "atomic.txt").read_text(encoding="utf-8") == "ä"


def test_a_block_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(KeyError), atomic_file(path) as temporary:
        temporary.write_text("half")
        raise KeyError("of the block")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_gets_its_name_when_all_of_it_is_written(tmp_path):
    path = tmp_path / "new" / "a.txt"
    with atomic_file(path) as temporary:
        temporary.write_text("all of it")
        assert left_behind_in(tmp_path / "new") == [temporary]  # what a process that is killed here would leave
    assert list(path.parent.iterdir()) == [path]
    assert path.read_text() == "all of it"


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "Make room and run it again"),
        (errno.EROFS, "Get the right to write there, or choose another folder"),
        (errno.EISDIR, "Choose another name or folder"),
        (errno.EIO, "See to the disk and run it again"),
    ],
)
def test_the_system_refuses(number, remedy, tmp_path):
    match = rf"a.txt cannot be written: .*{os.strerror(number)}\. {remedy}"
    with pytest.raises(ConfigError, match=match), writing(tmp_path / "a.txt"):
        raise OSError(number, os.strerror(number))


def test_an_error_of_what_the_block_reads_is_not_taken_for_one_of_the_file(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_file(tmp_path / "a.txt"):
        (tmp_path / "missing").read_text()
    with pytest.raises(ConfigError, match=r"a.txt cannot be written"), atomic_file(tmp_path / "a.txt"):
        raise OSError(errno.ENOSPC, "full")
    assert not any(tmp_path.iterdir())


def test_a_file_stands_where_the_folder_should_be(tmp_path):
    (tmp_path / "folder").write_text("")
    with pytest.raises(ConfigError, match="Choose another name or folder"):
        write_text(tmp_path / "folder" / "a.txt", "a")


def test_a_file_that_cannot_be_read_is_named():
    assert "a.txt cannot be read: gone; restore it" in str(unreadable("a.txt", FileNotFoundError("gone")))
    assert "get the right to read it" in str(unreadable("a.txt", PermissionError("no")))
