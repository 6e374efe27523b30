"""Turn sample dicts into a padded batch or a packed row. Each sample is checked on its own."""

from __future__ import annotations

from vlmpack.collate.assemble import SharePrefixes
from vlmpack.collate.buffers import PixelBuffers
from vlmpack.collate.collator import BatchLayout, VLMCollator
from vlmpack.collate.processor_metadata import ProcessorMetadata
from vlmpack.collate.skipped import SkipLimit, SkipLog
from vlmpack.collate.video import FrameSampling

__all__ = [
    "BatchLayout",
    "FrameSampling",
    "PixelBuffers",
    "ProcessorMetadata",
    "SharePrefixes",
    "SkipLimit",
    "SkipLog",
    "VLMCollator",
]
