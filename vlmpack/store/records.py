"""Convert a packed row to one row of a parquet file, and back.

    samples          a: text, image, text (5)     b: text (3)
    input_ids        a a a a a b b b              without padding: slots are laid out when the row is read
    labels           . . . a a . b b              not shifted, -100 where nothing is learnt
    cu_seqlens       0 5 8                        where samples start and end
    places           17 4                         of the samples in the data set
    sample_ids       "\\"receipt-17\\"", "4"        their own ids as JSON, or else their places
    digests          "9f...", "04..."             of the samples in the data set, see `shards.sample_digest`
    images_per_sample  1 0
    image_info       grid [1, 4, 6], options "{}"                 read without the images
    images           bytes, or path and sha256                    read when the row is trained on
    image_numbers    0 0 1: where samples share prefixes, `images` holds each image of a row once; this says which

Each row is a row group: reading one touches no byte of another. Ids and labels are compressed by zstd; images are
compressed already, and are kept encoded or as a path and digest, never as pixels. Every page has a checksum. So has
each row, in the file's footer: damage to what no page covers (headers of pages, offsets) would give other rows.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal, TypedDict, final

import numpy as np
from PIL import Image

from vlmpack.collate.columns import MediaRef
from vlmpack.collate.encoded import Encoded, Visual
from vlmpack.collate.vision_keys import VIDEO_KEYS
from vlmpack.data.images import DEFAULT_LIMITS, ImageError, ImageLimits, load_image, read_encoded
from vlmpack.data.videos import DEFAULT_VIDEO_LIMITS, VideoLimits, open_video
from vlmpack.errors import ConfigError, LayoutError, SampleError, check_extra
from vlmpack.layout.batch import IMAGE, VIDEO

Images = Literal["bytes", "reference"]
IMAGES: tuple[Images, ...] = ("bytes", "reference")

MEDIA = ("images", "videos")
END = 64
"""Bytes of each end of an image that its row's checksum covers."""
COMPRESSION = dict.fromkeys(("input_ids.list.element", "labels.list.element"), "ZSTD")

CHECKSUMS = "vlmpack.checksums"
"""Key of the footer: the `checksums` of each row, separated by spaces."""
_FRAME_KEYS = ("fps", "nframes", "min_frames", "max_frames", "video_start", "video_end")
OPTION_KEYS = (*VIDEO_KEYS, "sample_fps", "raw_fps", *_FRAME_KEYS)
"""Keys beside an image or a video that change its patches."""
IS_FILE = "is_file"
"""Among the options of a video that is one file; the others are lists of frames."""
CHUNK = 2**20
"""Bytes of a file that are digested at a time."""
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
    """Return the columns; a store of texts has none for media, one of shared media has their numbers, and one of a
    family whose processor writes images by itself has the tokens of their runs."""
    pa = pyarrow()
    ints, texts = pa.list_(pa.int32()), pa.list_(pa.string())
    columns = [("input_ids", ints), ("labels", ints), ("cu_seqlens", ints), ("places", pa.list_(pa.int64()))]
    columns += [("sample_ids", texts), ("digests", texts)]
    if not has_media:
        return pa.schema(columns)
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string()), ("sha256", pa.string())])
    info = [("grid", ints), ("options", pa.string()), *([("runs", ints)] if has_runs else [])]
    times = [("seconds", pa.float64()), ("timestamps", pa.list_(pa.float64()))]
    columns += [("images_per_sample", ints), ("videos_per_sample", ints)]
    columns += [("image_info", pa.list_(pa.struct(info))), ("video_info", pa.list_(pa.struct([*info, *times])))]
    if is_shared:
        columns += [("image_numbers", ints), ("video_numbers", ints)]
    columns += [("images", pa.list_(image)), ("videos", pa.list_(pa.list_(image)))]
    return pa.schema(columns)


def open_writer(file: Any, columns: Any) -> Any:
    """Open a `ParquetWriter` for tables of one row, each of which becomes a row group; `columns`: the schema."""
    return pyarrow().parquet.ParquetWriter(
        file,
        columns,
        compression=COMPRESSION,
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
    )


# ---------------------------------------------------------------------- images


