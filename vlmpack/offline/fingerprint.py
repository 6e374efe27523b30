"""What of a processor decides the tokens and patches of a row: compared when a store is continued, and when it is read.

Two processors with the same fingerprint write the same rows. Classes are no part of it: images are stored encoded, and
whichever image processor a model comes with, with torchvision or without, cuts them by the same settings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from vlmpack.collate import ProcessorMetadata, VLMCollator, parts_of

Fingerprint = dict[str, Any]
"""Parts by name, as JSON has them; texts and vocabularies by their digests."""

SETTINGS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb", "rescale_factor", "resample")
"""Of an image processor, besides its sizes."""
TOKENS = (
    "image_token_id",
    "video_token_id",
    "vision_start_id",
    "vision_end_id",
    "turn_start_id",
    "turn_end_id",
    "eos_token",
    "pad_token_id",
    "vocab_size",
    "frame_timestamps",
    "seconds_per_grid",
)
"""Of the metadata that a collator read."""
PROBE = "The total is 75,000 Rp.\n\n  Größe 3½\u3000合計：１２３円 👍🏽 <|im_start|>user\nfoo_bar\t\\n 1e-5"
"""A text on whose tokens tokenizers of one vocabulary may still differ: merges, numbers, spaces, normalisation."""


def fingerprint(collator: VLMCollator) -> Fingerprint:
    """The parts of a collator's processor."""
    metadata, parts = collator.metadata, parts_of(collator.processor)
    tokenizer = parts.tokenizer
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]))
    template = collator.processor.chat_template
    return {
        "vocabulary": _digest(vocabulary),
        "tokenizer": _digest(json.dumps(tokenizer(PROBE)["input_ids"])),
        "chat_template": None if template is None else _digest(json.dumps(template)),
        "tokens": {name: metadata.__dict__[name] for name in TOKENS},
        "images": _image_settings(parts.image_processor, metadata) if metadata.has_vision else None,
    }


def differences(stored: Mapping[str, Any], seen: Mapping[str, Any], name: str = "") -> Iterator[str]:
    """One line for each part that two descriptions do not have in common."""
    for key in sorted({*stored, *seen}):
        one, other, path = stored.get(key), seen.get(key), f"{name}{key}"
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from differences(one, other, f"{path}.")
        elif one != other:
            yield f"{path} was {json.dumps(one)} and is {json.dumps(other)}"


def _image_settings(image_processor: Any, metadata: ProcessorMetadata) -> dict[str, Any]:
    settings = image_processor.to_dict()
    size = image_processor.size
    return {
        **{name: _plain(settings.get(name)) for name in SETTINGS},
        "min_pixels": size["shortest_edge"],
        "max_pixels": size["longest_edge"],
        "image_mean": [float(value) for value in image_processor.image_mean],
        "image_std": [float(value) for value in image_processor.image_std],
        "patch_size": metadata.patch_size,
        "merge_size": metadata.merge_size,
        "temporal_patch_size": metadata.temporal_patch_size,
    }


def _plain(value: Any) -> Any:
    """An enumeration's number for one of its members, so that JSON holds it."""
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
