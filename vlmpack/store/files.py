"""Files that are there whole or not at all, and the folder in which a store is made.

OUT/rows-00000.parquet     has its name only when all of it is on the disk
OUT/.work/lock             held by the one process that writes; freed by the system when that process dies; always empty
OUT/.work/settings.json    what is being made, so that nothing else is continued into it
OUT/.work/unfinished/      files that are being written; whatever a run finds here, nobody needs
"""

from __future__ import annotations

import errno
import hashlib
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
from uuid import uuid4

from vlmpack.errors import ConfigError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)

_written_here: set[tuple[int, int]] = set()
"""Locks that threads of this process hold, by device and inode: the system's own are those of a process."""
_guard = threading.Lock()


@final
@dataclass(frozen=True, kw_only=True)
class WorkFolder:
    """Where a store is written, and where unfinished files are kept meanwhile."""

    out: Path
    """The store."""

    @property
    def path(self) -> Path:
        """Working folder; deleted when the store is complete."""
        return self.out / ".work"

    @property
    def unfinished(self) -> Path:
        """The folder of files that are being written."""
        return self.path / "unfinished"

    @contextmanager
    def whole_file(self, path: Path) -> Iterator[Path]:
        """A name to write to; the file gets the name `path` when the block ends, and is removed where it fails.

        Raises:
            ConfigError: the disk is full, or the folder may not be written to. Other errors of the block stay as they
                are, those of a data set among them.
        """
        temporary = self.unfinished / f"{path.name}.{uuid4().hex}"
        try:
            yield temporary
            with writing(path):
                with temporary.open("rb+") as file:
                    os.fsync(file.fileno())
                temporary.replace(path)
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise unwritable(path, error) from error
        finally:
            with suppress(OSError):  # gone with its folder, or not ours to remove: the next run looks after it
                temporary.unlink(missing_ok=True)

    def write_json(self, path: Path, content: Mapping[str, Any]) -> None:
        """Write a JSON file, whole or not at all."""
        self.write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    def write_text(self, path: Path, text: str) -> None:
        """Write a text file, whole or not at all."""
        with self.whole_file(path) as temporary, writing(path):
            temporary.write_text(text, encoding="utf-8")

    def remove(self) -> None:
        """Delete the working folder: the store is complete."""
        with writing(self.path):
            shutil.rmtree(self.path)


@contextmanager
def work_folder(out: Path) -> Iterator[WorkFolder]:
    """The work folder of a store, for this process alone; what a killed run left unfinished is removed.

    Raises:
        ConfigError: another process writes the same store, or there can be no such folder, or a symbolic link stands
            in its place, through which files of somebody else would be written or removed.
    """
    folder = WorkFolder(out=out)
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
            raise ConfigError(f"{path} is a symbolic link, and may lead to other people's files; remove it")
    with _locked(folder.path / "lock", out):
        with writing(folder.unfinished):
            shutil.rmtree(folder.unfinished, ignore_errors=True)
            folder.unfinished.mkdir(exist_ok=True)
        yield folder


@contextmanager
def _locked(path: Path, out: Path) -> Iterator[None]:
    """Hold the lock of a folder; the file is neither followed to where it may link nor changed.

    Not by `flock`, which a forked worker would go on holding.
    """
    import fcntl  # not on every system, and needed for writing only

    with suppress(OSError), _guard:
        found = path.lstat()
        if (found.st_dev, found.st_ino) in _written_here:  # to open and close it would free the lock
            raise _busy(out)
    with _opened(path) as lock:
        name = _identity(lock)
        with _guard:
            if name in _written_here:
                raise _busy(out)
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    raise _busy(out) from error
                raise ConfigError(f"{path} cannot be locked: {error}; choose a folder on another disk") from error
            if not path.exists() or path.stat().st_ino != name[1]:  # whoever held it has finished meanwhile
                raise _busy(out)
            _written_here.add(name)
        try:
            yield
        finally:
            with _guard:
                _written_here.discard(name)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A regular file for reading and writing, made where there is none."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(f"{path} is a symbolic link, and may lead to somebody else's file; remove it") from error
        raise unwritable(path, error) from error
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ConfigError(f"{path} is no regular file; remove it")
        yield file
    finally:
        os.close(file)


def _identity(file: int) -> tuple[int, int]:
    found = os.fstat(file)
    return found.st_dev, found.st_ino


def _busy(out: Path) -> ConfigError:
    return ConfigError(f"another process is writing to {out}; wait for it, or choose another folder")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file in errors of the system that stop it from being written.

    Raises:
        ConfigError: the disk is full, the folder may not be written to or is gone, or the disk fails.
    """
    try:
        yield
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> ConfigError:
    """The refusal of a file that cannot be written, with what to do about it."""
    remedy = "see to the disk and run it again: what is finished is kept"
    if error.errno in FULL:
        remedy = "Make room and run it again: what is finished is kept"
    elif error.errno in FORBIDDEN:
        remedy = "get the right to write there, or choose another folder"
    return ConfigError(f"{path} cannot be written: {error}. {remedy[0].upper()}{remedy[1:]}")


def unreadable(what: object, error: OSError) -> ConfigError:
    """The refusal of a file that cannot be read although nothing is known to be wrong with it."""
    remedy = "restore it" if isinstance(error, FileNotFoundError) else "get the right to read it, or see to the disk"
    return ConfigError(f"{what} cannot be read: {error}; {remedy}")


def json_text(content: Any) -> str:
    """JSON in one line that people can read, in whatever letters; what UTF-8 cannot hold is escaped.

    Half of a surrogate pair is legal in JSON and in a string of Python's, and in no file.
    """
    text = json.dumps(content, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(content)
    return text


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits.

    Raises:
        ConfigError: it cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    except OSError as error:
        raise unreadable(path, error) from error
    return digest.hexdigest()


def size_of(path: Path) -> int | None:
    """Bytes of a file; None: there is no such file.

    Raises:
        ConfigError: it cannot be looked at.
    """
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError as error:
        raise unreadable(path, error) from error
