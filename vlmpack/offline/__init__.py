"""What is done before training: lengths measured from image headers, and rows planned and stored ahead."""

from __future__ import annotations

from vlmpack.offline.cache import LengthCache
from vlmpack.offline.files import WorkFolder
from vlmpack.offline.manifest import LEFT_OUT, NAME, Manifest
from vlmpack.offline.measure import lengths_of, measure_lengths, undecoded
from vlmpack.offline.media import stored_image
from vlmpack.offline.read import PackedDataset
from vlmpack.offline.settings import StoreSettings
from vlmpack.offline.write import Progress, write_rows

__all__ = [
    "LEFT_OUT",
    "NAME",
    "LengthCache",
    "Manifest",
    "PackedDataset",
    "Progress",
    "StoreSettings",
    "WorkFolder",
    "lengths_of",
    "measure_lengths",
    "stored_image",
    "undecoded",
    "write_rows",
]
