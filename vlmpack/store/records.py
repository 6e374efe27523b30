"""Convert a packed row to one row of a parquet file, and back.

    samples          a: text, image, text (5)     b: text (3)
    input_ids        a a a a a b b b              without padding: slots are laid out when the row is read
    labels           . . . a a . b b              not shifted, -100 where nothing is trained on
    cu_seqlens       0 5 8                        where samples start and end
    places           17 4                         of the samples in the data set
    sample_ids       "\\"receipt-17\\"", "4"        their own ids as JSON, or else their places
    digests          "9f...", "04..."             of the samples in the data set, see `content.sample_digest`
    images_per_sample  1 0
    image_info       grid [1, 4, 6], options "{}"                 read without the images
    images           bytes, as files have them                    read when the row is trained on
    image_numbers    0 0 1: where samples share prefixes, `images` holds each image of a row once; this says which

Each row is a row group: reading one touches no byte of another. Ids and labels are compressed by zstd; images are
compressed already, and are kept encoded, never as pixels. Every page has a checksum.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypedDict

import numpy as np
from PIL import Image

from vlmpack.collate.columns import MediaRef
from vlmpack.collate.encoded import Encoded, Visual
from vlmpack.collate.vision_keys import VIDEO_KEYS
from vlmpack.data.images import ImageError, ImageLimits, load_image, read_encoded
from vlmpack.data.videos import VideoLimits, open_video
from vlmpack.errors import ConfigError, LayoutError, SampleError, check_extra
from vlmpack.layout.batch import IMAGE, VIDEO

MEDIA = ("images", "videos")
COMPRESSION = dict.fromkeys(("input_ids.list.element", "labels.list.element"), "ZSTD")

_FRAME_KEYS = ("fps", "nframes", "min_frames", "max_frames", "video_start", "video_end")
OPTION_KEYS = (*VIDEO_KEYS, "sample_fps", "raw_fps", *_FRAME_KEYS)
"""Keys beside an image or a video that change its patches."""
IS_FILE = "is_file"
"""Among the options of a video that is one file; the others are lists of frames."""
PNG_EFFORT = 3
"""Compression level of PNG, 0 to 9: higher ones take much longer and save little."""


def pyarrow() -> Any:
    """Import pyarrow with its parquet part.

    Raises:
        ConfigError: it is not installed.
    """
    check_extra("data", "pyarrow", needed_by="the parquet files of stored rows")
    import pyarrow
    import pyarrow.parquet

    return pyarrow


def schema(*, has_media: bool, is_shared: bool = False, has_runs: bool = False) -> Any:
    """Return the columns.

    A store of texts has none for media, one of shared media has their numbers, and one of a family whose processor
    writes images by itself has the tokens of their runs.
    """
    pa = pyarrow()
    ints, texts = pa.list_(pa.int32()), pa.list_(pa.string())
    columns = [("input_ids", ints), ("labels", ints), ("cu_seqlens", ints), ("places", pa.list_(pa.int64()))]
    columns += [("sample_ids", texts), ("digests", texts)]
    if not has_media:
        return pa.schema(columns)
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    info = [("grid", ints), ("options", pa.string()), *([("runs", ints)] if has_runs else [])]
    times = [("seconds", pa.float64()), ("timestamps", pa.list_(pa.float64()))]
    columns += [("images_per_sample", ints), ("videos_per_sample", ints)]
    columns += [("image_info", pa.list_(pa.struct(info))), ("video_info", pa.list_(pa.struct([*info, *times])))]
    if is_shared:
        columns += [("image_numbers", ints), ("video_numbers", ints)]
    columns += [("images", pa.list_(image)), ("videos", pa.list_(pa.list_(image)))]
    return pa.schema(columns)


# ---------------------------------------------------------------------- samples to a row


class StoredImage(TypedDict):
    """One image, frame or file of a video: the fields of `datasets.Image`."""

    bytes: bytes
    path: None


def record_of(
    samples: Sequence[Encoded],
    places: Sequence[int],
    digests: Sequence[str],
    limits: ImageLimits,
    video_limits: VideoLimits,
) -> dict[str, Any]:
    """Make the columns of one row; those of media may be left out if there are none.

    Raises:
        SampleError: an image cannot be read, or labels have weights; names its sample's place.
        ConfigError: a sample brought patches instead of images.
    """
    images, videos = [], []
    for sample, place in zip(samples, places, strict=True):
        if sample.weights is not None:
            fault = "its labels have weights, which stored rows do not hold; train from the data set itself"
            raise SampleError(fault, index=place, reason="weights", sample_id=sample.sample_id)
        try:
            images += [_stored_image(_source(image).source, limits) for image in sample.images]
            videos += [_stored_video(_source(video).source, limits, video_limits) for video in sample.videos]
        except ImageError as error:
            raise SampleError(error.detail, index=place, reason=error.reason, sample_id=sample.sample_id) from error
    return {
        "input_ids": np.concatenate([sample.input_ids for sample in samples]).astype(np.int32),
        "labels": np.concatenate([sample.labels for sample in samples]).astype(np.int32),
        "cu_seqlens": [0, *accumulate(sample.num_tokens for sample in samples)],
        "places": list(places),
        "sample_ids": [json_text(sample.sample_id) for sample in samples],
        "digests": list(digests),
        "images_per_sample": [len(sample.images) for sample in samples],
        "videos_per_sample": [len(sample.videos) for sample in samples],
        "image_info": [_info(image) for sample in samples for image in sample.images],
        "video_info": [
            {**_info(video, is_video=True), "seconds": video.seconds, "timestamps": list(video.timestamps)}
            for sample in samples
            for video in sample.videos
        ],
        "images": images,
        "videos": videos,
    }


def _stored_image(source: Any, limits: ImageLimits) -> StoredImage:
    """Read an image as its file has it; a PIL image as PNG, upright and RGB, as the collator converts it."""
    if isinstance(source, Image.Image):
        file = io.BytesIO()
        load_image(source, limits=limits).save(file, "PNG", compress_level=PNG_EFFORT)
        return StoredImage(bytes=file.getvalue(), path=None)
    return StoredImage(bytes=read_encoded(source, limits=limits), path=None)


def _stored_video(source: Any, limits: ImageLimits, video_limits: VideoLimits) -> list[StoredImage]:
    """Read the frames of a video, or its file alone."""
    if isinstance(source, list | tuple):
        return [_stored_image(frame, limits) for frame in source]
    with open_video(source, limits=video_limits) as file:
        return [StoredImage(bytes=file.read(), path=None)]


def each_medium_once(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record that holds each image and video once, however many samples have it, with their numbers."""
    shared = dict(record)
    for kind in ("image", "video"):
        numbers: dict[Any, int] = {}
        shared[f"{kind}_numbers"], shared[f"{kind}s"] = [], []
        for stored in record[f"{kind}s"]:
            key = stored["bytes"] if kind == "image" else tuple(frame["bytes"] for frame in stored)
            if key not in numbers:
                numbers[key] = len(numbers)
                shared[f"{kind}s"].append(stored)
            shared[f"{kind}_numbers"].append(numbers[key])
    return shared


