"""What is done before training: lengths measured from image headers, and rows planned and stored ahead."""

from __future__ import annotations

from vlmpack.offline.cache import LengthCache
from vlmpack.offline.measure import lengths_of, measure_lengths

__all__ = ["LengthCache", "lengths_of", "measure_lengths"]
