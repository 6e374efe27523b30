"""What is done before training: lengths measured from image headers, and rows planned and stored ahead."""

from __future__ import annotations

from vlmpack.store.cache import LengthCache
from vlmpack.store.manifest import Manifest
from vlmpack.store.measure import lengths_of, measure_lengths
from vlmpack.store.read import PackedDataset
from vlmpack.store.settings import StoreSettings
from vlmpack.store.write import write_rows

__all__ = [
    "LengthCache",
    "Manifest",
    "PackedDataset",
    "StoreSettings",
    "lengths_of",
    "measure_lengths",
    "write_rows",
]
