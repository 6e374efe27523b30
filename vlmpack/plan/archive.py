"""Plans and tables on disk: a zip of `manifest.json` and one `.npy` an array."""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from vlmpack.errors import ConfigError, LayoutError

PLAN = "vlmpack.plan"
VERSION = 1
MANIFEST = "manifest.json"
FIRST_DATE = (1980, 1, 1, 0, 0, 0)
"""The date of every file in the zip, so that its bytes are the same every time."""
DAMAGE = (
    zipfile.BadZipFile,
    ValueError,  # text that is no JSON, bytes that are no array
    RuntimeError,  # a flipped bit that says: encrypted, or (NotImplementedError) compressed in another way
    OSError,  # a place that lies before the file
    EOFError,  # ... or behind it
    zlib.error,
    struct.error,
    TypeError,  # an array of something else than numbers
)
"""What reading a damaged file raises."""


def write(path: str | Path, manifest: Mapping[str, Any], arrays: Mapping[str, np.ndarray], *, kind: str = PLAN) -> None:
    """Write the file under another name beside it and rename it, so that it is there whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format": kind, "version": VERSION, **manifest}, indent=2) + "\n"
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")  # not `tempfile`, which lets nobody else read it
    try:
        with temporary.open("xb") as file, zipfile.ZipFile(file, "w") as members:
            members.writestr(zipfile.ZipInfo(MANIFEST, FIRST_DATE), text)
            for name, array in arrays.items():
                with members.open(zipfile.ZipInfo(f"{name}.npy", FIRST_DATE), "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array.astype("<i8"), version=(1, 0), allow_pickle=False)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read(path: str | Path, *, kind: str = PLAN) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(manifest, arrays) of a file that `write` made.

    Raises:
        ConfigError: there is no such file, it is not of this kind, or it is of another version.
        LayoutError: it is damaged.
    """
    if not Path(path).is_file():
        raise ConfigError(f"there is no file {path}; write it first, or name another one")
    if not zipfile.is_zipfile(path):
        raise ConfigError(f"{path} is no {kind}, which is a zip file. Write it again, or name another file")
    try:
        with zipfile.ZipFile(path) as members:
            manifest = _manifest(members, path, kind)
            arrays = {
                name.removesuffix(".npy"): _array(members, name) for name in members.namelist() if name != MANIFEST
            }
    except DAMAGE as error:
        raise LayoutError(f"{path} is damaged ({str(error) or type(error).__name__}); write it again") from error
    return manifest, arrays


def _manifest(members: zipfile.ZipFile, path: str | Path, kind: str) -> dict[str, Any]:
    manifest = json.loads(members.read(MANIFEST)) if MANIFEST in members.namelist() else {}
    if not isinstance(manifest, dict):
        raise ValueError(f"its {MANIFEST} holds a {type(manifest).__name__}")
    seen = manifest.get("format"), manifest.get("version")
    if seen != (kind, VERSION):
        raise ConfigError(f"{path} is no {kind} of version {VERSION}: it says {seen}. Write it again with this vlmpack")
    return manifest


def _array(members: zipfile.ZipFile, name: str) -> np.ndarray:
    with members.open(name) as member:
        return np.lib.format.read_array(member, allow_pickle=False).astype(np.int64)
