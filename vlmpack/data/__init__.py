"""Samples to train on: any stored conversations, receipts (CORD v2, or drawn), and measures of what was read.

Nothing is imported until it is used: `import vlmpack.data` loads neither Pillow nor transformers nor datasets.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlmpack.data.arithmetic import contradictions
    from vlmpack.data.conversation import json2token, to_conversation, token2json
    from vlmpack.data.cord import CordDataset, load_cord
    from vlmpack.data.metrics import (
        FieldCounts,
        count_fields,
        edit_distance,
        field_f1,
        normalised_edit_distance,
        nted_accuracy,
    )
    from vlmpack.data.open import OpenDataset, open_dataset
    from vlmpack.data.processor import tiny_processor
    from vlmpack.data.receipts import SyntheticReceipts, parse_lines

__all__ = [
    "CordDataset",
    "FieldCounts",
    "OpenDataset",
    "SyntheticReceipts",
    "contradictions",
    "count_fields",
    "edit_distance",
    "field_f1",
    "json2token",
    "load_cord",
    "normalised_edit_distance",
    "nted_accuracy",
    "open_dataset",
    "parse_lines",
    "tiny_processor",
    "to_conversation",
    "token2json",
]

_FILES = {
    "arithmetic": ("contradictions",),
    "conversation": ("json2token", "to_conversation", "token2json"),
    "cord": ("CordDataset", "load_cord"),
    "metrics": (
        "FieldCounts",
        "count_fields",
        "edit_distance",
        "field_f1",
        "normalised_edit_distance",
        "nted_accuracy",
    ),
    "open": ("OpenDataset", "open_dataset"),
    "processor": ("tiny_processor",),
    "receipts": ("SyntheticReceipts", "parse_lines"),
}
_HOME = {name: file for file, names in _FILES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(import_module(f"{__name__}.{_HOME[name]}"))[name]


def __dir__() -> list[str]:
    return __all__
