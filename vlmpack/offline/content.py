"""What a sample's lengths depend on, as a key: the settings, its text, and the size of its images.

    settings   collator, processor, tokenizer, chat template, versions of what renders and tokenises
    text       messages as the chat template gets them, or prompt and completion as they stand
    media      height and width as the header tells them, and the keys beside them that choose another size

Only image sizes enter the key, never pixels: an image that is drawn anew in its old size is found again, wherever it
lies, and one of another size is never taken for it, whatever its file is called and whenever it was written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import numpy as np

from vlmpack.collate import Markers, VLMCollator, parts_of, read_conversation
from vlmpack.data import ImageError, ImageLimits, read_size
from vlmpack.errors import Refusal

RULES = 1
"""To be raised with every change that gives the same sample other lengths."""
KEY_BYTES = 16


def settings_key(collator: VLMCollator, *, estimate: bool = False) -> bytes:
    """A digest of everything besides the samples themselves that decides lengths."""
    parts = parts_of(collator.processor)
    metadata = {**asdict(collator.metadata), "newline_ids": sorted(collator.metadata.newline_ids)}
    return _digest(
        {
            "versions": [RULES, version("transformers"), version("tokenizers")],
            "processor": type(collator.processor).__name__,
            "chat_template": collator.processor.chat_template,
            "special_tokens": {name: str(token) for name, token in parts.tokenizer.special_tokens_map.items()},
            "tokenizer": _tokenizer(parts.tokenizer),
            "image_processor": None if parts.image_processor is None else parts.image_processor.to_dict(),
            "metadata": metadata,
            "limits": asdict(collator.limits),
            "collator": [collator.train_on, collator.max_length, collator.overlength, collator.markers],
            "estimate": estimate,
        },
        default=str,
    )


def sample_key(
    feature: Any, settings: bytes, limits: ImageLimits, *, has_vision: bool, markers: Markers = "auto"
) -> bytes | None:
    """The key of one sample under settings; to a model that has no vision `<image>` in a text is text.

    Returns:
        16 bytes. None: the sample is not worth a key, as it was tokenised before; or it has none, as an image cannot
        be read, its columns contradict each other, or it holds what JSON cannot.
    """
    if not isinstance(feature, Mapping) or feature.get("input_ids") is not None:
        return None
    try:
        row = read_conversation(feature, has_vision=has_vision, markers=markers)
        images = [[read_size(ref.source, limits=limits), ref.options] for ref in row.images]
        videos = [[_frame_sizes(ref.source, limits), ref.options] for ref in row.videos]
        text = [row.messages, row.plain, row.trained_turns, row.template_options]
        return _digest([*text, images, videos], key=settings, default=plain)
    except (Refusal, ImageError, TypeError, ValueError, RecursionError):
        return None


def _frame_sizes(video: Any, limits: ImageLimits) -> list[tuple[int, int]]:
    if not isinstance(video, list | tuple):
        raise TypeError("only a list of frames has sizes")
    return [read_size(frame, limits=limits) for frame in video]


def _tokenizer(tokenizer: Any) -> Any:
    """Everything about a tokenizer except what its last call left behind."""
    if not tokenizer.is_fast:
        return [tokenizer.get_vocab(), tokenizer.init_kwargs]
    return {**json.loads(tokenizer.backend_tokenizer.to_str()), "truncation": None, "padding": None}


def _digest(content: Any, *, default: Any, key: bytes = b"") -> bytes:
    """Not sorted: a template may write a mapping in its own order."""
    text = json.dumps(content, default=default, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES, key=key).digest()


def plain(value: Any) -> Any:
    """What data sets hold besides JSON's own types."""
    if isinstance(value, np.generic | np.ndarray):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} has no place in a key")