class StoredImage(TypedDict):
    """One image or frame: the fields of `datasets.Image`, and a digest."""

    bytes: bytes | None
    """The encoded image; None: it lies at `path`."""
    path: str | None
    """Where it lies; None: it is here."""
    sha256: str | None
    """Of what lies at `path`."""


def stored_image(source: Any, how: Images, limits: ImageLimits) -> StoredImage:
    """Read an image as it is stored.

    Args:
        source: as `load_image` takes it.
        how: "bytes" or "reference".
        limits: caps for the encoded image.

    Raises:
        ImageError: it cannot be read.
        ConfigError: it is to be a reference, and lies in no file.
    """
    if how == "reference":
        path = _path_of(source)
        return StoredImage(bytes=None, path=path, sha256=hashlib.sha256(read_encoded(path, limits=limits)).hexdigest())
    if isinstance(source, Image.Image):  # upright RGB: it is read back with the pixels that the collator makes of it
        file = io.BytesIO()
        load_image(source, limits=limits).save(file, "PNG", compress_level=PNG_EFFORT)
        return StoredImage(bytes=file.getvalue(), path=None, sha256=None)
    return StoredImage(bytes=read_encoded(source, limits=limits), path=None, sha256=None)


@final
class ReferencedImage(Mapping[str, Any]):
    """`{"bytes": ...}` of a file that is read at the first access; a mapping, because `load_image` takes one.

    The access raises an ImageError where the file is gone (`image_missing`) or has other bytes (`image_changed`).
    """

    def __init__(self, stored: StoredImage, limits: ImageLimits) -> None:
        self.stored, self.limits = stored, limits

    def __getitem__(self, key: str) -> Any:
        if key != "bytes":
            raise KeyError(key)
        return self._encoded

    def __iter__(self) -> Iterator[str]:
        return iter(("bytes",))

    def __len__(self) -> int:
        return 1

    @cached_property
    def _encoded(self) -> bytes:
        path = self.stored["path"]
        assert path is not None, "an image has bytes or a path"
        encoded = read_encoded(path, limits=self.limits)
        if hashlib.sha256(encoded).hexdigest() != self.stored["sha256"]:
            raise ImageError(
                f"the file {path} is another one than when the rows were packed (its SHA-256 differs); put the old one "
                "back, or pack again",
                "image_changed",
            )
        return encoded


def stored_video(source: Any, how: Images, limits: ImageLimits, video_limits: VideoLimits) -> list[StoredImage]:
    """Read a video as it is stored: its frames, or its file alone.

    Raises:
        ImageError: it cannot be read.
        ConfigError: it is to be a reference, and lies in no file.
    """
    if isinstance(source, list | tuple):
        return [stored_image(frame, how, limits) for frame in source]
    if how == "reference":
        path = _path_of(source)
        return [StoredImage(bytes=None, path=path, sha256=_digest_of_file(path, video_limits))]
    with open_video(source, limits=video_limits) as file:
        return [StoredImage(bytes=file.read(), path=None, sha256=None)]


def _digest_of_file(path: str, limits: VideoLimits) -> str:
    digest = hashlib.sha256()
    with open_video(path, limits=limits) as file:
        while data := file.read(CHUNK):
            digest.update(data)
    return digest.hexdigest()


@final
class ReferencedVideo(Mapping[str, Any]):
    """`{"path": ...}` of a file of a video that is compared with its digest at the first access.

    The access raises an ImageError where the file is gone (`video_missing`) or has other bytes (`video_changed`).
    """

    def __init__(self, stored: StoredImage, limits: VideoLimits) -> None:
        self.stored, self.limits = stored, limits

    def __getitem__(self, key: str) -> Any:
        if key != "path":
            raise KeyError(key)
        return self._path

    def __iter__(self) -> Iterator[str]:
        return iter(("path",))

    def __len__(self) -> int:
        return 1

    @cached_property
    def _path(self) -> str:
        path = self.stored["path"]
        assert path is not None, "a file of a video has bytes or a path"
        if _digest_of_file(path, self.limits) != self.stored["sha256"]:
            raise ImageError(
                f"the file {path} is another one than when the rows were packed (its SHA-256 differs); put the old one "
                "back, or pack again",
                "video_changed",
            )
        return path


def _number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise ConfigError(f"{value!r} stands beside an image as one of {', '.join(OPTION_KEYS)}; give a number")


