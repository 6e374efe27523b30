"""Sample dicts → a padded batch or a packed row, each sample checked on its own."""

from __future__ import annotations

from vlmpack.collate.assemble import SharePrefixes
from vlmpack.collate.buffers import PixelBuffers
from vlmpack.collate.collator import BatchLayout, VLMCollator, sample_id_of
from vlmpack.collate.columns import CONVERSATION_COLUMNS, MEDIA_COLUMNS, MediaRef
from vlmpack.collate.conversation import read_conversation
from vlmpack.collate.encoded import OVERLENGTH, Encoded, Visual
from vlmpack.collate.frame_sampling import FrameSampling
from vlmpack.collate.processor_metadata import AUDIO_FIELDS, TEMPLATE_FIELDS, ProcessorMetadata, parts_of, pixel_bounds
from vlmpack.collate.skipped import SkipLimit, SkipLog, read_skip_log
from vlmpack.collate.vision_keys import VIDEO_KEYS

__all__ = [
    "AUDIO_FIELDS",
    "CONVERSATION_COLUMNS",
    "MEDIA_COLUMNS",
    "OVERLENGTH",
    "TEMPLATE_FIELDS",
    "VIDEO_KEYS",
    "BatchLayout",
    "Encoded",
    "FrameSampling",
    "MediaRef",
    "PixelBuffers",
    "ProcessorMetadata",
    "SharePrefixes",
    "SkipLimit",
    "SkipLog",
    "VLMCollator",
    "Visual",
    "parts_of",
    "pixel_bounds",
    "read_conversation",
    "read_skip_log",
    "sample_id_of",
]
