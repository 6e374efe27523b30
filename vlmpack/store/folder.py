"""The folder in which a store is made: its lock, its unfinished files, and what may already lie in it.

OUT/rows-00000.parquet     has its name only when all of it is on the disk
OUT/.work/lock             held by the one process that writes; the system frees it when that process dies; always empty
OUT/.work/settings.json    settings of the store that is being made, so that no other is continued into it
OUT/.work/unfinished/      files that are being written; those that a killed run left are removed by the next one
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from vlmpack.errors import ConfigError
from vlmpack.files import FULL, unreadable, unwritable, write_text, writing
from vlmpack.store.manifest import LENGTHS, PLAN, differences, is_store

BEGUN = "settings.json"
"""In the work folder: the settings with which a store was begun."""

_locks_of_threads: set[tuple[int, int]] = set()
"""Locks that threads of this process hold, by device and inode: the system's locks are those of a process."""
_guard = threading.Lock()


@final
@dataclass(frozen=True, kw_only=True)
class WorkFolder:
    """The folder of a store, and the folder in it for unfinished files."""

    out: Path
    """The store."""

    @property
    def path(self) -> Path:
        """Working folder; deleted when the store is complete."""
        return self.out / ".work"

    @property
    def unfinished(self) -> Path:
        """Folder of files that are being written, for `atomic_file`."""
        return self.path / "unfinished"

    def write_json(self, path: Path, content: Mapping[str, Any]) -> None:
        """Write a JSON file, whole or not at all."""
        write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n", folder=self.unfinished)

    def remove(self) -> None:
        """Delete the working folder: the store is complete."""
        with writing(self.path):
            shutil.rmtree(self.path)


def is_unfinished_store(folder: str | Path) -> bool:
    """Return whether a store was begun in a folder and not finished."""
    return not is_store(folder) and WorkFolder(out=Path(folder)).path.is_dir()


@contextmanager
def locked(folder: WorkFolder) -> Iterator[None]:
    """Make and lock the work folder of a store for this process, and remove unfinished files of a killed run.

    Raises:
        ConfigError: another process writes the same store, or there can be no such folder, or a symbolic link stands
            in its place, through which files elsewhere would be written or removed.
    """
    out = folder.out
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in FULL:
            raise unwritable(out, error) from error
        raise ConfigError(f"{out} cannot be made a folder of rows: {error}; name another one") from error
    for path in (folder.path, folder.unfinished):
        with writing(path):
            is_link = path.is_symlink()
        if is_link:
            raise ConfigError(f"{path} is a symbolic link, and may lead to other users' files; remove it")
    with _lock(folder.path / "lock", out):
        with writing(folder.unfinished):
            shutil.rmtree(folder.unfinished, ignore_errors=True)
            folder.unfinished.mkdir(exist_ok=True)
        yield


@contextmanager
def _lock(path: Path, out: Path) -> Iterator[None]:
    """Hold the lock of a folder; the file is neither followed to where it may link nor changed.

    Not by `flock`, which a forked worker would go on holding.
    """
    import fcntl  # not on every system, and needed for writing only

    with suppress(OSError), _guard:
        if _identity(path.lstat()) in _locks_of_threads:  # to open and close it would free the lock
            raise _busy(out)
    with _opened(path) as lock:
        name = _identity(os.fstat(lock))
        with _guard:
            if name in _locks_of_threads:
                raise _busy(out)
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    raise _busy(out) from error
                raise ConfigError(f"{path} cannot be locked: {error}; choose a folder on another disk") from error
            if not path.exists() or path.stat().st_ino != name[1]:  # whoever held it has finished meanwhile
                raise _busy(out)
            _locks_of_threads.add(name)
        try:
            yield
        finally:
            with _guard:
                _locks_of_threads.discard(name)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a regular file for reading and writing, made where there is none."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(f"{path} is a symbolic link, and may lead to another user's file; remove it") from error
        raise unwritable(path, error) from error
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ConfigError(f"{path} is no regular file; remove it")
        yield file
    finally:
        os.close(file)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _busy(out: Path) -> ConfigError:
    return ConfigError(f"another process is writing to {out}; wait for it, or choose another folder")


# ---------------------------------------------------------------------- parts of another store


def check_free(folder: WorkFolder) -> None:
    """Refuse a folder unless a store may be begun or continued in it.

    Raises:
        ConfigError: it is a file, or holds something that is no part of a store.
    """
    out = folder.out
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file, and a store is a folder; name one that is empty or not there yet")
    if out.is_dir() and not (folder.path / BEGUN).is_file():
        _check_empty(folder)


def claim(folder: WorkFolder, description: Mapping[str, Any]) -> None:
    """Refuse a folder with parts of another store, and note the settings of this one.

    Until there is a plan, settings and samples may change: lengths are then measured again, out of their cache.

    Raises:
        ConfigError: it holds rows of other settings, data or processor (names the differences), or something else.
    """
    path = folder.path / BEGUN
    stored = _stored(path)
    if stored and (folder.out / PLAN).is_file():
        check_differences(stored, description, folder.out)
    elif stored != description:
        _check_empty(folder)
        for outdated in (folder.out / LENGTHS, *folder.path.glob("lengths-*")):
            with writing(outdated):
                outdated.unlink(missing_ok=True)
        folder.write_json(path, description)


def _stored(path: Path) -> dict[str, Any]:
    """Read the description with which a store was begun; empty: there is none."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if not isinstance(stored, dict):
            raise ValueError(f"it holds a {type(stored).__name__}")
        return stored
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged ({error}); remove {path.parent.parent} and pack again") from error


def check_differences(stored: Mapping[str, Any], current: Mapping[str, Any], out: Path) -> None:
    """Refuse a description of a store that differs from the one it was begun or finished with.

    Raises:
        ConfigError: it does; names the differences.
    """
    if lines := list(differences(stored, current)):
        raise ConfigError(
            f"{out} holds rows that were made otherwise: {'; '.join(lines)}. Pack into another folder, or remove this "
            "one"
        )


def _check_empty(folder: WorkFolder) -> None:
    expected = (folder.path.name, LENGTHS)
    try:
        others = sorted(path.name for path in folder.out.iterdir() if path.name not in expected)
    except OSError as error:
        raise unreadable(folder.out, error) from error
    if others:
        raise ConfigError(f"{folder.out} is no store and not empty ({', '.join(others[:5])}); choose another folder")
