"""Digests of samples and processors: cache keys for lengths, identities of stored samples, processor fingerprints.

Keys are for the cache of lengths. A key is a digest of everything that determines a sample's length. For an image, that
is only its height, its width and any keys beside it that set another size. An image that is moved, or re-encoded in the
same size, keeps its key. Sample digests cover everything that the collator reads: text, options, id, and the
bytes of media, wherever they are stored.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
from PIL import Image

from vlmpack.collate.collator import VLMCollator
from vlmpack.collate.processor_metadata import ProcessorMetadata, parts_of, pixel_bounds
from vlmpack.data.digest import content_digest
from vlmpack.data.formats import sample_id_of
from vlmpack.data.images import ImageLimits, load_image, read_encoded, read_size
from vlmpack.data.processor import settings_of
from vlmpack.data.videos import VideoLimits, open_video
from vlmpack.errors import SampleError
from vlmpack.layout.batch import TEACHER

RULES = 9
"""Increase this with every change that alters the length of a sample."""
DIGEST_BYTES = 16


def settings_key(collator: VLMCollator, *, has_marks: bool = False) -> bytes:
    """Compute the digest of everything besides the samples that determines lengths, and marks if entries have them."""
    parts, videos = parts_of(collator.processor), collator.videos
    tokenizer: Any = [parts.tokenizer.get_vocab(), parts.tokenizer.init_kwargs]
    if parts.tokenizer.is_fast:  # everything except the state left by its last call
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
        "video_processor": None if parts.video_processor is None else parts.video_processor.to_dict(),
        "video_files": [videos.sampling, videos.file_limits],
        "collator": [collator.train_on, collator.max_length, collator.overlength, collator.markers],
        "messages": [collator.add_stop, collator.ignored_keys],
        "marks": has_marks,
    }
    return _digest(content, default=str)


def sample_key(feature: Any, settings: bytes, collator: VLMCollator, *, has_marks: bool = False) -> bytes | None:
    """Compute a sample's key under the given settings.

    Args:
        feature: the sample.
        settings: result of `settings_key`.
        collator: reads the sample.
        has_marks: include the content of media in the key, not only their sizes.

    Returns:
        16 bytes, or None. A tokenized sample gets no key, since that would not save time. Other samples get none if an
        image cannot be read, columns contradict each other, a value cannot be written as JSON, or they hold audio or a
        video file.
    """
    try:
        content = _content_of(feature, collator, partial(read_size, limits=collator.limits), _no_key)
        if has_marks:
            content += _content_of(feature, collator, partial(content_sums, limits=collator.limits), _no_key)[-2:]
        return _digest(content, key=settings, default=_plain)
    except (TypeError, ValueError, RecursionError):
        return None


def sample_digest(sample: Any, collator: VLMCollator) -> str:
    """Compute the digest of a sample's whole content: 32 hexadecimal digits.

    Equal content has equal digests: a file, its bytes and its data URI count as the same. Columns that the collator
    does not read are left out, unless the sample cannot be read as a conversation.

    Args:
        sample: a sample that the collator takes, or the SampleError in its place.
        collator: provides the limits for images.
    """
    read = partial(content_sums, limits=collator.limits), partial(_file_sums, limits=collator.videos.file_limits)
    try:
        content = [sample_id_of(sample), *_content_of(sample, collator, *read)]
        teacher = [content_digest(sample[name]) for name in TEACHER if sample.get(name) is not None]
        return _digest(content + teacher, default=_plain).hex()
    except (TypeError, ValueError, RecursionError):  # a bad sample, or a tokenized one
        return content_digest(sample)


def _content_of(
    feature: Any, collator: VLMCollator, read: Callable[[Any], Any], read_file: Callable[[Any], Any]
) -> list[Any]:
    """List the content of a sample, with the result of `read` for images and frames and of `read_file` for video files.

    Raises:
        TypeError: the sample is not a conversation, is already tokenized, or holds audio.
        SampleError: its columns contradict each other.
    """
    if not isinstance(feature, Mapping) or feature.get("input_ids") is not None:
        raise TypeError("no conversation")
    row = collator.encoder.read(feature)
    if row.media["audio"]:
        raise TypeError("audio is measured each time: counting it takes its length alone")
    images = [[read(ref.source), ref.options] for ref in row.media["image"]]
    videos = [
        [list(map(read, ref.source)) if isinstance(ref.source, list | tuple) else read_file(ref.source), ref.options]
        for ref in row.media["video"]
    ]
    objects = [] if row.objects is None else [vars(row.objects)]
    return [row.messages, row.plain, row.turn_weights, row.template_options, *objects, images, videos]


def _no_key(video: Any) -> Any:
    raise TypeError("the header of a file of a video is measured each time: reading it is all that measuring takes")


def _digest(content: Any, *, default: Callable[[Any], Any], key: bytes = b"") -> bytes:
    """Hash JSON without sorting keys, because a template may write a mapping in its own order."""
    text = json.dumps(content, default=default, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES, key=key).digest()


def _plain(value: Any) -> Any:
    """Convert values in datasets that JSON does not know."""
    if isinstance(value, np.generic | np.ndarray):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} has no place in a key")


def content_sums(source: Any, limits: ImageLimits) -> Any:
    """Return an image's length in bytes, CRC-32 and Adler-32, preceded by its size if it is already decoded.

    These take a third of the time of SHA-256, and suffice against accidents.

    Args:
        source: a source that `load_image` accepts.
        limits: size limits for images.

    Returns:
        A list of numbers, or the reason's slug if the image cannot be read.
    """
    try:
        if isinstance(source, Image.Image):
            image = load_image(source, limits=limits)
            data, size = image.tobytes(), [image.size]
        else:
            data, size = read_encoded(source, limits=limits), []
    except SampleError as error:
        return error.reason
    return [*size, len(data), zlib.crc32(data), zlib.adler32(data)]


def _file_sums(video: Any, limits: VideoLimits) -> Any:
    """Return the same sums for a video file, without holding it in memory."""
    length, crc, adler = 0, 0, 1
    try:
        with open_video(video, limits=limits) as file:
            while data := file.read(2**20):
                length, crc, adler = length + len(data), zlib.crc32(data, crc), zlib.adler32(data, adler)
    except SampleError as error:
        return error.reason
    return ["file", length, crc, adler]


# ---------------------------------------------------------------------- the processor

IMAGE_SETTINGS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb", "rescale_factor", "resample")
"""Settings of an image processor, besides its sizes."""
_OF_TOKENS = ("_token", "_id", "_start", "_end", "vocab_size", "frame_timestamps", "seconds_per_grid")
"""Endings of the `ProcessorMetadata` fields that determine tokens, besides vocabulary and template."""
_SIZES = ("patch_size", "merge_size", "temporal_patch_size")
PROBE = "The total is 75,000 Rp.\n\n  Größe 3½\u3000合計：１２３円 👍🏽 <|im_start|>user\nfoo_bar\t\\n 1e-5"
"""A text for which tokenizers with the same vocabulary may still differ: merges, numbers, spaces, normalization."""


COLLATOR_SETTINGS = (
    *("slots", "share_prefixes", "max_length", "overlength", "train_on", "on_bad", "markers", "add_stop"),
    *("ignored_keys", "limits", "sampling"),
)
"""Settings of a collator, besides the processor, that determine which samples are used, their tokens and targets."""


def collator_settings(collator: VLMCollator) -> dict[str, Any]:
    """Return the values of `COLLATOR_SETTINGS`."""
    values = {"sampling": collator.videos.rule}
    return {name: values.get(name, getattr(collator, name, None)) for name in COLLATOR_SETTINGS}


def as_json(content: Any) -> Any:
    """Return content as it is read back from JSON: sets as sorted lists, dataclasses as dictionaries."""
    return json.loads(json.dumps(content, default=_json_value))


def _json_value(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value)
    return value.item() if isinstance(value, np.generic) else asdict(value)


def fingerprint(collator: VLMCollator) -> dict[str, Any]:
    """Describe the parts of a collator's processor that determine tokens and patches, as JSON. Texts become digests.

    Classes are left out: images are stored encoded, and the image processors of one model family, with or without
    torchvision, make the same patches with the same settings.
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
    if metadata.by_processor:  # any of its settings may have an effect
        return {"settings": digest_of(settings)[:16]}
    fewest, most = pixel_bounds(image_processor)
    return {
        **{name: settings.get(name) for name in IMAGE_SETTINGS},
        **{name: [float(value) for value in getattr(image_processor, name)] for name in ("image_mean", "image_std")},
        **{name: getattr(metadata, name) for name in _SIZES},
        "min_pixels": fewest,
        "max_pixels": most,
    }


def digest_of(content: Any) -> str:
    """Return the SHA-256 of JSON, independent of its spaces and of the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def differences(stored: Mapping[str, Any], current: Mapping[str, Any], name: str = "") -> Iterator[str]:
    """Yield a line for each difference between two descriptions."""
    for key in sorted({*stored, *current}):
        before, now, path = stored.get(key), current.get(key), f"{name}{key}"
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            yield from differences(before, now, f"{path}.")
        elif before != now:
            yield f"{path} was {json.dumps(before)} and is {json.dumps(now)}"
