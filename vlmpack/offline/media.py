"""An image or a frame as a store keeps it: its encoded bytes, or where they are and their digest. Never pixels."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypedDict, final

import numpy as np
from PIL import Image

from vlmpack.collate import VIDEO_KEYS, MediaRef
from vlmpack.data import (
    ImageError,
    ImageLimits,
    load_image,
    read_encoded,
)
from vlmpack.errors import ConfigError

Images = Literal["bytes", "reference"]
IMAGES: tuple[Images, ...] = ("bytes", "reference")

KEYS = (*VIDEO_KEYS, "sample_fps", "raw_fps")
"""Keys beside an image or a video that change what is made of it."""
PNG_EFFORT = 3
"""Compression level of PNG, 0 to 9: higher ones take much longer and save little."""


class StoredImage(TypedDict):
    """One image or frame: what `datasets.Image` stores, and a digest."""

    bytes: bytes | None
    """The encoded image; None: it lies at `path`."""
    path: str | None
    """Where it lies; None: it is here."""
    sha256: str | None
    """Of what lies at `path`."""


def stored_image(source: Any, how: Images, limits: ImageLimits) -> StoredImage:
    """What is kept of an image.

    Args:
        source: as `load_image` takes it.
        how: "bytes" or "reference".
        limits: caps for the encoded image.

    Raises:
        ImageError: it cannot be read.
        ConfigError: it is to be kept as a reference, and lies in no file.
    """
    if how == "reference":
        path = _path_of(source)
        return StoredImage(bytes=None, path=path, sha256=_digest(read_encoded(path, limits=limits)))
    encoded = _as_png(source, limits) if isinstance(source, Image.Image) else read_encoded(source, limits=limits)
    return StoredImage(bytes=encoded, path=None, sha256=None)


def readable(stored: StoredImage, limits: ImageLimits) -> Mapping[str, Any]:
    """A source for `load_image`; what is a reference is read, and compared with its digest, when it is asked for."""
    return stored if stored["bytes"] is not None else ReferencedImage(stored, limits)


@final
class ReferencedImage(Mapping[str, Any]):
    """`{"bytes": ...}` of a file that is read when somebody looks; a mapping, because `load_image` takes one.

    Looking raises an ImageError where the file is gone (`image_missing`) or another one (`image_changed`).
    """

    def __init__(self, stored: StoredImage, limits: ImageLimits) -> None:
        self.stored, self.limits = stored, limits

    def __getitem__(self, key: str) -> Any:
        if key != "bytes":
            raise KeyError(key)
        return self._encoded

    def __iter__(self) -> Iterator[str]:
        return iter(("bytes",))

    def __len__(self) -> int:
        return 1

    @cached_property
    def _encoded(self) -> bytes:
        path = self.stored["path"]
        assert path is not None, "an image is kept, or its path is"
        encoded = read_encoded(path, limits=self.limits)
        if _digest(encoded) != self.stored["sha256"]:
            raise ImageError(
                f"the file {path} is another one than when the rows were packed (its SHA-256 differs); put the old one "
                "back, or pack again",
                "image_changed",
            )
        return encoded


def kept_options(ref: MediaRef) -> str:
    """The keys that size a medium, as JSON."""
    kept = {key: ref.options[key] for key in KEYS if ref.options.get(key) is not None}
    return json.dumps(kept, sort_keys=True, default=_number)


def _number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise ConfigError(f"{value!r} stands beside an image as one of {', '.join(KEYS)}; give a number")


def _path_of(source: Any) -> str:
    """Where an image lies, whatever folder its reader runs in."""
    if isinstance(source, Mapping) and source.get("bytes") is None and source.get("path") is not None:
        return _path_of(source["path"])
    if isinstance(source, Path):
        return str(source.expanduser().absolute())
    if isinstance(source, str) and not source.startswith("data:"):
        return source if "://" in source[:32] else str(Path(source).absolute())
    raise ConfigError(
        f"an image given as {type(source).__name__} lies in no file that a store could refer to; keep images='bytes'"
    )


def _as_png(image: Image.Image, limits: ImageLimits) -> bytes:
    """Upright RGB, as the collator would see it: pixel for pixel the same when it is read back."""
    file = io.BytesIO()
    load_image(image, limits=limits).save(file, "PNG", compress_level=PNG_EFFORT)
    return file.getvalue()


def _digest(encoded: bytes) -> str:
    return hashlib.sha256(encoded).hexdigest()
