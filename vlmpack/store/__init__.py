"""Lengths and rows ahead of training: lengths measured from image headers, rows planned and written to files."""

from __future__ import annotations

from vlmpack.store.cache import LengthCache
from vlmpack.store.folder import is_unfinished_store
from vlmpack.store.manifest import LEFT_OUT, Manifest, is_store
from vlmpack.store.measure import measure_lengths
from vlmpack.store.planning import StoreSettings
from vlmpack.store.read import PackedDataset
from vlmpack.store.records import IMAGES
from vlmpack.store.symbols import tree_of, why_no_marks
from vlmpack.store.write import Progress, write_rows

__all__ = [
    "IMAGES",
    "LEFT_OUT",
    "LengthCache",
    "Manifest",
    "PackedDataset",
    "Progress",
    "StoreSettings",
    "is_store",
    "is_unfinished_store",
    "measure_lengths",
    "tree_of",
    "why_no_marks",
    "write_rows",
]
