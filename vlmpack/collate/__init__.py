"""Sample dicts → a padded batch or a packed row, each sample checked on its own."""

from __future__ import annotations

from vlmpack.collate.buffers import PixelBuffers
from vlmpack.collate.collator import BatchLayout, VLMCollator, own_id
from vlmpack.collate.columns import CONVERSATION_COLUMNS, MEDIA_COLUMNS, Markers, MediaRef
from vlmpack.collate.conversation import read_conversation
from vlmpack.collate.encoded import OVERLENGTH, Encoded, Visual
from vlmpack.collate.processor_metadata import ProcessorFacts, parts_of
from vlmpack.collate.skipped import Ceiling, Ledger, read_ledger
from vlmpack.collate.vision_keys import VIDEO_KEYS
from vlmpack.data import ImageError, ImageLimits, load_image

__all__ = [
    "CONVERSATION_COLUMNS",
    "MEDIA_COLUMNS",
    "OVERLENGTH",
    "VIDEO_KEYS",
    "BatchLayout",
    "Ceiling",
    "Encoded",
    "ImageError",
    "ImageLimits",
    "Ledger",
    "Markers",
    "MediaRef",
    "PixelBuffers",
    "ProcessorFacts",
    "VLMCollator",
    "Visual",
    "load_image",
    "own_id",
    "parts_of",
    "read_conversation",
    "read_ledger",
]
