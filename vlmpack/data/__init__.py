"""Samples to train on: any stored conversations, receipts of CORD v2, and their images."""

from __future__ import annotations

from vlmpack.data.arithmetic import contradictions
from vlmpack.data.cord import CordDataset, load_cord
from vlmpack.data.images import DEFAULT_LIMITS, ImageError, ImageLimits, load_image, read_encoded, read_size
from vlmpack.data.json_tokens import json2token, to_conversation, token2json
from vlmpack.data.metrics import (
    FieldCounts,
    count_fields,
    edit_distance,
    field_f1,
    normalised_edit_distance,
    nted_accuracy,
)
from vlmpack.data.open import OpenDataset, open_dataset
from vlmpack.data.pretrained import is_saved_alone, load_processor
from vlmpack.data.processor import CHAT_TEMPLATE, tiny_processor
from vlmpack.data.readers import JSON_FILES, StoredRows
from vlmpack.data.receipts import SMALLEST_LEGIBLE, SyntheticReceipts, parse_lines

__all__ = [
    "CHAT_TEMPLATE",
    "DEFAULT_LIMITS",
    "JSON_FILES",
    "SMALLEST_LEGIBLE",
    "CordDataset",
    "FieldCounts",
    "ImageError",
    "ImageLimits",
    "OpenDataset",
    "StoredRows",
    "SyntheticReceipts",
    "contradictions",
    "count_fields",
    "edit_distance",
    "field_f1",
    "is_saved_alone",
    "json2token",
    "load_cord",
    "load_image",
    "load_processor",
    "normalised_edit_distance",
    "nted_accuracy",
    "open_dataset",
    "parse_lines",
    "read_encoded",
    "read_size",
    "tiny_processor",
    "to_conversation",
    "token2json",
]
