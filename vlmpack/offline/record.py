"""One packed row as one row of a parquet file, and back.

    samples          a: text, image, text (5)     b: text (3)
    input_ids        a a a a a b b b              without padding: slots are laid out when the row is read
    labels           . . . a a . b b              not shifted, -100 where nothing is learnt
    cu_seqlens       0 5 8                        where samples start and end
    places           17 4                         of the samples in the data set
    sample_ids       "\\"receipt-17\\"", "4"        their own ids as JSON, or else their places
    digests          "9f...", "04..."             of what the data set held, see `unchanged.py`
    images_per_sample  1 0
    image_info       grid [1, 4, 6], options "{}"                 read without the images
    images           bytes, or path and sha256                    read when the row is trained on

A row is a row group of its own: reading one touches no byte of another. Ids and labels are compressed by zstd; images
are compressed already. Every page has a checksum, and the footer of the file one of each row as it is read back: damage
to what no page covers (the headers of pages, where they lie) would give other rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from vlmpack.collate import Encoded, MediaRef, Visual
from vlmpack.data import DEFAULT_LIMITS, ImageLimits
from vlmpack.errors import ConfigError, LayoutError
from vlmpack.layout import IMAGE, VIDEO, Grid
from vlmpack.offline.arrow import pyarrow
from vlmpack.offline.files import json_text
from vlmpack.offline.media import StoredImage, kept_options, readable

TOKENS = ("input_ids", "labels", "cu_seqlens", "places", "sample_ids", "digests")
MEDIA = ("images", "videos")
END = 64
"""Bytes of each end of an image that its row's checksum covers."""
COMPRESSION = dict.fromkeys(("input_ids.list.element", "labels.list.element"), "ZSTD")

CHECKSUMS = "vlmpack.checksums"
"""Key of the footer: `row_checksum` of each row, then `media_checksum` where there are media; separated by spaces."""

Store = Callable[..., StoredImage]
"""(source, sample=, place=) to what is kept of an image or frame."""


def schema(*, has_media: bool) -> Any:
    """The columns; a store of texts has none for media."""
    pa = pyarrow()
    ints, texts = pa.list_(pa.int32()), pa.list_(pa.string())
    columns = [("input_ids", ints), ("labels", ints), ("cu_seqlens", ints), ("places", pa.list_(pa.int64()))]
    columns += [("sample_ids", texts), ("digests", texts)]
    if not has_media:
        return pa.schema(columns)
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string()), ("sha256", pa.string())])
    facts = [("grid", ints), ("options", pa.string())]
    times = [("seconds", pa.float64()), ("timestamps", pa.list_(pa.float64()))]
    columns += [("images_per_sample", ints), ("videos_per_sample", ints)]
    columns += [("image_info", pa.list_(pa.struct(facts))), ("video_info", pa.list_(pa.struct([*facts, *times])))]
    columns += [("images", pa.list_(image)), ("videos", pa.list_(pa.list_(image)))]
    return pa.schema(columns)


def open_writer(file: Any, *, has_media: bool) -> Any:
    """A `ParquetWriter` for tables of one row, each of which becomes a row group."""
    return pyarrow().parquet.ParquetWriter(
        file,
        schema(has_media=has_media),
        compression=COMPRESSION,
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
    )


# ---------------------------------------------------------------------- samples to a row


def record_of(
    samples: Sequence[Encoded], places: Sequence[int], digests: Sequence[str], store: Store
) -> dict[str, Any]:
    """The columns of one row; those of media may be left out if there are none.

    Raises:
        ConfigError: a sample brought patches instead of images.
    """
    images, videos = [], []
    for sample, place in zip(samples, places, strict=True):
        keep = partial(store, sample=sample, place=place)
        images += [(image, keep(_source(image).source)) for image in sample.images]
        videos += [(video, [keep(frame) for frame in _source(video).source]) for video in sample.videos]
    return {
        "input_ids": np.concatenate([sample.input_ids for sample in samples]).astype(np.int32),
        "labels": np.concatenate([sample.labels for sample in samples]).astype(np.int32),
        "cu_seqlens": [0, *accumulate(sample.num_tokens for sample in samples)],
        "places": list(places),
        "sample_ids": [json_text(sample.sample_id) for sample in samples],
        "digests": list(digests),
        "images_per_sample": [len(sample.images) for sample in samples],
        "videos_per_sample": [len(sample.videos) for sample in samples],
        "image_info": [_facts(image) for image, _ in images],
        "video_info": [{**_facts(video), **_times(video)} for video, _ in videos],
        "images": [kept for _, kept in images],
        "videos": [kept for _, kept in videos],
    }


def _facts(visual: Visual) -> dict[str, Any]:
    return {"grid": list(visual.grid), "options": kept_options(_source(visual))}


def _times(video: Visual) -> dict[str, Any]:
    return {"seconds": video.seconds, "timestamps": list(video.timestamps)}


def _source(visual: Visual) -> MediaRef:
    if visual.source is None:
        raise ConfigError(
            "a sample brings patches (pixel_values), and rows are stored with encoded images, never with pixels; give "
            "samples as messages with images"
        )
    return visual.source


# ---------------------------------------------------------------------- checksums