def _info(visual: Visual, *, is_video: bool = False) -> dict[str, Any]:
    ref = _source(visual)
    sizing = {key: ref.options[key] for key in OPTION_KEYS if ref.options.get(key) is not None}
    if is_video and not isinstance(ref.source, list | tuple):
        sizing[IS_FILE] = True
    options = json.dumps(sizing, sort_keys=True, default=_number)
    return {"grid": list(visual.grid or ()), "runs": list(visual.runs), "options": options}


def _number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise ConfigError(f"{value!r} stands beside an image as one of {', '.join(OPTION_KEYS)}; give a number")


def _source(visual: Visual) -> MediaRef:
    if visual.source is None:
        raise ConfigError(
            "a sample brings patches (pixel_values), and rows are stored with encoded images, never with pixels; give "
            "samples as messages with images"
        )
    return visual.source


def json_text(content: Any) -> str:
    """Write JSON in one line, letters of all scripts as they are; what UTF-8 cannot hold is escaped.

    Half of a surrogate pair is legal in JSON and in a Python string, and in no file.
    """
    text = json.dumps(content, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(content)
    return text


# ---------------------------------------------------------------------- a row to samples


def samples_of(table: Any, media_ids: tuple[int, int]) -> tuple[tuple[int, Encoded], ...]:
    """Return (place, sample) of every sample of a row.

    Args:
        table: of pyarrow, one row. Without the columns `MEDIA`, samples have grids and no sources, and cannot be
            trained on.
        media_ids: the placeholders of images and of videos.

    Raises:
        LayoutError: columns contradict each other.
    """
    ids, labels = _ints(table, "input_ids"), _ints(table, "labels")
    bounds, places = _ints(table, "cu_seqlens").tolist(), table["places"][0].as_py()
    names = [json.loads(name) for name in table["sample_ids"][0].as_py()]
    rises = bounds[:1] == [0] and all(a < b for a, b in pairwise(bounds)) and bounds[-1] == len(ids) == len(labels)
    if not rises or not len(places) == len(names) == len(bounds) - 1:
        raise LayoutError(
            f"cu_seqlens {bounds[:9]} must rise from 0 to the {len(ids)} input_ids and {len(labels)} labels, for "
            f"{len(places)} places and {len(names)} sample_ids; pack again"
        )
    types = IMAGE * (ids == media_ids[0]) + VIDEO * (ids == media_ids[1])
    images, videos = (_visuals(table, kind, len(names)) for kind in ("image", "video"))
    return tuple(
        (
            places[at],
            Encoded(
                input_ids=ids[start:stop],
                labels=labels[start:stop],
                types=types[start:stop],
                images=images[at],
                videos=videos[at],
                sample_id=names[at],
            ),
        )
        for at, (start, stop) in enumerate(pairwise(bounds))
    )


def _ints(table: Any, name: str) -> np.ndarray:
    """Return the numbers of a list column of the one row, int64."""
    column = table[name]
    values = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return values.values.to_numpy().astype(np.int64)


def _visuals(table: Any, kind: str, samples: int) -> Sequence[tuple[Visual, ...]]:
    """Return the images (or videos) of each sample."""
    if f"{kind}_info" not in table.column_names:
        return ((),) * samples
    infos, counts = table[f"{kind}_info"][0].as_py(), table[f"{kind}s_per_sample"][0].as_py()
    if sum(counts) != len(infos):
        raise LayoutError(f"{kind}s_per_sample counts {sum(counts)} {kind}s, {kind}_info {len(infos)}; pack again")
    stored = table[f"{kind}s"][0].as_py() if f"{kind}s" in table.column_names else None
    if stored is not None and f"{kind}_numbers" in table.column_names:
        stored = [stored[number] for number in table[f"{kind}_numbers"][0].as_py()]
    visuals = [_visual(info, medium) for info, medium in zip(infos, stored or [None] * len(infos), strict=True)]
    return [tuple(visuals[start:stop]) for start, stop in pairwise([0, *accumulate(counts)])]


def _visual(info: Mapping[str, Any], stored: Any) -> Visual:
    """Make an image, or a video of a list of frames or of one file; None: without its source."""
    source = None
    if stored is not None:
        options = json.loads(info["options"])
        source = MediaRef(source=stored[0] if options.pop(IS_FILE, False) else stored, options=options)
    return Visual(
        grid=tuple(info["grid"]) or None,
        runs=tuple(info.get("runs", ())),
        pixels=None,
        seconds=info.get("seconds"),
        timestamps=tuple(info.get("timestamps", ())),
        source=source,
    )