def _path_of(source: Any) -> str:
    """Return the absolute path of an image."""
    if isinstance(source, Mapping) and source.get("bytes") is None and source.get("path") is not None:
        return _path_of(source["path"])
    if isinstance(source, Path):
        return str(source.expanduser().absolute())
    if isinstance(source, str) and not source.startswith("data:"):
        return source if "://" in source[:32] else str(Path(source).absolute())
    raise ConfigError(
        f"an image given as {type(source).__name__} lies in no file that a store could refer to; keep images='bytes'"
    )


# ---------------------------------------------------------------------- samples to a row


def record_of(
    samples: Sequence[Encoded],
    places: Sequence[int],
    digests: Sequence[str],
    how: Images,
    limits: ImageLimits,
    video_limits: VideoLimits = DEFAULT_VIDEO_LIMITS,
) -> dict[str, Any]:
    """Make the columns of one row; those of media may be left out if there are none.

    Raises:
        SampleError: an image cannot be read; names its sample's place.
        ConfigError: a sample brought patches instead of images, or an image that cannot be a reference.
    """
    images, videos = [], []
    for sample, place in zip(samples, places, strict=True):
        try:
            images += [stored_image(_source(image).source, how, limits) for image in sample.images]
            videos += [stored_video(_source(v).source, how, limits, video_limits) for v in sample.videos]
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


