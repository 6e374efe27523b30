"""What is done before training: lengths measured from image headers, and rows planned and stored ahead."""

from __future__ import annotations

from vlmpack.offline.cache import LengthCache
from vlmpack.offline.manifest import Manifest
from vlmpack.offline.measure import lengths_of, measure_lengths
from vlmpack.offline.read import PackedDataset
from vlmpack.offline.settings import StoreSettings
from vlmpack.offline.write import write_rows

__all__ = [
    "LengthCache",
    "Manifest",
    "PackedDataset",
    "StoreSettings",
    "lengths_of",
    "measure_lengths",
    "write_rows",
]