def row_checksum(table: Any) -> str:
    """The checksum of one row without its media: 16 hexadecimal digits.

    Args:
        table: of pyarrow, one row.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name in table.column_names:
        if name not in MEDIA:
            is_numbers = table.schema.field(name).type == pyarrow().list_(pyarrow().int32())
            content = _ints(table, name).tobytes() if is_numbers else json.dumps(table[name].to_pylist()).encode()
            digest.update(f"{name} {len(content)}:".encode() + content)
    return digest.hexdigest()


def media_checksum(table: Any) -> str:
    """The checksum of the images and videos of one row, 16 hexadecimal digits: of each its length and its two ends.

    What lies between is covered by the checksum of its page, as long as pages are found where they were written.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, images in (("images", _flat(table, "images")), ("videos", _flat(table, "videos").values)):
        digest.update(f"{name} {len(images)}:".encode())
        for image in map(images.field, ("path", "sha256")):
            digest.update(json.dumps(image.to_pylist()).encode())
        for encoded in images.field("bytes"):
            buffer = memoryview(encoded.as_buffer() if encoded.is_valid else b"")
            digest.update(f"{len(buffer)}:".encode() + buffer[:END] + buffer[-END:])
    return digest.hexdigest()


def _flat(table: Any, name: str) -> Any:
    """What a list column of the one row holds."""
    column = table[name]
    return (column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()).values  # not copied


# ---------------------------------------------------------------------- a row to samples


def samples_of(
    table: Any, media_ids: tuple[int, int], limits: ImageLimits = DEFAULT_LIMITS
) -> tuple[tuple[int, Encoded], ...]:
    """(place, sample) of every sample of a row.

    Args:
        table: of pyarrow, one row. Without the columns `MEDIA`, samples have grids and no sources, and cannot be
            trained on.
        media_ids: the placeholders of images and of videos.
        limits: caps for images that are read from their files.

    Raises:
        LayoutError: columns contradict each other.
    """
    ids, labels = _ints(table, "input_ids"), _ints(table, "labels")
    bounds, places = _ints(table, "cu_seqlens").tolist(), table["places"][0].as_py()
    names = [json.loads(name) for name in table["sample_ids"][0].as_py()]
    _check(bounds, len(ids), len(labels), len(places), len(names))
    types = IMAGE * (ids == media_ids[0]) + VIDEO * (ids == media_ids[1])
    images, videos = _visuals(table, "image", limits), _visuals(table, "video", limits)
    spans = list(pairwise(bounds))
    return tuple(
        (
            place,
            Encoded(
                input_ids=ids[start:stop],
                labels=labels[start:stop],
                types=types[start:stop],
                images=one,
                videos=other,
                sample_id=name,
            ),
        )
        for (start, stop), place, name, one, other in zip(spans, places, names, images, videos, strict=True)
    )


def _ints(table: Any, name: str) -> np.ndarray:
    """int64: the numbers of a list column of the one row."""
    return _flat(table, name).to_numpy().astype(np.int64)


def _check(bounds: Sequence[int], ids: int, labels: int, places: int, names: int) -> None:
    rises = bounds[:1] == [0] and all(a < b for a, b in pairwise(bounds)) and bounds[-1] == ids == labels
    if not rises or not places == names == len(bounds) - 1:
        raise LayoutError(
            f"cu_seqlens {list(bounds[:9])} must rise from 0 to the {ids} input_ids and {labels} labels, for {places} "
            f"places and {names} sample_ids; pack again"
        )


def _visuals(table: Any, kind: str, limits: ImageLimits) -> Sequence[tuple[Visual, ...]]:
    """The images (or videos) of each sample."""
    if f"{kind}_info" not in table.column_names:
        return ((),) * (len(table["cu_seqlens"][0]) - 1)
    infos, counts = table[f"{kind}_info"][0].as_py(), table[f"{kind}s_per_sample"][0].as_py()
    refs: list[MediaRef | None] = [None] * len(infos)
    if f"{kind}s" in table.column_names:
        kept = table[f"{kind}s"][0].as_py()
        refs = [_ref(info, source, limits) for info, source in zip(infos, kept, strict=True)]
    if sum(counts) != len(infos):
        raise LayoutError(f"{kind}s_per_sample tells of {sum(counts)} {kind}s, {kind}_info of {len(infos)}; pack again")
    made = [_visual(info, ref) for info, ref in zip(infos, refs, strict=True)]
    return [tuple(made[start:stop]) for start, stop in pairwise([0, *accumulate(counts)])]


def _ref(info: Mapping[str, Any], kept: Any, limits: ImageLimits) -> MediaRef:
    """Of an image, or of the frames of a video."""
    source = [readable(frame, limits) for frame in kept] if isinstance(kept, list) else readable(kept, limits)
    return MediaRef(source=source, options=json.loads(info["options"]))


def _visual(info: Mapping[str, Any], ref: MediaRef | None) -> Visual:
    return Visual(
        grid=_grid(info["grid"]),
        pixels=None,
        seconds=info.get("seconds"),
        timestamps=tuple(info.get("timestamps", ())),
        source=ref,
    )


def _grid(values: Sequence[int]) -> Grid:
    frames, rows, columns = values
    return frames, rows, columns
