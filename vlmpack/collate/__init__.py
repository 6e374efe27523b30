"""Sample dicts → a padded batch or a packed row, each sample checked on its own."""

from __future__ import annotations

from vlmpack.collate.collator import VLMCollator
from vlmpack.collate.ledger import Ceiling, Ledger, read_ledger
from vlmpack.data.images import ImageError, ImageLimits, load_image

__all__ = ["Ceiling", "ImageError", "ImageLimits", "Ledger", "VLMCollator", "load_image", "read_ledger"]