def each_medium_once(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record that holds each image and video once, however many samples have it, with their numbers."""
    shared = dict(record)
    for kind in ("image", "video"):
        stored = record[f"{kind}s"]
        numbers: dict[Any, int] = {}
        shared[f"{kind}_numbers"] = [numbers.setdefault(_content_key(each), len(numbers)) for each in stored]
        first = np.unique(np.array(shared[f"{kind}_numbers"], np.int64), return_index=True)[1]
        shared[f"{kind}s"] = [stored[at] for at in first.tolist()]
    return shared


def _content_key(stored: StoredImage | list[StoredImage]) -> Any:
    """A key that is equal for equal images, or for lists of equal frames."""
    return tuple(map(_content_key, stored)) if isinstance(stored, list) else tuple(stored.values())


def _info(visual: Visual, *, is_video: bool = False) -> dict[str, Any]:
    ref = _source(visual)
    sizing = {key: ref.options[key] for key in OPTION_KEYS if ref.options.get(key) is not None}
    if is_video and not isinstance(ref.source, list | tuple):
        sizing[IS_FILE] = True
    options = json.dumps(sizing, sort_keys=True, default=_number)
    return {"grid": list(visual.grid or ()), "runs": list(visual.runs), "options": options}


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


def checksums(table: Any) -> str:
    """Compute 16 hexadecimal digits for the columns of one row, then 16 for its media where they were read.

    Of each image they cover the length and both ends. The bytes between are covered by the checksum of their page, as
    long as pages are found where they were written.

    Args:
        table: of pyarrow, one row.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name in table.column_names:
        if name not in MEDIA:
            is_numbers = table.schema.field(name).type == pyarrow().list_(pyarrow().int32())
            content = _ints(table, name).tobytes() if is_numbers else json.dumps(table[name].to_pylist()).encode()
            digest.update(f"{name} {len(content)}:".encode() + content)
    has_media = all(name in table.column_names for name in MEDIA)
    return digest.hexdigest() + (_media_checksum(table) if has_media else "")


def _media_checksum(table: Any) -> str:
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
    """Return the values of a list column of the one row."""
    column = table[name]
    return (column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()).values  # not copied


# ---------------------------------------------------------------------- a row to samples


def samples_of(
    table: Any,
    media_ids: tuple[int, int],
    limits: ImageLimits = DEFAULT_LIMITS,
    video_limits: VideoLimits = DEFAULT_VIDEO_LIMITS,
) -> tuple[tuple[int, Encoded], ...]:
    """Return (place, sample) of every sample of a row.

    Args:
        table: of pyarrow, one row. Without the columns `MEDIA`, samples have grids and no sources, and cannot be
            trained on.
        media_ids: the placeholders of images and of videos.
        limits: caps for images that are read from their files.
        video_limits: the same for files of videos.

    Raises:
        LayoutError: columns contradict each other.
    """
    ids, labels = _ints(table, "input_ids"), _ints(table, "labels")
    bounds, places = _ints(table, "cu_seqlens").tolist(), table["places"][0].as_py()
    names = [json.loads(name) for name in table["sample_ids"][0].as_py()]
    _check(bounds, len(ids), len(labels), len(places), len(names))
    types = IMAGE * (ids == media_ids[0]) + VIDEO * (ids == media_ids[1])
    images, videos = (_visuals(table, kind, limits, video_limits) for kind in ("image", "video"))
    samples = []
    for (start, stop), place, name, *media in zip(pairwise(bounds), places, names, images, videos, strict=True):
        sample = Encoded(
            input_ids=ids[start:stop],
            labels=labels[start:stop],
            types=types[start:stop],
            images=media[0],
            videos=media[1],
            sample_id=name,
        )
        samples.append((place, sample))
    return tuple(samples)


def _ints(table: Any, name: str) -> np.ndarray:
    """Return the numbers of a list column of the one row, int64."""
    return _flat(table, name).to_numpy().astype(np.int64)


def _check(bounds: Sequence[int], ids: int, labels: int, places: int, names: int) -> None:
    rises = bounds[:1] == [0] and all(a < b for a, b in pairwise(bounds)) and bounds[-1] == ids == labels
    if not rises or not places == names == len(bounds) - 1:
        raise LayoutError(
            f"cu_seqlens {list(bounds[:9])} must rise from 0 to the {ids} input_ids and {labels} labels, for {places} "
            f"places and {names} sample_ids; pack again"
        )


def _visuals(table: Any, kind: str, limits: ImageLimits, video_limits: VideoLimits) -> Sequence[tuple[Visual, ...]]:
    """Return the images (or videos) of each sample."""
    if f"{kind}_info" not in table.column_names:
        return ((),) * (len(table["cu_seqlens"][0]) - 1)
    infos, counts = table[f"{kind}_info"][0].as_py(), table[f"{kind}s_per_sample"][0].as_py()
    if sum(counts) != len(infos):
        raise LayoutError(f"{kind}s_per_sample counts {sum(counts)} {kind}s, {kind}_info {len(infos)}; pack again")
    stored = _stored(table, kind, len(infos))
    visuals = [_visual(info, media, limits, video_limits) for info, media in zip(infos, stored, strict=True)]
    return [tuple(visuals[start:stop]) for start, stop in pairwise([0, *accumulate(counts)])]


def _stored(table: Any, kind: str, count: int) -> Sequence[Any]:
    """Return what is stored of each image or video; None for each where media are not read."""
    if f"{kind}s" not in table.column_names:
        return [None] * count
    stored = table[f"{kind}s"][0].as_py()
    if f"{kind}_numbers" not in table.column_names:
        return stored
    numbers = table[f"{kind}_numbers"][0].as_py()
    if len(numbers) != count or not all(0 <= number < len(stored) for number in numbers):
        raise LayoutError(f"{kind}_numbers {numbers[:9]} name the {len(stored)} {kind}s of {count}; pack again")
    return [stored[number] for number in numbers]


def _visual(info: Mapping[str, Any], stored: Any, limits: ImageLimits, video_limits: VideoLimits) -> Visual:
    """Make an image, or a video of a list of frames or of one file; None: without its source."""
    grid, runs = tuple(info["grid"]) or None, tuple(info.get("runs", ()))
    seconds, timestamps, source = info.get("seconds"), tuple(info.get("timestamps", ())), None
    if stored is not None:
        options = json.loads(info["options"])
        if options.pop(IS_FILE, False):
            source = _lazy_file(stored[0], video_limits)
        else:
            source = [_lazy(frame, limits) for frame in stored] if isinstance(stored, list) else _lazy(stored, limits)
        source = MediaRef(source=source, options=options)
    return Visual(grid=grid, runs=runs, pixels=None, seconds=seconds, timestamps=timestamps, source=source)


def _lazy(stored: StoredImage, limits: ImageLimits) -> Mapping[str, Any]:
    return stored if stored["bytes"] is not None else ReferencedImage(stored, limits)


def _lazy_file(stored: StoredImage, limits: VideoLimits) -> Mapping[str, Any]:
    return stored if stored["bytes"] is not None else ReferencedVideo(stored, limits)
