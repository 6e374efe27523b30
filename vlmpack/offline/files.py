"""Files that are there whole or not at all, and the folder in which a store is made.

OUT/rows-00000.parquet     has its name only when all of it is on the disk
OUT/.work/lock             held by the one process that writes; freed by the system when that process dies
OUT/.work/settings.json    what is being made, so that nothing else is continued into it
OUT/.work/unfinished/      files that are being written; whatever a run finds here, nobody needs
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, final
from uuid import uuid4

from vlmpack.errors import ConfigError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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
            ConfigError: the disk is full.
        """
        temporary = self.unfinished / f"{path.name}.{uuid4().hex}"
        try:
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise ConfigError(
                f"{path} cannot be written: {error}. Make room and run it again: what is finished is kept"
            ) from error
        finally:
            temporary.unlink(missing_ok=True)

    def write_json(self, path: Path, content: Mapping[str, Any]) -> None:
        """Write a JSON file, whole or not at all."""
        with self.whole_file(path) as temporary:
            temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def remove(self) -> None:
        """Delete the working folder: the store is complete."""
        shutil.rmtree(self.path)


@contextmanager
def work_folder(out: Path) -> Iterator[WorkFolder]:
    """The work folder of a store, for this process alone; what a killed run left unfinished is removed.

    Raises:
        ConfigError: another process writes the same store, or there can be no such folder.
    """
    folder = WorkFolder(out=out)
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise ConfigError(f"{out} cannot be made a folder of rows: {error}; name another one") from error
    with (folder.path / "lock").open("w") as lock:
        _take(lock, out)
        shutil.rmtree(folder.unfinished, ignore_errors=True)
        folder.unfinished.mkdir(exist_ok=True)
        yield folder


def _take(lock: IO[str], out: Path) -> None:
    import fcntl  # not on every system, and needed for writing only

    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not `flock`, which a forked worker would go on holding
    except (BlockingIOError, PermissionError) as error:
        raise ConfigError(f"another process is writing to {out}; wait for it, or choose another folder") from error


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
    """SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
