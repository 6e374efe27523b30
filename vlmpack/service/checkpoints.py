"""Names and paths of checkpoints, and the folders in which states of models lie.

    STATE/
    ├── lock                  held by the server that uses the folder
    ├── journal.sqlite3       says which folder below is whose
    └── weights/
        ├── step1-9f0c.../    a checkpoint, a snapshot to sample from, or the state of a model
        └── .step2-17ab.../   being written, or left behind by a process that was killed

A folder never changes once it has its name: it is written beside, brought to the disk, renamed, and only then entered
in the journal. What the journal does not refer to is removed.

Only the owner may read any of it, as there are prompts, images, replies and weights of clients in it: folders are made
with mode 0700, before anything is in them, files get 0600, whatever the umask.
"""

from __future__ import annotations

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
from vlmpack.service.journal import NAME, CheckpointRow, Journal

log = logging.getLogger("vlmpack.service")

ENTRIES = {
    "lock",
    "weights",
    "key",
    "demo-model",
    *(f"journal.sqlite3{end}" for end in ("", "-wal", "-shm", "-journal")),
}
"""Names in a state folder; key and demo model are of the command."""
ABOUT = "vlmpack_checkpoint.json"
"""File in the folder of a checkpoint, written by `describe`."""


def check_name(name: str) -> str:
    """Return the name of a checkpoint.

    Raises:
        RequestError: it cannot be part of a path.
    """
    if not NAME.fullmatch(name):
        raise RequestError(
            f"a checkpoint cannot be named {name!r:.150}: use 1 to 128 letters, digits, '.', '_' and '-', "
            "beginning with a letter or digit"
        )
    return name


@final
class StateFolder:
    """The folder of a server's state, locked against a second server, with its journal.

    Args:
        path: the folder; made if there is none.
        base_model: name of the base model, to which all that is in it belongs.

    Raises:
        ConfigError: another server uses it, it holds something else or is of another base model, is damaged, or cannot
            be written.
    """

    def __init__(self, path: Path, *, base_model: str) -> None:
        self.path = path
        self._weights = path / "weights"
        self._check_is_ours()
        with writing(path):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise ConfigError(
                f"the state folder {path} is used by another server: stop that one, or choose another folder (--state)"
            ) from error
        try:
            with writing(self._weights):
                self._weights.mkdir(exist_ok=True, mode=0o700)
            self.journal = Journal(path / "journal.sqlite3", base_model=base_model)
            """Says whose folder is which."""
            self.make_private()
        except BaseException:
            os.close(self._lock)
            raise

    def _check_is_ours(self) -> None:
        if self.path.is_dir() and not (self.path / "journal.sqlite3").exists():
            foreign = sorted(entry.name for entry in self.path.iterdir() if entry.name not in ENTRIES)
            states = [*(self.path / "weights").iterdir()] if (self.path / "weights").is_dir() else []
            if foreign:
                raise ConfigError(
                    f"{self.path} is no state folder: it holds {foreign[0]!r}. Choose an empty or new folder (--state)"
                )
            if states:
                raise ConfigError(
                    f"{self.path} has {len(states)} saved states and no journal.sqlite3 that says whose they are: "
                    "restore that file from a backup, or choose another folder (--state)"
                )

    def make_private(self) -> None:
        """Take the rights of others to what an earlier run left, and to the folder itself."""
        try:
            _make_private(self.path)
        except OSError as error:
            log.warning("others may read the state folder (%s): let its owner run chmod -R go= on it", error)

    def close(self) -> None:
        """Close the journal and unlock the folder; a second time does nothing."""
        self.journal.close()
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def folder(self, name: str) -> Path:
        """Folder of a state.

        Raises:
            RequestError: it is gone, as by hand.
        """
        folder = self._weights / name
        if not folder.is_dir():
            raise RequestError(f"the folder {name} is gone from the server's state: restore it from a backup")
        return folder

    @contextmanager
    def new(self, label: str) -> Iterator[Path]:
        """Yield an empty folder to write to; after the block its files are on the disk.

        The folder keeps the leading dot until `publish`, so that it is known to be unfinished.

        Args:
            label: begins the name of the folder, for human readers.

        Raises:
            ConfigError: the disk is full or fails; nothing is left.
        """
        folder = self._weights / f".{label}-{uuid4().hex}"
        try:
            with writing(folder):
                folder.mkdir(mode=0o700)
            yield folder
            with suppress(PermissionError):  # a file system without rights, of which a warning was given
                _make_private(folder)
            with writing(folder):
                for entry in [*folder.rglob("*"), folder]:
                    _to_disk(entry)
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise unwritable(folder, error) from error
            raise

    def publish(self, folder: Path) -> str:
        """Give a finished folder its name, and return the name.

        Raises:
            ConfigError: it cannot be renamed.
        """
        name = folder.name.removeprefix(".")
        with writing(folder):
            folder.rename(self._weights / name)
            _to_disk(self._weights)
        return name

    def sweep(self, wanted: set[str]) -> list[str]:
        """Remove every folder whose name is not wanted, unfinished ones too; return their names."""
        gone = sorted(entry.name for entry in self._weights.iterdir() if entry.name not in wanted)
        for name in gone:
            shutil.rmtree(self._weights / name, ignore_errors=True)
        return gone


def describe(folder: Path, row: CheckpointRow) -> None:
    """Write what a checkpoint is into its folder, should the journal be lost."""
    (folder / ABOUT).write_text(json.dumps(asdict(row), indent=1), encoding="utf-8")


def size_of(folder: Path) -> int:
    """Bytes of the files of a folder."""
    return sum(entry.stat().st_size for entry in folder.rglob("*") if entry.is_file())


def label_of(model: str, what: str) -> str:
    """Beginning of the name of a folder, without characters that file systems object to."""
    return f"{re.sub(r'[^A-Za-z0-9]+', '_', model)[:80]}-{what[:60]}"


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
