"""Plans and tables on disk: a zip of `manifest.json` and one `.npy` an array."""

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

PLAN = "vlmpack.plan"
VERSION = 1
MANIFEST = "manifest.json"
FIRST_DATE = (1980, 1, 1, 0, 0, 0)
"""The date of every file in the zip, so that its bytes are the same every time."""


def write(path: str | Path, manifest: Mapping[str, Any], arrays: Mapping[str, np.ndarray], *, kind: str = PLAN) -> None:
    """Write an archive, whole or not at all.

    Raises:
        ConfigError: it cannot be written: rights, a full disk, a file where a folder should be.
    """
    path = Path(path)
    text = json.dumps({"format": kind, "version": VERSION, **manifest}, indent=2) + "\n"
    with atomic_file(path) as temporary, writing(path), zipfile.ZipFile(temporary, "w") as members:
        members.writestr(zipfile.ZipInfo(MANIFEST, FIRST_DATE), text)
        for name, array in arrays.items():
            with members.open(zipfile.ZipInfo(f"{name}.npy", FIRST_DATE), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array.astype("<i8"), version=(1, 0), allow_pickle=False)


def read(path: str | Path, *, kind: str = PLAN) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(manifest, arrays) of a file that `write` made.

    Raises:
        ConfigError: there is no such file, it cannot be read, it is not of this kind, or it is of another version.
        LayoutError: it is damaged.
    """
    try:
        content = Path(path).read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise ConfigError(f"there is no file {path}; write it first, or name another one") from None
    except OSError as error:
        raise unreadable(path, error) from error
    if not zipfile.is_zipfile(io.BytesIO(content)):
        raise ConfigError(f"{path} is no {kind}, which is a zip file. Write it again, or name another file")
    with damaged(path), zipfile.ZipFile(io.BytesIO(content)) as members:
        manifest = _manifest(members, path, kind)
        names = [name for name in members.namelist() if name != MANIFEST]
        return manifest, {name.removesuffix(".npy"): _array(members, name) for name in names}


@contextmanager
def damaged(path: str | Path) -> Iterator[None]:
    """Turn every error of reading a damaged file into a LayoutError that names it."""
    try:
        yield
    except VlmpackError:
        raise
    except Exception as error:  # zipfile, json, numpy and what is made of their results: errors of every kind
        fault = f"it has no {error}" if type(error) is KeyError else str(error) or type(error).__name__
        raise LayoutError(f"{path} is damaged ({fault:.200}); write it again") from error


def digest(content: str, arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of a text and of arrays with their names."""
    digest = hashlib.sha256(content.encode())
    for name, array in arrays.items():
        digest.update(f"{name} {len(array)} ".encode())
        digest.update(array.astype("<i8").tobytes())
    return digest.hexdigest()


def check_unchanged(
    path: str | Path,
    manifest: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    expected: Mapping[str, Any],
    expected_arrays: Mapping[str, np.ndarray],
) -> None:
    """Raise unless a file holds what would be written of the object that was made of it, its digest included.

    Raises:
        LayoutError: it holds something else.
    """
    stored = {name: value for name, value in manifest.items() if name not in ("format", "version")}
    if json.loads(json.dumps(expected)) != stored or expected_arrays.keys() != arrays.keys():
        raise LayoutError(f"{path} does not match its digest: it was changed or damaged; make it anew")


def _manifest(members: zipfile.ZipFile, path: str | Path, kind: str) -> dict[str, Any]:
    manifest = json.loads(members.read(MANIFEST)) if MANIFEST in members.namelist() else {}
    if not isinstance(manifest, dict):
        raise ValueError(f"its {MANIFEST} holds a {type(manifest).__name__}")
    stored = manifest.get("format"), manifest.get("version")
    if stored != (kind, VERSION):
        raise ConfigError(f"{path} is no {kind} of version {VERSION}: its manifest has {stored}; write it again")
    return manifest


def _array(members: zipfile.ZipFile, name: str) -> np.ndarray:
    with members.open(name) as member:
        array = np.lib.format.read_array(member, allow_pickle=False)
        if array.dtype != np.int64 or array.ndim != 1 or member.read(1):
            raise ValueError(f"{name} is no array of int64 [N]")
        return array
