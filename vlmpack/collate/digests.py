"""Digests of samples and processors: keys of lengths, what a stored sample was, and which processor packed it.

Keys are for the cache of lengths: a digest of everything that decides them. Of an image only height and width enter,
and the keys beside it that choose another size: an image that is encoded again in its old size is found again, wherever
it lies. Digests of samples are of all that the collator reads: text, options, id, and the bytes of media in any place.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from vlmpack.collate.collator import VLMCollator, sample_id_of
from vlmpack.collate.processor_metadata import ProcessorMetadata, parts_of, pixel_bounds
from vlmpack.data.images import ImageError, ImageLimits, load_image, read_encoded, read_size
from vlmpack.data.messages import read_conversation
from vlmpack.data.processor import settings_of
from vlmpack.data.videos import VideoLimits, open_video
from vlmpack.errors import ConfigError, Refusal, SampleError

RULES = 5
"""To be raised with every change that gives the same sample other lengths."""
DIGEST_BYTES = 16


def settings_key(collator: VLMCollator, *, has_marks: bool = False) -> bytes:
    """Compute the digest of everything besides the samples that decides lengths, and marks if entries have them."""
    parts = parts_of(collator.processor)
    tokenizer: Any = [parts.tokenizer.get_vocab(), parts.tokenizer.init_kwargs]
    if parts.tokenizer.is_fast:  # all but what its last call left behind
        tokenizer = {**json.loads(parts.tokenizer.backend_tokenizer.to_str()), "truncation": None, "padding": None}
    content = {
        "versions": [RULES, version("transformers"), version("tokenizers")],
        "processor": type(collator.processor).__name__,
        "chat_template": collator.processor.chat_template,
        "special_tokens": {name: str(token) for name, token in parts.tokenizer.special_tokens_map.items()},
        "tokenizer": tokenizer,
        "image_processor": None if parts.image_processor is None else parts.image_processor.to_dict(),
        "settings": settings_of(collator.processor) if collator.metadata.has_vision else None,
        "metadata": asdict(collator.metadata) | {"newline_ids": sorted(collator.metadata.newline_ids)},
        "limits": asdict(collator.limits),
        "video_files": asdict(collator.file_rules),
        "collator": [collator.train_on, collator.max_length, collator.overlength, collator.markers],
        "messages": [collator.add_stop, collator.ignored_keys],
        "marks": has_marks,
    }
    return _digest(content, default=str)


def sample_key(feature: Any, settings: bytes, collator: VLMCollator, *, has_marks: bool = False) -> bytes | None:
    """Compute the key of one sample under settings; to a model that has no vision `<image>` in a text is text.

    Args:
        feature: the sample.
        settings: of `settings_key`.
        collator: reads the sample.
        has_marks: the content of media enters the key, not only their sizes.

    Returns:
        16 bytes. None: the sample is not worth a key, as it was tokenized before; or it has none, as an image cannot
        be read, its columns contradict each other, or it holds what JSON cannot.
    """
    try:
        content = _content_of(feature, collator, partial(read_size, limits=collator.limits), _no_key)
        if has_marks:
            content += _content_of(feature, collator, partial(content_sums, limits=collator.limits), _no_key)[-2:]
        return _digest(content, key=settings, default=_plain)
    except (Refusal, ImageError, TypeError, ValueError, RecursionError):
        return None


def sample_digest(sample: Any, collator: VLMCollator) -> str:
    """Compute the digest of a sample's whole content: 32 hexadecimal digits.

    Equal for equal content: a file, its bytes and a data URI of them count alike. Columns that the collator does not
    read are left out, unless the sample cannot be read as a conversation.

    Args:
        sample: as the collator takes it, or the SampleError that a data set raised in its place.
        collator: its limits hold for images.
    """
    read = partial(content_sums, limits=collator.limits), partial(_file_sums, limits=collator.file_rules.limits)
    try:
        return _digest([sample_id_of(sample), *_content_of(sample, collator, *read)], default=_plain).hex()
    except (Refusal, ConfigError, TypeError, ValueError, RecursionError):  # bad, or tokenized before
        pass
    try:
        return _digest(sample, default=_any_content).hex()
    except (TypeError, ValueError, RuntimeError) as error:  # of what it is, nothing else can be compared
        return _digest([type(sample).__name__, type(error).__name__], default=_plain).hex()


def _content_of(
    feature: Any, collator: VLMCollator, read: Callable[[Any], Any], read_file: Callable[[Any], Any]
) -> list[Any]:
    """List what the collator reads of a sample, with the result of `read` for each image and frame, and of `read_file`
    for each file of a video.

    Raises:
        TypeError: it is no conversation, or was tokenized before.
        Refusal: its columns contradict each other.
    """
    if not isinstance(feature, Mapping) or feature.get("input_ids") is not None:
        raise TypeError("no conversation")
    row = read_conversation(
        feature,
        has_vision=collator.metadata.has_vision,
        has_audio=collator.metadata.has_audio,
        markers=collator.markers,
        ignored_keys=collator.ignored_keys,
    )
    if row.media["audio"]:
        raise TypeError("audio is measured each time: counting it takes its length alone")
    images = [[read(ref.source), ref.options] for ref in row.media["image"]]
    videos = [
        [list(map(read, ref.source)) if isinstance(ref.source, list | tuple) else read_file(ref.source), ref.options]
        for ref in row.media["video"]
    ]
    return [row.messages, row.plain, row.turn_weights, row.template_options, images, videos]


def _no_key(video: Any) -> Any:
    raise TypeError("the header of a file of a video is measured each time: reading it is all that measuring takes")


def _digest(content: Any, *, default: Callable[[Any], Any], key: bytes = b"") -> bytes:
    """Hash JSON whose keys are not sorted: a template may write a mapping in the order it has."""
    text = json.dumps(content, default=default, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES, key=key).digest()


def _plain(value: Any) -> Any:
    """Convert what data sets hold besides JSON's types."""
    if isinstance(value, np.generic | np.ndarray):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} has no place in a key")


