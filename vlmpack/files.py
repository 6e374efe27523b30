"""Write files atomically: a file is complete or absent, whenever the process is stopped.

FOLDER/.NAME.<32 digits>    while being written; removed on errors, left behind if the process is killed
FOLDER/NAME                 once it is completely on disk

System errors become a ConfigError that names the file and the remedy.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from vlmpack.errors import ConfigError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REMEDIES = {
    **dict.fromkeys(FULL, "Make room and run it again: what is finished is kept"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "Get the right to write there, or choose another folder"),
    **dict.fromkeys((errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG), "Choose another name or folder"),
}


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary name in the same folder to write to; at the end of the block, it is renamed to `path`.

    The folder is created if necessary, and an existing file is replaced.

    Raises:
        ConfigError: the disk is full, or the file cannot be written or renamed. Other errors of the block propagate
            unchanged, because they may come from reading. Wrap code that only writes in `writing(path)`.
    """
    # `tempfile` would create a file that other users cannot read
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
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
        with suppress(OSError):  # the folder is gone, or the file has another owner
            temporary.unlink(missing_ok=True)


def left_behind_in(folder: Path) -> list[Path]:
    """Find the temporary files of processes that were killed."""
    return list(folder.glob(f".*.{'[0-9a-f]' * 32}"))


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically, see `atomic_file`.

    Raises:
        ConfigError: the file cannot be written.
    """
    with atomic_file(path) as temporary, writing(path):
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn system errors in the block into errors that name the file.

    Raises:
        ConfigError: the disk is full, the folder is not writable or is gone, or the disk fails.
    """
    try:
        yield
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> ConfigError:
    """Return the error for a file that cannot be written, with the remedy."""
    remedy = _REMEDIES.get(error.errno or 0, "See to the disk and run it again: what is finished is kept")
    return ConfigError(f"{path} cannot be written: {error}. {remedy}")


def unreadable(path: object, error: OSError) -> ConfigError:
    """Return the error for a file that cannot be read although its content may be intact, with the remedy."""
    remedy = "restore it" if isinstance(error, FileNotFoundError) else "get the right to read it, or see to the disk"
    return ConfigError(f"{path} cannot be read: {error}; {remedy}")
