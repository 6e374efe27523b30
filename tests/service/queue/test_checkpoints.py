"""The state folder: locked, recognized, and its folders whole or not there."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from service.clients import forward_backward, optim_step, save, save_for_sampler, served
from service.fakes import FakeBase, FakeEngine

from vlmpack.errors import ConfigError, RequestError
from vlmpack.service.queue.checkpoints import StateFolder, final_name
from vlmpack.service.queue.journal import parse_path


def refusal(state: Path) -> str:
    """Why a state folder cannot be served."""
    with pytest.raises(ConfigError) as error:
        StateFolder(state, base_model=FakeBase().name)
    return str(error.value)


def test_a_path_has_three_parts_and_gives_them_back() -> None:
    for text in ("tinker://s1:train:0/weights/a.b-c_9", "tinker://s1:train:0/sampler_weights/A"):
        assert "tinker://" + "/".join(parse_path(text)) == text


OTHERS = ("", "tinker://", "tinker://a", "tinker://a/weights", "tinker://a/weights/", "tinker://a/weights/b/c")
OTHERS += ("tinker://a/other/b", "tinker:///weights/b", "http://a/weights/b", "tinker://a/weights/..", "/a/weights/b")


@pytest.mark.parametrize("text", [*OTHERS, "tinker://a/weights/b\n"])
def test_other_texts_are_no_path(text: str) -> None:
    with pytest.raises(RequestError, match="no path of a checkpoint"):
        parse_path(text)


# ---------------------------------------------------------------------- whose folder it is


def test_a_second_server_and_a_path_that_is_no_folder_are_refused(tmp_path: Path) -> None:
    with served(tmp_path / "state"):
        assert "used by another server" in refusal(tmp_path / "state")
    with served(tmp_path / "state"):
        pass
    (tmp_path / "holiday.jpg").touch()
    assert "is a file: choose another" in refusal(tmp_path / "holiday.jpg")


def test_states_without_a_journal_are_refused_and_kept(tmp_path: Path) -> None:
    with served(tmp_path) as (client, _):
        client.call(save(client.model(), 1, "a"))
    for lose in (Path.unlink, lambda journal: journal.write_bytes(b"")):  # or copied without its -wal
        lose(tmp_path / "journal.sqlite3")
        assert "restore it from a backup" in refusal(tmp_path)
        assert len([*(tmp_path / "weights").iterdir()]) == 1


def test_a_folder_that_no_client_has_used_belongs_to_no_model(tmp_path: Path) -> None:
    StateFolder(tmp_path, base_model="b/mistyped").close()
    with served(tmp_path) as (client, _):
        client.queue.create_session()
    with pytest.raises(ConfigError, match="belongs to the base model 'base/fake'"):
        StateFolder(tmp_path, base_model="b/mistyped")


def damaged(journal: Path, content: Callable[[bytes], bytes]) -> None:
    journal.write_bytes(content(journal.read_bytes()))


def changed(journal: Path, statement: str) -> None:
    with closing(sqlite3.connect(journal, isolation_level=None)) as connection:
        connection.execute(statement)


def others(journal: Path) -> None:
    journal.unlink()
    changed(journal, "CREATE TABLE notes (text TEXT)")


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "text": (lambda journal: journal.write_text("not a journal " * 1000), "damaged"),
    "short": (lambda journal: damaged(journal, lambda content: content[: len(content) // 2]), "damaged"),
    "holes": (lambda journal: damaged(journal, lambda content: content[:4096] + b"\xff" * len(content)), "damaged"),
    "others": (others, "no journal of vlmpack"),
    "newer": (lambda journal: changed(journal, "PRAGMA user_version = 99"), "version 99"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_journal_that_cannot_be_read_is_refused(tmp_path: Path, case: str) -> None:
    with served(tmp_path) as (client, _):
        client.model()
    change, message = REFUSED[case]
    change(tmp_path / "journal.sqlite3")
    assert message in refusal(tmp_path)
    assert message in refusal(tmp_path)  # the lock was given back


def test_a_full_disk_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "connect", Mock(side_effect=sqlite3.OperationalError("database or disk is full")))
    assert "is full): make room on its disk, or choose another" in refusal(tmp_path)


# ---------------------------------------------------------------------- who may read it


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def open_to_others(folder: Path) -> list[str]:
    """What others than the owner may use of a folder, itself included."""
    return [str(entry) for entry in (folder, *folder.rglob("*")) if entry.stat().st_mode & 0o077]


class WatchedEngine(FakeEngine):
    """Notes what others may read while it writes states, before it and after."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def save(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        self.seen += open_to_others(folder.parents[1])
        super().save(model_id, folder, optimizer=optimizer)
        self.seen += open_to_others(folder.parents[1] / "journal.sqlite3")
        self.seen += [str(folder)] if folder.stat().st_mode & 0o077 else []


def test_nobody_else_may_read_any_of_it_from_the_first_byte_whatever_the_umask(tmp_path: Path) -> None:
    state, engine = tmp_path / "state", WatchedEngine()
    with umask(0), served(state, engine) as (client, _):
        model = client.model()
        client.call(forward_backward(model, 1))
        client.call(optim_step(model, 2))
        client.call(save(model, 3, "a"))
        client.call(save_for_sampler(model, 4, "b"))
        assert {entry.name for entry in state.iterdir()} >= {"journal.sqlite3-wal", "journal.sqlite3-shm", "lock"}
        assert len([*state.rglob("vlmpack_checkpoint.json")]) == 2
        assert (open_to_others(state), engine.seen) == ([], [])


def test_what_an_earlier_run_left_open_is_closed(tmp_path: Path) -> None:
    with served(tmp_path) as (client, _):
        client.call(save(client.model(), 1, "a"))
        shutil.copytree(tmp_path, tmp_path.parent / "killed")  # with SQLite's other files
    state = tmp_path.parent / "killed"
    for entry in (state, *state.rglob("*")):
        entry.chmod(0o755 if entry.is_dir() else 0o644)
    with served(state):
        assert open_to_others(state) == []
        assert state.stat().st_mode & 0o700 == 0o700


def test_a_folder_that_is_refused_keeps_its_rights(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "holiday.jpg").touch(0o644)
    refusal(tmp_path)
    (tmp_path / "holiday.jpg").rename(tmp_path / "journal.sqlite3")
    (tmp_path / "journal.sqlite3").write_text("not a journal " * 1000)
    refusal(tmp_path)
    assert len(open_to_others(tmp_path)) >= 2


# ---------------------------------------------------------------------- folders of states


def test_a_folder_has_no_name_until_it_is_written(tmp_path: Path) -> None:
    state = StateFolder(tmp_path, base_model="b")
    with state.new("a", "state") as folder:
        (folder / "part").mkdir()
        (folder / "part" / "file").write_text("text")
        assert folder.name.startswith(".a-")
    name = final_name(folder)
    assert (state.folder(name) / "part" / "file").read_text() == "text"
    assert state.sweep({name}) == []
    assert [each.name for each in state.sweep(set())] == [name]
    with pytest.raises(RequestError, match="is gone"):
        state.folder(name)
    state.close()


def test_what_cannot_be_written_leaves_nothing_and_names_the_remedy(tmp_path: Path) -> None:
    state = StateFolder(tmp_path, base_model="b")
    with pytest.raises(ConfigError, match="Make room"), state.new("a", "state") as folder:
        (folder / "half").write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(KeyError), state.new("a", "state"):
        raise KeyError
    assert [*(tmp_path / "weights").iterdir()] == []
    state.close()