def _any_content(value: Any) -> Any:
    """Convert whatever else a sample may hold: tensors, media, refusals; of other objects the type counts."""
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return ["tensor", str(value.dtype), value.shape, hashlib.blake2b(data).hexdigest()]
    if isinstance(value, bytes | bytearray):
        return ["bytes", hashlib.blake2b(value).hexdigest()]
    if isinstance(value, SampleError):
        return ["refusal", value.reason, value.detail]
    if isinstance(value, Image.Image):
        return ["image", value.mode, value.size]
    if isinstance(value, Path):
        return str(value)
    return _plain(value) if isinstance(value, np.generic | np.ndarray | Mapping) else type(value).__name__


def content_sums(source: Any, limits: ImageLimits) -> Any:
    """Sum up an image by its length, CRC-32 and Adler-32; its size comes first where it is decoded already.

    They take a third of the time of SHA-256, and are enough against accidents.

    Args:
        source: as `load_image` takes it.
        limits: caps for images.

    Returns:
        A list of numbers; the slug of the reason if it cannot be read.
    """
    try:
        if isinstance(source, Image.Image):
            image = load_image(source, limits=limits)
            data, size = image.tobytes(), [image.size]
        else:
            data, size = read_encoded(source, limits=limits), []
    except ImageError as error:
        return error.reason
    return [*size, len(data), zlib.crc32(data), zlib.adler32(data)]


def _file_sums(video: Any, limits: VideoLimits) -> Any:
    """Sum up a file of a video as an image is summed up, without holding it."""
    length, crc, adler = 0, 0, 1
    try:
        with open_video(video, limits=limits) as file:
            while data := file.read(2**20):
                length, crc, adler = length + len(data), zlib.crc32(data, crc), zlib.adler32(data, adler)
    except ImageError as error:
        return error.reason
    return ["file", length, crc, adler]


# ---------------------------------------------------------------------- the processor

IMAGE_SETTINGS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb", "rescale_factor", "resample")
"""Of an image processor, besides its sizes."""
_OF_TOKENS = ("_token", "_id", "_start", "_end", "vocab_size", "frame_timestamps", "seconds_per_grid")
"""Ends of the names of fields of `ProcessorMetadata` that decide tokens beside vocabulary and template."""
_SIZES = ("patch_size", "merge_size", "temporal_patch_size")
PROBE = "The total is 75,000 Rp.\n\n  Größe 3½\u3000合計：１２３円 👍🏽 <|im_start|>user\nfoo_bar\t\\n 1e-5"
"""A text on whose tokens tokenizers of one vocabulary may still differ: merges, numbers, spaces, normalization."""


def fingerprint(collator: VLMCollator) -> dict[str, Any]:
    """Describe the parts of a collator's processor that decide tokens and patches, as JSON; texts by their digests.

    Classes are no part of it: images are stored encoded, and the image processors of one model family, with torchvision
    or without, cut them by the same settings.
    """
    metadata, parts = collator.metadata, parts_of(collator.processor)
    vocabulary = sorted(parts.tokenizer.get_vocab().items(), key=lambda item: item[1])
    template = collator.processor.chat_template
    return {
        "vocabulary": digest_of(vocabulary)[:16],
        "tokenizer": digest_of(parts.tokenizer(PROBE)["input_ids"])[:16],
        "chat_template": None if template is None else digest_of(template)[:16],
        "tokens": {name: value for name, value in asdict(metadata).items() if name.endswith(_OF_TOKENS)},
        "images": _image_settings(parts.image_processor, metadata) if metadata.has_vision else None,
    }


def _image_settings(image_processor: Any, metadata: ProcessorMetadata) -> dict[str, Any]:
    settings = image_processor.to_dict()
    if metadata.by_processor:  # of which no setting is known to have no effect
        return {"settings": digest_of(settings)[:16]}
    fewest, most = pixel_bounds(image_processor, image_processor.size)
    return {
        **{name: settings.get(name) for name in IMAGE_SETTINGS},
        **{name: [float(value) for value in getattr(image_processor, name)] for name in ("image_mean", "image_std")},
        **{name: getattr(metadata, name) for name in _SIZES},
        "min_pixels": fewest,
        "max_pixels": most,
    }


def digest_of(content: Any) -> str:
    """SHA-256 of JSON, whatever its spaces and the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def differences(stored: Mapping[str, Any], current: Mapping[str, Any], name: str = "") -> Iterator[str]:
    """Yield a line for each part in which two descriptions differ."""
    for key in sorted({*stored, *current}):
        before, now, path = stored.get(key), current.get(key), f"{name}{key}"
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            yield from differences(before, now, f"{path}.")
        elif before != now:
            yield f"{path} was {json.dumps(before)} and is {json.dumps(now)}"
