"""Names and paths of checkpoints, and the state folder that stores them.

    STATE/
    ├── lock                  held by the server that uses the folder
    ├── journal.sqlite3       says what each folder below belongs to
    └── weights/
        ├── step1-9f0c.../    a checkpoint, a snapshot to sample from, or the state of a model
        └── .step2-17ab.../   being written, or left behind by a process that was killed

A folder never changes once it has its final name. It is written under a temporary name, flushed to disk, renamed, and
only then entered in the journal. Folders that the journal does not refer to are removed.

Only the owner may read the state folder, because it holds prompts, images, replies and weights of clients. Folders are
created with mode 0700 before anything is written to them, and files get mode 0600, whatever the umask.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import final
from uuid import uuid4

from vlmpack.errors import ConfigError, RequestError
from vlmpack.files import unwritable, writing
from vlmpack.service.queue.journal import ANOTHER, NAME, CheckpointRow, Journal

log = logging.getLogger("vlmpack.service")

ENTRIES = {
    "lock",
    "weights",
    "key",
    "demo-model",
    *(f"journal.sqlite3{end}" for end in ("", "-wal", "-shm", "-journal")),
}
"""Names that may be in a state folder. The command-line program writes the key and the demo model."""
_NO_SPACE = os.strerror(errno.ENOSPC)
ABOUT = "vlmpack_checkpoint.json"
"""File in a checkpoint's folder that says what the checkpoint is; written by `describe`."""


def check_name(name: str) -> str:
    """Return the name of a checkpoint if it is valid.

    Raises:
        RequestError: the name cannot be part of a path.
    """
    if not NAME.fullmatch(name):
        rule = "1 to 128 letters, digits, '.', '_' and '-', beginning with a letter or digit"
        raise RequestError(f"a checkpoint cannot be named {name!r:.150}: use {rule}")
    return name


@final
class StateFolder:
    """The folder of a server's state, with its journal, locked against a second server.

    Args:
        path: the folder; created if missing.
        base_model: name of the base model that all of the state belongs to.

    Raises:
        ConfigError: another server uses the folder, it holds foreign files, it belongs to another base model, it is
            damaged, or it cannot be written.
    """

    def __init__(self, path: Path, *, base_model: str) -> None:
        self.path = path
        self.weights = path / "weights"
        """Folder that holds a folder for each state."""
        self._check_is_ours()
        with writing(path):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise ConfigError(f"the state folder {path} is used by another server: {ANOTHER}") from error
        try:
            with writing(self.weights):
                self.weights.mkdir(exist_ok=True, mode=0o700)
            states = len([*self.weights.iterdir()])
            self.journal = Journal(path / "journal.sqlite3", base_model=base_model, states=states)
            """The journal, which says what each folder belongs to."""
            self.make_private()
        except BaseException:
            os.close(self._lock)
            raise

    def _check_is_ours(self) -> None:
        if self.path.is_file():
            raise ConfigError(f"the state folder {self.path} is a file: {ANOTHER}")
        if self.path.is_dir() and not (self.path / "journal.sqlite3").exists():
            foreign = sorted(entry.name for entry in self.path.iterdir() if entry.name not in ENTRIES)
            if foreign:
                raise ConfigError(f"{self.path} is no state folder, because it holds {foreign[0]!r}: {ANOTHER}")

    def make_private(self) -> None:
        """Remove group and other permissions from the folder and from everything that an earlier run left in it."""
        try:
            _make_private(self.path)
        except OSError as error:
            log.warning("others may read the state folder (%s): let its owner run chmod -R go= on it", error)

    def close(self) -> None:
        """Close the journal and unlock the folder. A second call does nothing."""
        self.journal.close()
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def folder(self, name: str) -> Path:
        """Return the folder of a state.

        Raises:
            RequestError: the folder is gone, e.g. deleted by hand.
        """
        folder = self.weights / name
        if not folder.is_dir():
            raise RequestError(f"the folder {name} is gone from the server's state: restore it from a backup")
        return folder

    def files(self, name: str) -> list[str]:
        """Return the names of the files of a checkpoint."""
        return sorted(entry.name for entry in self.folder(name).iterdir() if entry.name != ABOUT)

    @contextmanager
    def new(self, owner: str, what: str) -> Iterator[Path]:
        """Yield an empty folder to write to. After the block it is flushed to disk and gets its final name.

        Until then its name has a leading dot, which marks it as unfinished; `final_name` returns the name without it.

        Args:
            owner: id of the model or sampling session, with which the folder's name begins, for human readers.
            what: what it holds.

        Raises:
            ConfigError: the disk is full or fails; nothing is left behind.
        """
        owner = re.sub(r"[^A-Za-z0-9]+", "_", owner)  # characters that all file systems accept
        folder = self.weights / f".{owner[:80]}-{what[:60]}-{uuid4().hex}"
        try:
            with writing(folder):
                folder.mkdir(mode=0o700)
            yield folder
            with suppress(PermissionError):  # the file system has no permissions; a warning was given
                _make_private(folder)
            with writing(folder):
                for entry in [*folder.rglob("*"), folder]:
                    _to_disk(entry)
                folder.rename(self.weights / final_name(folder))
                _to_disk(self.weights)
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if _NO_SPACE in str(error):  # safetensors has errors of its own
                error = OSError(errno.ENOSPC, _NO_SPACE)
            if isinstance(error, OSError):
                raise unwritable(folder, error) from error
            raise

    def sweep(self, wanted: set[str]) -> list[Path]:
        """Remove every folder whose name is not wanted, unfinished ones included, and return them."""
        gone = sorted(entry for entry in self.weights.iterdir() if entry.name not in wanted)
        for folder in gone:
            shutil.rmtree(folder, ignore_errors=True)
        return gone


def final_name(folder: Path) -> str:
    """Return the name that a folder of `StateFolder.new` gets once it is written."""
    return folder.name.removeprefix(".")


def describe(folder: Path, row: CheckpointRow) -> None:
    """Write a checkpoint's journal entry into its folder, in case the journal is lost."""
    (folder / ABOUT).write_text(json.dumps(asdict(row), indent=1), encoding="utf-8")


def size_of(folder: Path) -> int:
    """Return the total bytes of the files in a folder."""
    return sum(entry.stat().st_size for entry in folder.rglob("*") if entry.is_file())


def _make_private(folder: Path) -> None:
    for entry in (folder, *folder.rglob("*")):
        mode = entry.lstat().st_mode
        if mode & 0o077 and not stat.S_ISLNK(mode):
            entry.chmod(stat.S_IMODE(mode) & ~0o077)


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
