"""Archives of plans and length tables: a zip of `manifest.json` and one `.npy` per array, with a digest of all."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from vlmpack.errors import ConfigError, LayoutError, VlmpackError
from vlmpack.files import atomic_file, unreadable, writing

VERSION = 3
MANIFEST = "manifest.json"


def write_archive(path: str | Path, content: Mapping[str, Any], arrays: Mapping[str, np.ndarray], *, kind: str) -> None:
    """Write a zip of `manifest.json`, which includes a digest of everything, and one `.npy` per array, atomically.

    Raises:
        ConfigError: the file cannot be written: permissions, a full disk, a file where a folder should be.
    """
    path = Path(path)
    manifest = {"format": kind, "version": VERSION, **content, "digest": digest_of_archive(content, arrays)}
    with atomic_file(path) as temporary, writing(path), zipfile.ZipFile(temporary, "w") as members:
        # every file has zipfile's default date, so that equal content gives equal bytes
        members.writestr(zipfile.ZipInfo(MANIFEST), json.dumps(manifest, indent=2) + "\n")
        for name, array in arrays.items():
            with members.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.save(member, array.astype("<i8"), allow_pickle=False)


@contextmanager
def read_archive(path: str | Path, *, kind: str) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """Yield (manifest, arrays) of a file that `write_archive` made.

    An exception in the `with` block counts as damage, too.

    Raises:
        ConfigError: there is no such file, it cannot be read, it is not of this kind, or it has another version.
        LayoutError: the file is damaged.
    """
    try:
        content = Path(path).read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise ConfigError(f"there is no file {path}; write it first, or name another one") from None
    except OSError as error:
        raise unreadable(path, error) from error
    if not zipfile.is_zipfile(io.BytesIO(content)):
        raise ConfigError(f"{path} is no {kind}, which is a zip file. Write it again, or name another file")
    try:
        with np.load(io.BytesIO(content)) as members:
            manifest = json.loads(members[MANIFEST]) if MANIFEST in members else {}
            stored = manifest.pop("format", None), manifest.pop("version", None)
            if stored != (kind, VERSION):
                raise ConfigError(
                    f"{path} is no {kind} of version {VERSION}: its manifest has {stored}; write it again"
                )
            arrays = {name: members[name] for name in members.files if name != MANIFEST}
        if manifest.pop("digest") != digest_of_archive(manifest, arrays):
            raise ValueError("it does not match its digest")
        yield manifest, arrays
    except VlmpackError:
        raise
    except Exception as error:  # zipfile, json, numpy and the caller's block raise errors of every kind
        fault = f"it has no {error}" if type(error) is KeyError else str(error) or type(error).__name__
        raise LayoutError(f"{path} is damaged ({fault:.200}); write it again") from error


def digest_of_archive(content: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    """Compute the SHA-256 of a manifest and of named arrays."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype} {array.shape} ".encode() + array.tobytes())
    return digest.hexdigest()
