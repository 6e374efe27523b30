"""Samples to train on: any stored conversations, receipts of CORD v2, and the processors of models.

Nothing is imported until it is used: `import vlmpack.data` loads neither Pillow nor transformers nor datasets.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlmpack.data.archive import parse_lines
    from vlmpack.data.conversation import json2token, to_conversation, token2json
    from vlmpack.data.cord import CordDataset, load_cord
    from vlmpack.data.open import OpenDataset, open_dataset
    from vlmpack.data.processor import (
        PATCH_SIZES,
        is_saved_alone,
        load_processor,
        processor_class,
        save_processor,
        without_video,
    )

__all__ = [
    "PATCH_SIZES",
    "CordDataset",
    "OpenDataset",
    "is_saved_alone",
    "json2token",
    "load_cord",
    "load_processor",
    "open_dataset",
    "parse_lines",
    "processor_class",
    "save_processor",
    "to_conversation",
    "token2json",
    "without_video",
]

_FILES = {
    "archive": ("parse_lines",),
    "conversation": ("json2token", "to_conversation", "token2json"),
    "cord": ("CordDataset", "load_cord"),
    "open": ("OpenDataset", "open_dataset"),
    "processor": (
        "PATCH_SIZES",
        "is_saved_alone",
        "load_processor",
        "processor_class",
        "save_processor",
        "without_video",
    ),
}
_HOME = {name: file for file, names in _FILES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(import_module(f"{__name__}.{_HOME[name]}"))[name]


def __dir__() -> list[str]:
    return __all__
