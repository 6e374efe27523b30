"""Training samples: stored conversations in any format, CORD v2 receipts, and their media."""

from __future__ import annotations

from vlmpack.data.cord import json2token, to_conversation, token2json
from vlmpack.data.formats import branch_turns
from vlmpack.data.images import ImageLimits
from vlmpack.data.mixed import MixedDataset, hold_out, mix_datasets
from vlmpack.data.open import OpenDataset, open_dataset
from vlmpack.data.processor import load_processor, save_processor
from vlmpack.data.videos import VideoLimits

__all__ = [
    "ImageLimits",
    "MixedDataset",
    "OpenDataset",
    "VideoLimits",
    "branch_turns",
    "hold_out",
    "json2token",
    "load_processor",
    "mix_datasets",
    "open_dataset",
    "save_processor",
    "to_conversation",
    "token2json",
]
