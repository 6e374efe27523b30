"""Lengths and rows ahead of training: lengths measured from image headers, rows planned and written to files."""

from __future__ import annotations

from vlmpack.store.measure import LengthCache, measure_lengths
from vlmpack.store.read import PackedDataset
from vlmpack.store.write import StoreSettings, write_rows

__all__ = [
    "LengthCache",
    "PackedDataset",
    "StoreSettings",
    "measure_lengths",
    "write_rows",
]
