"""The folder of a store: its lock, links that lead elsewhere, and what the system does not allow."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path

import pytest
from store.stores import digests, packing, store, texts
from typer.testing import CliRunner

from vlmpack.cli.app import app
from vlmpack.errors import ConfigError
from vlmpack.plan import plan_bins
from vlmpack.store import LengthCache, PackedDataset, measure_lengths
from vlmpack.store.folder import WorkFolder, locked
from vlmpack.store.manifest import Manifest


@pytest.fixture
def others(tmp_path) -> Path:
    """A folder with a file of somebody else."""
    folder = tmp_path / "others"
    folder.mkdir()
    (folder / "thesis.tex").write_text("mine")
    return folder


def linked_lock(out: Path, others: Path) -> None:
    (out / ".work").mkdir(parents=True)
    (out / ".work" / "lock").symlink_to(others / "thesis.tex")


def linked_folder(out: Path, others: Path) -> None:
    out.mkdir()
    (out / ".work").symlink_to(others)


def linked_files(out: Path, others: Path) -> None:
    (out / ".work").mkdir(parents=True)
    (out / ".work" / "unfinished").symlink_to(others)


@pytest.mark.parametrize("link", [linked_lock, linked_folder, linked_files])
def test_no_link_is_followed_to_other_peoples_files(tmp_path, others, link):
    link(tmp_path / "out", others)
    with (
        pytest.raises(ConfigError, match=r"is a symbolic link, and may lead to .* remove it"),
        locked(WorkFolder(out=tmp_path / "out")),
    ):
        pass
    assert [path.name for path in others.iterdir()] == ["thesis.tex"]
    assert (others / "thesis.tex").read_text() == "mine"


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_lock_that_is_no_file_is_refused(tmp_path, make):
    (tmp_path / ".work").mkdir()
    make(tmp_path / ".work" / "lock")
    with (
        pytest.raises(ConfigError, match=r"lock (is no regular file; remove it|cannot be written)"),
        locked(WorkFolder(out=tmp_path)),
    ):
        pass


def test_the_content_of_a_lock_is_left_alone(tmp_path):
    (tmp_path / ".work").mkdir()
    (tmp_path / ".work" / "lock").write_text("a note")
    with locked(WorkFolder(out=tmp_path)):
        assert (tmp_path / ".work" / "lock").read_text() == "a note"


def test_two_threads_do_not_write_the_same_store(tmp_path):
    """The system's locks are those of a process."""
    told: list[str] = []

    def other() -> None:
        try:
            with locked(WorkFolder(out=tmp_path)):
                told.append("both")
        except ConfigError as error:
            told.append(str(error))

    with locked(WorkFolder(out=tmp_path)):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        child = os.fork()
        if not child:  # after the thread's attempt the system still holds the lock for this process
            lock = os.open(tmp_path / ".work" / "lock", os.O_RDWR)
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert "another process is writing" in told[0] and len(told) == 1
    with locked(WorkFolder(out=tmp_path)):  # free again
        pass


def test_a_lock_that_was_removed_meanwhile_is_none(tmp_path, monkeypatch):
    """Whoever held it has finished, and somebody else may have made another one."""
    lockf = fcntl.lockf

    def late(*args: object) -> None:
        (tmp_path / ".work" / "lock").unlink()
        lockf(*args)

    monkeypatch.setattr(fcntl, "lockf", late)
    with pytest.raises(ConfigError, match="another process is writing"), locked(WorkFolder(out=tmp_path)):
        pass


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
@pytest.mark.parametrize("name", ["replace", "mkdir", "write_text", "is_symlink"])
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


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "[" * 5000, '{"settings": 1}'])
def test_damaged_notes_of_an_interrupted_run_are_refused_or_made_anew(tmp_path, content):
    with locked(WorkFolder(out=tmp_path)):
        pass
    store(tmp_path / "whole", texts())
    (tmp_path / ".work" / "settings.json").write_text(content)
    (tmp_path / ".work" / "rows-00000-of-00003.parquet.json").write_text(content)
    try:
        store(tmp_path, texts())
    except ConfigError as error:
        assert "is damaged" in str(error) or "is no store and not empty" in str(error)


@pytest.mark.parametrize("verb", [["analyze"], ["pack", "--processor", "tiny", "--capacity", "64"]])
def test_the_command_says_in_one_line_that_a_folder_cannot_be_read(tmp_path, verb, monkeypatch):
    store(tmp_path / "out", texts())
    read_bytes = Path.read_bytes

    def refused(self: Path) -> bytes:
        if self.name == "manifest.json":
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return read_bytes(self)

    monkeypatch.setattr(Path, "read_bytes", refused)
    source = [str(tmp_path / "out")] if verb == ["analyze"] else ["synthetic", str(tmp_path / "out"), "--num", "2"]
    result = CliRunner().invoke(app, [verb[0], *source, *verb[1:]])
    assert result.exit_code == 2
    assert "manifest.json cannot be read: " in result.output and "get the right to read it" in result.output
