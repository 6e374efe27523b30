"""Samples to train on: any stored conversations, receipts of CORD v2, and their images."""

from __future__ import annotations

from vlmpack.data.archive import parse_lines
from vlmpack.data.branches import BRANCH_COLUMN, PAIRS_COLUMN, Branches, branch_turns
from vlmpack.data.cord import CordDataset, json2token, load_cord, to_conversation, token2json
from vlmpack.data.images import DEFAULT_LIMITS, ImageError, ImageLimits, load_image, read_encoded, read_size
from vlmpack.data.json_files import JSON_FILES
from vlmpack.data.mixed import MixedDataset, mix_datasets
from vlmpack.data.open import OpenDataset, open_dataset
from vlmpack.data.processor import (
    is_saved_alone,
    load_processor,
    save_processor,
    settings_of,
    without_parts,
    without_video,
)
from vlmpack.data.readers import StoredRows
from vlmpack.data.tool_calls import CALLING, calls_in, read_tools, with_arguments, without_nulls
from vlmpack.data.videos import (
    DEFAULT_VIDEO_LIMITS,
    VideoHeader,
    VideoLimits,
    decode_frames,
    open_video,
    read_video_header,
)

__all__ = [
    "BRANCH_COLUMN",
    "CALLING",
    "DEFAULT_LIMITS",
    "DEFAULT_VIDEO_LIMITS",
    "JSON_FILES",
    "PAIRS_COLUMN",
    "Branches",
    "CordDataset",
    "ImageError",
    "ImageLimits",
    "MixedDataset",
    "OpenDataset",
    "StoredRows",
    "VideoHeader",
    "VideoLimits",
    "branch_turns",
    "calls_in",
    "decode_frames",
    "is_saved_alone",
    "json2token",
    "load_cord",
    "load_image",
    "load_processor",
    "mix_datasets",
    "open_dataset",
    "open_video",
    "parse_lines",
    "read_encoded",
    "read_size",
    "read_tools",
    "read_video_header",
    "save_processor",
    "settings_of",
    "to_conversation",
    "token2json",
    "with_arguments",
    "without_nulls",
    "without_parts",
    "without_video",
]
