"""The content of samples: keys of their lengths, digests of stored samples, and what samples begin with.

input_ids    a b <image> <image> <image> c d          placeholders of every image are the same id
symbols      a b 7f03..  7f03..  7f03..  c d          a number of the image's bytes and its grid

Keys are for the cache of lengths. Of an image only height and width enter, and the keys beside it that choose another
size: an image that is encoded again in its old size is found again, wherever it lies. Where shared prefixes are looked
for, sums of the bytes enter too. Other settings and other content have other keys: nothing goes stale.

Digests are of all that the collator reads: text, options, id, and the bytes of media in any place.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from math import prod
from typing import Any

import numpy as np
import torch
from PIL import Image

from vlmpack.collate.assemble import media_table
from vlmpack.collate.collator import VLMCollator, sample_id_of
from vlmpack.collate.conversation import read_conversation
from vlmpack.collate.encoded import Encoded, Visual
from vlmpack.collate.processor_metadata import AUDIO_FIELDS, TEMPLATE_FIELDS, ProcessorMetadata, parts_of
from vlmpack.data.images import ImageError, ImageLimits, load_image, read_encoded, read_size
from vlmpack.data.processor import settings_of
from vlmpack.data.videos import VideoLimits, open_video
from vlmpack.errors import ConfigError, Refusal
from vlmpack.families.registry import family_of_processor
from vlmpack.layout.batch import HostMetadata
from vlmpack.layout.media import IMAGE, VIDEO
from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.row import PackedRow
from vlmpack.layout.segments import Segments
from vlmpack.layout.sharing import find_prefix_tree
from vlmpack.loading.resumable import digest_of
from vlmpack.plan.prefix_groups import PrefixMarks

RULES = 4
"""To be raised with every change that gives the same sample other lengths."""
DIGEST_BYTES = 16
STRIDE = 61
"""Of the values of pixels that came cut into patches, every so manieth is summed up."""


# ---------------------------------------------------------------------- keys of lengths


def settings_key(collator: VLMCollator, *, has_marks: bool = False) -> bytes:
    """Compute the digest of everything besides the samples that decides lengths, and marks if entries have them."""
    parts, metadata = parts_of(collator.processor), asdict(collator.metadata)
    metadata["newline_ids"] = sorted(collator.metadata.newline_ids)
    unused = () if collator.metadata.has_audio else AUDIO_FIELDS
    if collator.metadata.by_processor:
        metadata["settings"] = settings_of(collator.processor) if collator.metadata.has_vision else None
    else:
        unused = (*unused, *TEMPLATE_FIELDS)
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
        "metadata": {name: value for name, value in metadata.items() if name not in unused},
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
    try:
        read = partial(content_sums, limits=collator.limits), partial(_file_sums, limits=collator.file_rules.limits)
        return _digest([sample_id_of(sample), *_content_of(sample, collator, *read)], default=_plain).hex()
    except (Refusal, ConfigError, TypeError, ValueError, RecursionError):  # bad, or tokenized before
        return digest_of(sample)


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
    if row.audios:
        raise TypeError("audio is measured each time: counting it takes its length alone")
    images = [[read(ref.source), ref.options] for ref in row.images]
    videos = [[_frames(ref.source, read, read_file), ref.options] for ref in row.videos]
    return [row.messages, row.plain, row.trained_turns, row.template_options, images, videos]


def _frames(video: Any, read: Callable[[Any], Any], read_file: Callable[[Any], Any]) -> Any:
    return [read(frame) for frame in video] if isinstance(video, list | tuple) else read_file(video)


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


# ---------------------------------------------------------------------- sums of media


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


# ---------------------------------------------------------------------- what samples begin with


def media_numbers(visuals: Sequence[Visual], limits: ImageLimits) -> list[int]:
    """Return a number of 63 bits for the content and grid of each image or video, which is far above all token ids.

    Args:
        visuals: cut into patches or only measured; their sources are read whole.
        limits: caps for images.
    """
    numbers = []
    for visual in visuals:
        content: list[Any] = [_content(visual, limits), visual.grid, visual.seconds, visual.timestamps]
        content += [visual.runs] if visual.runs else []  # an image beside others may have other tokens than alone
        numbers.append(_number(json.dumps(content).encode()))
    return numbers


def _content(visual: Visual, limits: ImageLimits) -> Sequence[Any]:
    if visual.source is not None:
        source = visual.source.source
        frames = source if isinstance(source, list | tuple) else [source]
        sums = ((content_sums(frame, limits), frame) for frame in frames)
        return [each if isinstance(each, list) else [each, f"{frame!r:.200}"] for each, frame in sums]
    assert visual.pixels is not None, "a medium has a source or pixels"
    values = visual.pixels.detach().reshape(-1)[::STRIDE].double().numpy().tobytes()
    return [len(values), zlib.crc32(values), zlib.adler32(values)]


def _number(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1


def tree_of(samples: Sequence[Encoded], *, limits: ImageLimits, min_shared: int) -> PrefixTree | None:
    """Find the prefix tree of the row of some samples, without their pixels; None: they share nothing.

    Args:
        samples: of a row without padding, in its order; sources of their media are read whole.
        limits: caps for images.
        min_shared: of `SharePrefixes`.
    """
    if not samples:
        return None
    images = [image for sample in samples for image in sample.images]
    videos = [video for sample in samples for video in sample.videos]
    segments = Segments.from_lengths([sample.num_tokens for sample in samples])
    columns = (np.concatenate([sample.input_ids for sample in samples]), np.concatenate([s.types for s in samples]))
    ids, types = (torch.from_numpy(column).view(1, -1) for column in columns)
    metadata = HostMetadata(lengths=segments.lengths, media=media_table(samples))
    row = PackedRow(input_ids=ids, segments=segments, mm_token_type_ids=types, metadata=metadata)
    numbers = {"images": media_numbers(images, limits), "videos": media_numbers(videos, limits)}
    return find_prefix_tree(row, **numbers, min_shared=min_shared)


def marks_of(sample: Encoded, metadata: ProcessorMetadata, limits: ImageLimits) -> PrefixMarks:
    """Mark what a sample begins with, for `groups_of_marks`.

    Args:
        sample: cut into patches or only measured; sources of its media are read whole.
        metadata: of the processor.
        limits: caps for images.
    """
    symbols = np.array(sample.input_ids, np.int64)
    ends, patches = [], []
    for kind, visuals in ((IMAGE, sample.images), (VIDEO, sample.videos)):
        places = np.flatnonzero(sample.types == kind)
        tokens = [sum(v.runs) if v.runs else prod(v.patch_grid) // metadata.merge_size**2 for v in visuals]
        symbols[places] = np.repeat(media_numbers(visuals, limits), tokens)
        ends += (places[np.cumsum(tokens) - 1] + 1).tolist() if visuals else []
        patches += [num_patches(visual) for visual in visuals]
    if metadata.by_processor and metadata.has_vision:
        for start, stop in sample.media_runs:
            symbols[start:stop] = _number(symbols[start:stop].tobytes())
    media = np.array(sorted(zip(ends, patches, strict=True)), np.int64).reshape(-1, 2)
    is_target = sample.labels >= 0
    turn_ends = np.flatnonzero(is_target[1:] != is_target[:-1]) + 1
    return PrefixMarks.of(symbols, turn_ends, media[:, 0], media[:, 1])


def num_patches(visual: Visual) -> int:
    """Patches of an image or video; its tokens, of families that are measured by these."""
    return sum(visual.runs) if visual.grid is None or visual.runs else prod(visual.grid)


# ---------------------------------------------------------------------- what has no such content


def check_storable(collator: VLMCollator) -> None:
    """Refuse a collator whose samples are more than ids, labels, images and videos.

    Raises:
        ConfigError: they may have audio, or have prompts whose tokens attend to each other both ways.
    """
    metadata, name = collator.metadata, type(collator.processor).__name__
    more = f"samples of a {name} may have audio" if metadata.has_audio else None
    if metadata.by_processor and metadata.has_vision and family_of_processor(collator.processor).token_columns:
        more = f"the prompts of a {name} see all of themselves, and stored rows do not say where they end"
    if more:
        raise ConfigError(
            f"stored rows hold ids, labels, images and videos, but {more}; train from the data set itself: "
            "PackedStream and measure_lengths take every family"
        )


def why_no_marks(collator: VLMCollator) -> str | None:
    """Return the reason why a collator's samples are not marked, in words; None: they are."""
    if not collator.metadata.has_audio:
        return None
    return f"samples of a {type(collator.processor).__name__} may have audio, whose content is not summed up"
