"""Rows packed ahead of training: planned, tokenized and written to Parquet files once, then read by every run.

    samples ──measure──▶ lengths.zip ──plan──▶ plan.zip, left_out.jsonl ──write──▶ rows-*.parquet ──▶ manifest.json

A file gets its final name once it is complete on disk. A run that was killed can be started again: it continues after
the last complete file and ends with the same bytes.

    OUT/.work/lock             held by the one process that writes; the system releases it when that process dies
    OUT/.work/lengths.sqlite   cache of lengths, unless another cache file is named
    OUT/.work/manifest.json    manifest without shards; until it exists, settings and samples may change
    OUT/.NAME.<32 digits>      a file being written; the next run removes those that a killed run left behind

Each row of a file is one row group, so reading a row touches no byte of another.

    samples       a: text, image, text (5)     b: text (3)
    input_ids     a a a a a b b b              without padding: padding is added when the row is read
    labels        . . . a a . b b              not shifted, -100 where nothing is trained on
    cu_seqlens    0 5 8                        sample boundaries
    topk_ids      a a b b                      a teacher's K ids for each target of a sample that has them
    topk_logprobs                              and their log-probabilities
    sample_ids    "\\"receipt-17\\"", "4"        sample ids as JSON, or else indices in the data set
    samples       JSON: index and digest of each sample; grid, options and number of its images and videos
    images        encoded bytes, as in image files, never pixels; each distinct image of a row once
    videos        the encoded frames of each video, or its file
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, count, pairwise
from math import lcm
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex, final

import numpy as np
from PIL import Image
from pydantic import TypeAdapter
from torch.utils.data import Dataset

from vlmpack.collate import digests
from vlmpack.collate.assemble import SharePrefixes
from vlmpack.collate.collator import VLMCollator
from vlmpack.collate.encoded import Encoded, Visual
from vlmpack.collate.video import FrameSampling
from vlmpack.data.formats import sample_id_of
from vlmpack.data.images import DEFAULT_LIMITS, load_image, read_encoded
from vlmpack.data.messages import KNOWN_KEYS, MediaRef
from vlmpack.data.readers import MapStyle, check_samples, sample_at
from vlmpack.data.videos import open_video
from vlmpack.errors import (
    ConfigError,
    SampleError,
    check_choice,
    check_extra,
    check_kind,
    check_whole_number,
    skipped_are_reported,
)
from vlmpack.families.registry import family_of_processor
from vlmpack.files import atomic_file, left_behind_in, unreadable, write_text, writing
from vlmpack.layout.batch import TEACHER, TYPES_OF_TEACHER
from vlmpack.layout.media import IMAGE, VIDEO
from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.row import PackedRow
from vlmpack.layout.segments import SlotRule
from vlmpack.lengths import check_refused, measure_lengths, tree_of, undecoded
from vlmpack.plan.length_table import LengthTable
from vlmpack.plan.lengths import OVERLENGTH, Budget, Overlength, check_overlength, check_seed, divided_up, round_up
from vlmpack.plan.plan import STRATEGIES, Plan, plan_bins, split_rows
from vlmpack.workers import Executor, in_order

__all__ = ["Manifest", "PackedDataset", "StoreSettings", "write_rows"]

FORMAT, VERSION = "vlmpack.rows", 9
NAME, PLAN, LENGTHS, LEFT_OUT = "manifest.json", "plan.zip", "lengths.zip", "left_out.jsonl"
"""Files besides the shards."""
WORK = ".work"
"""Folder for unfinished work."""
SAMPLES = "vlmpack.samples"
"""Metadata key in a shard's footer that holds the digest of its samples."""
NAMED = 5
"""How many changed samples an error message lists."""


def is_packed(folder: str | Path) -> bool:
    """Return whether a folder holds finished rows."""
    return (Path(folder) / NAME).is_file()


def _pyarrow() -> Any:
    check_extra("data", "pyarrow", needed_by="the Parquet files of stored rows")
    import pyarrow
    import pyarrow.parquet

    return pyarrow


# ---------------------------------------------------------------------- settings and manifest


@final
@dataclass(frozen=True, kw_only=True)
class StoreSettings:
    """Settings of the plan and of the files of packed rows."""

    capacity: int
    """Maximum tokens of a row."""
    max_patches: int | None = None
    """Maximum vision patches of a row; None: no limit."""
    max_images: int | None = None
    """Maximum images and videos of a row; None: no limit."""
    strategy: str = "exact_fill"
    """Bin packing strategy, see `plan_bins`."""
    overlength: Overlength = "error"
    """What to do with a sample that is too large for a row: "error", "drop" (and list it) or "own_row"."""
    seed: int | None = None
    """Seed that shuffles samples and rows; None: samples keep their order."""
    rows_multiple: int = 1
    """Split rows with many samples until the number of rows is a multiple of this (ranks times accumulation)."""
    shard_rows: int = 128
    """Rows per file. A killed run loses the work on at most one file per worker."""

    def __post_init__(self) -> None:
        limits = [name for name in ("max_patches", "max_images") if getattr(self, name) is not None]
        for name in ("capacity", "rows_multiple", "shard_rows", *limits):
            check_whole_number(f"StoreSettings.{name}", getattr(self, name))
        check_seed(self.seed)
        check_choice("strategy", self.strategy, STRATEGIES)
        check_overlength(self.overlength)


@final
@dataclass(frozen=True, kw_only=True)
class Counts:
    """Number of samples and rows, and totals over all rows."""

    total: int
    """Samples in the data set."""
    refused: int
    """Samples that cannot be used, including those longer than the collator's `max_length`."""
    dropped: int
    """Samples that are too large for a row."""
    samples: int
    """Samples in rows: all the others."""
    rows: int
    """Rows."""
    tokens: int
    """Tokens of all samples in rows."""
    targets: int
    """Tokens trained on."""
    images: int
    """Images."""
    videos: int
    """Videos."""
    patches: int
    """Patches for the vision tower, shared prefixes counted once per row."""


@final
@dataclass(frozen=True, kw_only=True)
class FixedSizes:
    """Maximum sizes over all rows, for buffers that are allocated, or captured in a CUDA graph, once for all rows."""

    longest_row: int
    """Tokens of the longest row, including rounding of samples and rows."""
    longest_segment: int
    """Tokens of the longest sample."""
    most_segments: int
    """Samples of the row that has most."""
    most_images: int
    """Images and videos of the row that has most."""
    most_patches: int
    """Patches of the row that has most."""


@final
@dataclass(frozen=True, kw_only=True)
class Shard:
    """One Parquet file of rows."""

    file: str
    """File name."""
    rows: int
    """Number of rows."""
    bytes: int
    """File size."""
    samples: str
    """Digest of the file's samples. The footer holds it, too, so that no other file is mistaken for this one."""


@final
@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything about packed rows that can be known without reading them. Holds no paths and no times."""

    settings: Mapping[str, Any]
    """Settings of the plan and the collator, and the number of samples in the data set."""
    processor: Mapping[str, Any]
    """Fingerprint of the processor."""
    plan: str
    """SHA-256 of the plan."""
    counts: Counts
    """Samples, rows, tokens."""
    reasons: Mapping[str, int]
    """Number of samples left out per reason; `left_out.jsonl` lists each of them."""
    fill_ratio: float
    """Computed tokens over row capacity, 0 to 1."""
    sizes: FixedSizes
    """Maximum sizes over all rows, for CUDA graphs."""
    shards: tuple[Shard, ...] = ()
    """The files, in row order; (): the rows are not finished."""

    @property
    def capacity(self) -> int:
        """Maximum tokens of a row."""
        return self.settings["capacity"]

    @property
    def bytes(self) -> int:
        """Total size of all shards."""
        return sum(shard.bytes for shard in self.shards)

    def save(self, folder: Path) -> None:
        """Write the manifest to `folder`."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        content["digest"] = digests.digest_of(content)
        write_text(folder / NAME, json.dumps(content, indent=2) + "\n")

    @classmethod
    def load(cls, folder: str | Path) -> Manifest:
        """Read the manifest of a folder of rows.

        Raises:
            ConfigError: the folder holds no finished rows, or rows of another version, or the file is damaged.
        """
        path = Path(folder) / NAME
        if not path.is_file():
            remedy = "write some with `vlmpack pack`, or run that again where it was interrupted"
            raise ConfigError(f"{folder} holds no {NAME}, so it holds no finished rows; {remedy}")
        with _reading(str(path)):
            content = json.loads(path.read_bytes())
            kind, own = f"{content['format']} of version {content['version']}", f"{FORMAT} of version {VERSION}"
            if kind != own:
                raise ConfigError(f"{path} is {kind}, and this vlmpack reads {own}; remove the folder and pack again")
            if content.pop("digest") != digests.digest_of(content):
                raise ValueError("it was changed since it was written: its digest is another one")
            return TypeAdapter(cls).validate_python(content)

    def load_plan(self, folder: Path) -> Plan:
        """Read the plan of the rows.

        Raises:
            ConfigError: the plan is missing, damaged, or belongs to other rows.
        """
        plan = Plan.load(folder / PLAN)
        if plan.digest != self.plan:
            raise _damaged(folder / PLAN, "it is the plan of other rows")
        return plan

    def check_files(self, folder: Path, *, others: Sequence[str] = ()) -> None:
        """Check that all files exist and that every shard has its size.

        Raises:
            ConfigError: a file is missing or differs; names the file.
        """
        for name, size in [*((name, None) for name in others), *((shard.file, shard.bytes) for shard in self.shards)]:
            path = folder / name
            if not path.is_file():
                raise _damaged(path, "it is not there")
            if size is not None and (found := path.stat().st_size) != size:
                raise _damaged(path, f"it has {found} bytes, not {size}")


def _damaged(path: object, what: str) -> ConfigError:
    return ConfigError(f"{path} is damaged: {what}; restore it, or remove the folder and pack again")


# ---------------------------------------------------------------------- encode and decode rows

MEDIA = ("images", "videos")
MEASURED = ("grid", "runs", "seconds", "timestamps")
"""What is known of a medium's tokens before its pixels are read."""
COMPRESSION = dict.fromkeys((f"{name}.list.element" for name in ("input_ids", "labels", "topk_ids")), "ZSTD")
PNG_EFFORT = 3
"""PNG compression level, 0 to 9; higher levels take much longer and save little."""


def _schema(*, has_media: bool) -> Any:
    pa = _pyarrow()
    ints, image = pa.list_(pa.int32()), pa.struct([("bytes", pa.binary()), ("path", pa.string())])  # datasets.Image
    columns = [("input_ids", ints), ("labels", ints), ("cu_seqlens", ints)]
    columns += [("sample_ids", pa.list_(pa.string())), ("samples", pa.string())]
    columns += [("topk_ids", ints), ("topk_logprobs", pa.list_(pa.float32()))]
    media = [("images", pa.list_(image)), ("videos", pa.list_(pa.list_(image)))]
    return pa.schema([*columns, *media] if has_media else columns)


def _describe(visual: Visual, media: Mapping[str, dict[Any, int]], collator: VLMCollator) -> dict[str, Any]:
    """Describe an image or a video, and add its content to those of its kind unless it is already there."""
    if visual.source is None:
        fault = "a sample brings patches (pixel_values), and rows are stored with encoded images, never with pixels"
        raise ConfigError(f"{fault}; give samples as messages with images")
    source, options, kind = visual.source.source, visual.source.options, visual.source.kind
    about: dict[str, Any] = {"options": {key: options[key] for key in KNOWN_KEYS if options.get(key) is not None}}
    about["kind"] = kind
    if kind == "image":
        content = (_encoded(source, collator),)
    elif isinstance(source, list | tuple):
        content = tuple(_encoded(frame, collator) for frame in source)
    else:
        with open_video(source, limits=collator.videos.file_limits) as file:
            content, about["is_file"] = (file.read(),), True
    numbers = media[f"{kind}s"]
    about["number"] = numbers.setdefault(content, len(numbers))
    about |= {name: getattr(visual, name) for name in MEASURED}
    return {name: value for name, value in about.items() if value not in (None, ())}


def _encoded(source: Any, collator: VLMCollator) -> bytes:
    """Return the encoded bytes of an image file; encode a PIL image as upright RGB PNG, as the collator converts it."""
    if not isinstance(source, Image.Image):
        return read_encoded(source, limits=collator.limits)
    file = io.BytesIO()
    load_image(source, limits=collator.limits).save(file, "PNG", compress_level=PNG_EFFORT)
    return file.getvalue()


def _samples_of(table: Any, media_ids: tuple[int, int]) -> list[tuple[int, Encoded]]:
    """Decode a row (a pyarrow table) to (index in the data set, sample) pairs.

    If the columns `MEDIA` were not read, samples have grids but no sources, and cannot be trained on.
    """
    lists = (table[name].combine_chunks().values for name in ("input_ids", "labels", "cu_seqlens"))
    ids, labels, bounds = (each.to_numpy().astype(np.int64) for each in lists)
    media = {kind: table[kind][0].as_py() if kind in table.column_names else None for kind in MEDIA}
    names, described = table["sample_ids"][0].as_py(), json.loads(table["samples"][0].as_py())
    entries, read = {name: table[name].combine_chunks().values.to_numpy() for name in TEACHER}, 0
    samples = []
    for (start, stop), name, about in zip(pairwise(bounds.tolist()), names, described, strict=True):
        numbers = {"image": count(), "video": count()}  # InternVL's videos are among the images
        images, videos = (
            tuple(_visual(each, media, next(numbers[each["kind"]])) for each in about.get(kind, ())) for kind in MEDIA
        )
        own = ids[start:stop]
        of_image_token = VIDEO if videos and not images else IMAGE  # GLM-4V writes either kind with the image's token
        sample = Encoded(
            input_ids=own, labels=labels[start:stop], images=images, videos=videos,
            types=of_image_token * (own == media_ids[0]) + VIDEO * (own == media_ids[1]),
            weights=np.asarray(about["weights"], np.float32) if "weights" in about else None,
            channel=about.get("channel"), sample_id=json.loads(name),
        )  # fmt: skip
        if num_entries := about.get("entries"):
            teacher = {name: np.zeros((len(own), num_entries), kind) for name, kind in TYPES_OF_TEACHER.items()}
            first, read = read, read + len(sample.targets) * num_entries
            for name, values in entries.items():
                teacher[name][sample.targets] = values[first:read].reshape(-1, num_entries)
            sample = replace(sample, teacher=teacher)
        samples.append((about["index"], sample))
    return samples


def _visual(about: Mapping[str, Any], media: Mapping[str, Sequence[Any] | None], index: int) -> Visual:
    source = None
    if (of_kind := media[f"{about['kind']}s"]) is not None:
        content = of_kind[about["number"]]
        content = content[0] if "is_file" in about else content
        source = MediaRef(source=content, options=about["options"], kind=about["kind"], index=index)
    known: dict[str, Any] = {name: about[name] for name in MEASURED if name in about}
    known = {name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}
    return Visual(**known, pixels=None, source=source)


def _opened(folder: Path, shard: Shard) -> Any:
    file = _pyarrow().parquet.ParquetFile(folder / shard.file, page_checksum_verification=True)
    if file.metadata.metadata.get(SAMPLES.encode()) != shard.samples.encode():
        raise ValueError(f"it holds other samples than {NAME} lists")
    return file


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turn any error caused by a damaged file into a ConfigError, and a missing file or permission into another."""
    try:
        yield
    except (FileNotFoundError, PermissionError) as error:
        raise unreadable(name, error) from error
    except (ConfigError, MemoryError):
        raise
    except Exception as error:  # on damaged bytes pyarrow raises errors of every kind; OSError: a wrong page checksum
        raise _damaged(name, f"it cannot be read: {error}") from error


# ---------------------------------------------------------------------- writing


def write_rows(
    dataset: MapStyle,
    out: str | Path,
    collator: VLMCollator,
    settings: StoreSettings,
    *,
    workers: int = 0,
    executor: Executor = "local",
    cache: str | Path | None = None,
    progress: Callable[[str, int, int | None], None] = lambda stage, done, total: None,
) -> Manifest:
    """Plan the rows of a data set and write them to a folder, with encoded images, never pixels.

    An interrupted run can be continued with the same call, which keeps all finished work. The files do not depend on
    `workers`, `executor` or interruptions. The digest of each sample is stored and compared when the call is repeated,
    so that samples changed since then are reported by their indices.

    Args:
        dataset: map-style data set of samples that the collator takes.
        out: output folder; it must be empty, or hold the result of the same call.
        collator: a collator with `layout="packed"`. Its `slots` give the padded lengths, which the plan counts. With
            `share_prefixes`, samples with a common prefix share rows.
        settings: settings of the plan and the files.
        workers: number of processes that measure and write; 0: this process only.
        executor: "ray" measures and writes as Ray Data tasks, on machines that all see `out`, and ignores `workers`.
        cache: file that keeps lengths between calls; None: a temporary one until the rows are finished (none on Ray).
        progress: called with the stage ("measure" for samples, "compare" or "write" for files), the number done and the
            total number.

    Returns:
        The manifest, which includes the sizes that CUDA graphs need.

    Raises:
        SampleError: a sample cannot be used and the collator's `on_bad` is "raise", or a sample is too large for a row
            and `overlength` is "error".
        ConfigError: an argument has the wrong type (a path, a processor), settings contradict each other or the
            existing folder, samples changed since they were packed, finished rows have lost a file, too many samples
            are bad, the disk is full, a worker died, or an optional dependency is missing.
    """
    check_kind("collator", collator, VLMCollator, 'VLMCollator(processor, layout="packed")')
    check_kind("settings", settings, StoreSettings, "StoreSettings(capacity=4096)")
    _check_collator(collator, settings)
    check_samples(dataset)
    if not isinstance(dataset, MapStyle) or not len(dataset):
        fault = f"rows are planned over samples with places, and this {type(dataset).__name__} has none"
        raise ConfigError(f"{fault}: give a data set with len() and [i], such as a split of vlmpack.data.open_dataset")
    run = _Run(
        dataset=undecoded(dataset), out=Path(out), collator=collator, settings=settings,
        workers=workers, executor=executor, cache=cache, progress=progress,
    )  # fmt: skip
    manifest = run.finished()
    if manifest is None or (run.out / WORK).exists():  # the previous run may have been killed just before removing it
        with _locked(run.out) as work:
            manifest = run.finished() or run.write(work)
            with writing(work):
                shutil.rmtree(work)
    return manifest


def _check_collator(collator: VLMCollator, settings: StoreSettings) -> None:
    """Check that rows made by this collator can be stored.

    Raises:
        ConfigError: samples may have audio; the family needs to know where bidirectional prompts end; the collator
            pads, fixes sizes that are fixed when rows are read, or rounds lengths to a unit that does not divide the
            capacity.
    """
    metadata, name, slots = collator.metadata, type(collator.processor).__name__, collator.slots
    more = f"samples of a {name} may have audio" if metadata.has_audio else None
    if metadata.by_processor and metadata.has_vision and family_of_processor(collator.processor).token_columns:
        more = f"the prompts of a {name} see all of themselves, and stored rows do not say where they end"
    if more:
        remedy = "train from the data set itself: PackedStream and measure_lengths take every family"
        raise ConfigError(f"stored rows hold ids, labels, images and videos, but {more}; {remedy}")
    if collator.layout != "packed" or slots.pad_to is not None:
        remedy = "PackedDataset(fixed_sizes=True) gives them a fixed width when they are read"
        raise ConfigError(f"rows are stored by VLMCollator(layout='packed') without slots.pad_to; {remedy}")
    unit, capacity = lcm(slots.multiple, slots.row_multiple), settings.capacity
    if capacity % unit:
        fault = f"a capacity of {capacity} tokens is no multiple of {unit}, which slots and rows are rounded up to"
        raise ConfigError(f"{fault}; choose {capacity // unit * unit or unit} or {(capacity // unit + 1) * unit}")


@contextmanager
def _locked(out: Path) -> Iterator[Path]:
    """Create, lock and yield the work folder, and remove unfinished files of a killed run.

    Uses `lockf` instead of `flock`, because a forked worker would keep holding a `flock`.

    Raises:
        ConfigError: the folder is a file, holds something else or cannot be created, or another process writes to it.
    """
    import fcntl  # missing on some systems, and only needed for writing

    work = out / WORK
    with writing(out):
        if not work.is_dir():
            _check_holds_only(out)
        work.mkdir(parents=True, exist_ok=True)
        lock = (work / "lock").open("a")
    with lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            fault = f"another process is writing to {out}, or its disk has no locks ({error})"
            raise ConfigError(f"{fault}; wait for it, or choose another folder") from error
        for left_behind in left_behind_in(out):
            left_behind.unlink()
        yield work


def _check_holds_only(out: Path, *names: str) -> None:
    others = sorted(path.name for path in out.iterdir() if path.name not in names) if out.exists() else []
    if others:
        raise ConfigError(f"{out} is no folder of rows and not empty ({', '.join(others[:5])}); choose another folder")


@final
@dataclass(frozen=True, kw_only=True)
class _Run:
    """One call of `write_rows` with its arguments. Can be pickled to workers."""

    dataset: MapStyle
    out: Path
    collator: VLMCollator
    settings: StoreSettings
    workers: int
    executor: Executor
    cache: str | Path | None
    progress: Callable[[str, int, int | None], None]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "progress": None}

    def finished(self) -> Manifest | None:
        """Return the manifest if this very call was finished in the folder before; None: the folder is not finished.

        Raises:
            ConfigError: a different call was finished there (names the differences), or the folder has lost a file.
        """
        if not is_packed(self.out):
            return None
        manifest = self._same(Manifest.load(self.out))
        manifest.check_files(self.out, others=(PLAN, LENGTHS, LEFT_OUT))
        self._compare(manifest.shards)
        return manifest

    def write(self, work: Path) -> Manifest:
        """Write all missing files."""
        is_planned = is_packed(work)
        manifest = self._same(Manifest.load(work)) if is_planned else self._plan(work)
        table, plan = LengthTable.load(self.out / LENGTHS), manifest.load_plan(self.out)
        files = divided_up(len(plan), self.settings.shard_rows)
        paths = [self.out / f"rows-{number:05d}-of-{files:05d}.parquet" for number in range(files)]
        shards = {path: shard for path in paths if (shard := _finished_shard(path))}
        if is_planned:
            self._compare(list(shards.values()))
        missing = [number for number in range(files) if paths[number] not in shards]
        measured = np.stack([table.by_place(table.tokens), table.by_place(table.targets)], axis=1)
        columns = _schema(has_media=bool(table.images.any() or table.videos.any()))
        write_shard = partial(self._write_shard, paths, plan, measured, columns, missing)
        self.progress("write", len(shards), files)
        with self._in_order(write_shard, len(missing)) as written:
            for number, shard in zip(missing, written, strict=True):
                shards[paths[number]] = shard
                self.progress("write", len(shards), files)
        manifest = replace(manifest, shards=tuple(shards[path] for path in paths))
        manifest.save(self.out)
        return manifest

    def _in_order(self, work: Callable[[int], Any], parts: int) -> closing:
        return closing(in_order(work, parts, workers=self.workers, executor=self.executor))

    # ------------------------------------------------------------------ one shard

    def _write_shard(
        self, paths: Sequence[Path], plan: Plan, measured: np.ndarray, columns: Any, missing: Sequence[int], part: int
    ) -> Shard:
        """Write one shard, with one row group per row. Only errors of writing are reported as errors of the file.

        Raises:
            SampleError: a sample differs from what was measured, or its image cannot be read; names its index.
            ConfigError: a sample cannot be stored, or the disk is full.
        """
        path, size, samples = paths[missing[part]], self.settings.shard_rows, hashlib.sha256()
        rows = range(len(plan))[missing[part] * size :][:size]
        options = {"compression": COMPRESSION, "use_dictionary": False, "write_statistics": False}
        with atomic_file(path) as temporary:
            with _pyarrow().parquet.ParquetWriter(temporary, columns, write_page_checksum=True, **options) as writer:
                for row in rows:
                    record = self._record(plan[row].tolist(), measured)
                    samples.update(record["samples"].encode())
                    table = _pyarrow().Table.from_pylist([{name: record[name] for name in columns.names}], columns)
                    with writing(path):
                        writer.write_table(table)
                digest = samples.hexdigest()
                writer.add_key_value_metadata({SAMPLES: digest})
            return Shard(file=path.name, rows=len(rows), bytes=temporary.stat().st_size, samples=digest)

    def _record(self, places: Sequence[int], measured: np.ndarray) -> dict[str, Any]:
        """Encode one row as Parquet columns, and check that its samples are still as measured.

        Raises:
            SampleError: a sample differs, or an image cannot be read; names its index.
            ConfigError: a sample has patches instead of images.
        """
        media: dict[str, dict[Any, int]] = {kind: {} for kind in MEDIA}  # content -> number within the row
        samples, described = list[Encoded](), []
        for place in places:
            feature = self.dataset[place]
            sample = self.collator.measure(feature, place)
            if (now := [sample.num_tokens, sample.num_targets]) != (before := measured[place].tolist()):
                fault = f"it has {now[0]} tokens, {now[1]} of them targets; when measured {before[0]} and {before[1]}"
                detail = f"{fault}: the data set was changed meanwhile; pack into another folder"
                raise SampleError(detail, index=place, reason="changed", sample_id=sample.sample_id)
            about: dict[str, Any] = {"index": place, "digest": digests.sample_digest(feature, self.collator)}
            about |= {"channel": sample.channel, "weights": [] if sample.weights is None else sample.weights.tolist()}
            about["entries"] = sample.teacher["topk_ids"].shape[1] if sample.teacher else None
            try:
                for kind in MEDIA:
                    about[kind] = [_describe(visual, media, self.collator) for visual in getattr(sample, kind)]
            except SampleError as error:
                raise error.of_sample(place, sample.sample_id) from error
            samples.append(sample)
            described.append({name: value for name, value in about.items() if value not in (None, [])})
        taught = [sample for sample in samples if sample.teacher]
        return {
            "input_ids": np.concatenate([sample.input_ids for sample in samples]).astype(np.int32),
            "labels": np.concatenate([sample.labels for sample in samples]).astype(np.int32),
            "cu_seqlens": [0, *accumulate(sample.num_tokens for sample in samples)],
            "sample_ids": [json.dumps(sample.sample_id) for sample in samples],
            "samples": json.dumps(described, default=lambda number: number.item()),  # numpy scalars
            **{name: [value for x in taught for value in x.teacher[name][x.targets].ravel()] for name in TEACHER},
            "images": [{"bytes": data} for (data,) in media["images"]],
            "videos": [[{"bytes": data} for data in frames] for frames in media["videos"]],
        }

    # ------------------------------------------------------------------ compare with an earlier call

    def _description(self) -> dict[str, Any]:
        """Return everything besides the samples that determines the bytes of the files, ready for JSON."""
        collator = digests.collator_settings(self.collator)
        settings = {**asdict(self.settings), "collator": collator, "samples": len(self.dataset)}
        return digests.as_json({"settings": settings, "processor": digests.fingerprint(self.collator)})

    def _same(self, manifest: Manifest) -> Manifest:
        """Check that the existing rows were made with the same settings, and return their manifest."""
        stored = {"settings": manifest.settings, "processor": manifest.processor}
        if lines := list(digests.differences(stored, self._description())):
            fault = f"{self.out} holds rows that were made otherwise: {'; '.join(lines)}"
            raise ConfigError(f"{fault}. Pack into another folder, or remove this one")
        return manifest

    def _compare(self, shards: Sequence[Shard]) -> None:
        """Check that samples in finished shards, or listed as left out, have not changed in the data set.

        Raises:
            ConfigError: samples changed (lists their indices), or a file is damaged.
        """
        changed = []
        with self._in_order(partial(self._changed, shards), len(shards) + 1) as parts:
            for done, part in enumerate(parts, 1):
                changed += part
                self.progress("compare", done, len(shards) + 1)
        if changed:
            fault = f"{self.out} holds other samples than the data set: {len(changed)} were changed since"
            places = ", ".join(map(str, sorted(changed)[:NAMED])) + ", ..." * (len(changed) > NAMED)
            raise ConfigError(f"{fault} they were packed (at {places}). Pack into another folder, or remove this one")

    def _changed(self, shards: Sequence[Shard], part: int) -> list[int]:
        """Return indices of changed samples in a shard; the part after the last shard is `left_out.jsonl`."""
        path = self.out / (shards[part].file if part < len(shards) else LEFT_OUT)
        with _reading(str(path)):
            if part < len(shards):
                rows = _opened(self.out, shards[part]).read(["samples"], use_threads=False)["samples"].to_pylist()
            else:
                rows = [f"[{line}]" for line in path.read_text(encoding="utf-8").splitlines()]
            stored = [(int(sample["index"]), sample["digest"]) for row in rows for sample in json.loads(row)]
        return [at for at, digest in stored if at >= len(self.dataset) or self._digest(at) != digest]

    def _digest(self, place: int) -> str:
        return digests.sample_digest(sample_at(self.dataset, place), self.collator)

    # ------------------------------------------------------------------ the plan

    def _plan(self, work: Path) -> Manifest:
        """Measure, plan, and list samples left out. A bad sample that stopped an earlier run may have been fixed."""
        _check_holds_only(self.out, WORK, LENGTHS, PLAN, LEFT_OUT)
        sharing = self.collator.share_prefixes
        with skipped_are_reported():  # by an error, or in `left_out.jsonl`
            cache = work / "lengths.sqlite" if self.cache is None and self.executor == "local" else self.cache
            where = {"workers": self.workers, "executor": self.executor, "cache": cache}
            options = {"min_shared": None if sharing is None else sharing.min_shared, **where}
            table = measure_lengths(self.dataset, self.collator, progress=partial(self.progress, "measure"), **options)
        check_refused(table, self.collator)
        self.collator.skip_log.limit.check(table.refused, intended=self.collator.leaves_out)
        plan = _plan_rows(table, self.settings, self.collator.slots, self.dataset)
        left_out = [{**each, "digest": self._digest(each["index"])} for each in _left_out(table, plan, self.dataset)]
        for path, content in ((self.out / LENGTHS, table), (self.out / PLAN, plan)):
            with atomic_file(path) as temporary, writing(path):
                content.save(temporary)
        write_text(self.out / LEFT_OUT, "".join(json.dumps(entry) + "\n" for entry in left_out))
        reasons = dict(Counter(entry["reason"] for entry in left_out).most_common())
        totals = _totals(table, plan, self.collator.slots.row_multiple)
        manifest = Manifest(**self._description(), **totals, plan=plan.digest, reasons=reasons)
        manifest.save(work)
        return manifest


def _finished_shard(path: Path) -> Shard | None:
    """Describe a complete file; return None if there is none."""
    try:
        metadata = _pyarrow().parquet.read_metadata(path)
        samples = metadata.metadata[SAMPLES.encode()].decode()
        return Shard(file=path.name, rows=metadata.num_rows, bytes=path.stat().st_size, samples=samples)
    except (OSError, ValueError, KeyError):  # missing or damaged: it is written again
        return None


# ---------------------------------------------------------------------- the plan


def _plan_rows(table: LengthTable, settings: StoreSettings, slots: SlotRule, dataset: MapStyle) -> Plan:
    """Plan which samples share a row; sample ids in the plan are indices in the data set.

    Samples count with their padded lengths, and shared prefixes (if the table has groups) once per row. The data set is
    read only for the id of a sample that is refused.

    Raises:
        SampleError: samples are too large for a row, and `overlength` is "error"; lists their indices.
        ConfigError: all samples are too large, or there are too few for `rows_multiple`.
    """
    budgets = table.budgets(patches=settings.max_patches, images=settings.max_images)
    if slots.max_segments is not None:
        each = np.ones(len(table), np.int64)
        budgets = (*budgets, Budget(name="samples", costs=each, limit=slots.max_segments))
    gaps = round_up(table.tokens, slots.multiple) - table.tokens
    chosen = {"strategy": settings.strategy, "overlength": settings.overlength, "seed": settings.seed}
    try:
        slotted = replace(table, text_tokens=table.text_tokens + gaps)
        plan = plan_bins(slotted, settings.capacity, budgets=budgets, groups=table.groups, **chosen)
    except SampleError as error:
        name = None if error.index is None else sample_id_of(sample_at(dataset, error.index))
        raise error.of_sample(error.index, name) from None
    if not len(plan):
        raise ConfigError(f"all {len(table)} samples exceed a row of {settings.capacity} tokens; raise the capacity")
    return split_rows(plan, settings.rows_multiple)


def _totals(table: LengthTable, plan: Plan, row_multiple: int) -> dict[str, Any]:
    """Compute `counts`, `sizes` and `fill_ratio` of the manifest."""
    place, groups = table.by_place, plan.groups
    tokens = plan.sums(place(table.tokens), getattr(groups, "tokens", None))  # per row, shared prefixes once
    patches = plan.sums(place(table.patches), getattr(groups, "patches", None))
    packed = {name: place(getattr(table, name))[plan.sample_ids] for name in ("tokens", "targets", "images", "videos")}
    counts = Counts(
        total=table.measured,
        refused=len(table.refused),
        dropped=len(plan.dropped) - len(table.refused),
        samples=len(plan.sample_ids),
        rows=len(plan),
        patches=int(patches.sum()),
        **{name: int(values.sum()) for name, values in packed.items()},
    )
    sizes = FixedSizes(
        longest_row=int(round_up(plan.tokens, row_multiple).max()),
        longest_segment=int(packed["tokens"].max()),
        most_segments=int(np.diff(plan.bounds).max()),
        most_images=int(plan.sums(place(table.images + table.videos), getattr(groups, "images", None)).max()),
        most_patches=int(patches.max()),
    )
    fill_ratio = round(float(tokens.sum() / np.maximum(plan.tree_tokens, plan.capacity).sum()), 6)
    return {"counts": counts, "sizes": sizes, "fill_ratio": fill_ratio}


def _left_out(table: LengthTable, plan: Plan, dataset: MapStyle) -> list[dict[str, Any]]:
    """List the samples in no row, by index. The data set is read for the ids of samples that are too large."""
    errors: dict[Any, SampleError] = {error.index: error for error in table.refused}
    for at in set(plan.dropped.tolist()) - errors.keys():
        detail = f"it exceeds a row by itself: {plan.excess(at)}; raise the limit, or choose overlength='own_row'"
        errors[at] = SampleError(detail, OVERLENGTH, index=at, sample_id=sample_id_of(sample_at(dataset, at)))
    return [errors[at].to_dict() for at in sorted(errors)]


# ---------------------------------------------------------------------- reading

DECIDED = ("layout", "vocab_size", *(name for name in digests.COLLATOR_SETTINGS if name not in ("on_bad", "limits")))
"""Collator settings that are fixed when the rows are packed."""
MOST_OPEN = 64
"""Maximum number of open shards, so that the process does not run out of file descriptors."""


@final
class PackedDataset(Dataset[dict[str, Any]]):
    """Rows packed ahead: `dataset[row]` is a batch for `model(**batch)`, `dataset.row(row)` the same row as an object.

    `VLMCollator(layout="packed")` would make the same rows of the same samples. Images are decoded and cut into
    patches when a row is read. Each process opens files at its first access.

    Megatron-Bridge's offline packing ends real lengths before a final end-of-text token. Here, real lengths are stored,
    so a target counts whatever its id is.

    Args:
        path: folder written by `write_rows` or `vlmpack pack`.
        processor: processor for `VLMCollator`, with the same settings as when packing. None: rows can be read with
            `measured`, but not trained on.
        fixed_sizes: pad every row to the capacity, and repeat its last boundary until all rows have the same number of
            boundaries, as CUDA graphs need.
        settings: further settings of `VLMCollator`: `on_bad`, `skip_log`, `skip_limit`, `limits`, `pixel_dtype`, ...

    Raises:
        ConfigError: there are no finished rows, files are missing or damaged, the processor differs from the one used
            for packing (names the differences), or settings contradict each other.
    """

    def __init__(self, path: str | Path, processor: Any = None, *, fixed_sizes: bool = False, **settings: Any) -> None:
        self.path = Path(path).absolute()
        self.manifest = Manifest.load(path)
        """The manifest, with counts and the fixed sizes that CUDA graphs need."""
        sharing = self.manifest.settings["collator"]["share_prefixes"]
        self.share_prefixes = None if sharing is None else SharePrefixes(**sharing)
        """How samples of a row share prefixes; None: they share nothing."""
        self.slots = self._slot_rule(fixed_sizes=fixed_sizes)
        """How samples are padded in rows."""
        self.manifest.check_files(self.path)
        self.collator = None if processor is None else self._collator(processor, settings)
        """Collator that cuts images into patches and keeps the log of skipped samples; None: no processor was given."""
        self._files: dict[tuple[int, int], Any] = {}
        """Open shards by (process id, shard number), because a forked process opens its own; last used at the end."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.manifest.counts.rows

    def __repr__(self) -> str:
        counts, full = self.manifest.counts, f"{self.manifest.fill_ratio:.2%} full"
        held = f"{len(self)} rows of {self.manifest.capacity} tokens, {full}, {counts.samples} samples"
        without = ", no processor" if self.collator is None else ""
        return f"PackedDataset({str(self.path)!r}, {held}, {counts.images} images, {counts.videos} videos{without})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}

    def __getitem__(self, row: SupportsIndex) -> dict[str, Any]:
        """Return a row as a dictionary for `model(**batch)`.

        Raises:
            TypeError: the row number is not an integer (it may be a column name).
            IndexError: there is no such row.
            SampleError: an image cannot be used, and `on_bad` is "raise"; names file, row and sample.
            ConfigError: a file is damaged, or there is no processor.
        """
        return self.row(row).to_hf()

    def row(self, row: SupportsIndex) -> PackedRow:
        """Return a row as an object. Raises the same errors as `dataset[row]`."""
        samples = self._read(row)
        try:
            packed = self._needed_collator.decode([sample for _, sample in samples])
        except SampleError as error:
            place, (shard, at) = None if error.index is None else samples[error.index][0], self._where(row)
            detail = f"{error.detail} (row {at} of {self.path / self.manifest.shards[shard].file})"
            raise SampleError(detail, index=place, reason=error.reason, sample_id=error.sample_id) from error
        assert isinstance(packed, PackedRow), "the collator packs"
        return packed

    def measured(self, row: SupportsIndex) -> tuple[Encoded, ...]:
        """Return a row's samples without images: token ids, labels and grids. Needs no processor.

        Raises:
            IndexError: there is no such row.
            ConfigError: a file is damaged.
        """
        return tuple(sample for _, sample in self._read(row, without=MEDIA))

    def tree(self, row: SupportsIndex) -> PrefixTree | None:
        """Return a row's prefix tree, without pixels; None: its samples share nothing. Needs no processor.

        Raises:
            IndexError: there is no such row.
            ConfigError: a file is damaged.
        """
        if self.share_prefixes is None:
            return None
        limits = DEFAULT_LIMITS if self.collator is None else self.collator.limits
        least = self.share_prefixes.min_shared
        return tree_of([sample for _, sample in self._read(row)], limits=limits, min_shared=least)

    def collate(self, rows: Sequence[dict[str, Any]] | dict[str, Any]) -> dict[str, Any]:
        """Return the only row of a list, or a step of loss 0 for an empty list: the `collate_fn` for a loader of rows.

        A loader with `batch_size=None` passes a single row, which is returned unchanged.

        Raises:
            ConfigError: there are several rows; each row is already a whole batch.
        """
        if not isinstance(rows, dict) and len(rows) > 1:
            remedy = "per_device_train_batch_size=1 (or DataLoader(batch_size=None)) and accumulate gradients instead"
            raise ConfigError(f"{len(rows)} rows were put into one batch, and each is a batch by itself: set {remedy}")
        return rows if isinstance(rows, dict) else rows[0] if rows else self._needed_collator([])

    @cached_property
    def plan(self) -> Plan:
        """A plan with one sample per row, for `PackedBatchSampler(dataset.plan, ranks=..., remainder="empty")`.

        The length of a row is the number of tokens it computes, with shared prefixes counted once.
        """
        packed, rows = self.manifest.load_plan(self.path), np.arange(len(self))
        lengths, capacity = packed.tree_tokens, max(packed.capacity, int(packed.tree_tokens.max()))
        return Plan.from_assignment(rows, lengths=lengths, capacity=capacity)

    @property
    def _needed_collator(self) -> VLMCollator:
        if self.collator is None:
            raise ConfigError(f"the rows of {self.path} need the processor: PackedDataset(path, processor)")
        return self.collator

    def _collator(self, processor: Any, settings: Mapping[str, Any]) -> VLMCollator:
        if wrong := [name for name in DECIDED if name in settings]:
            raise ConfigError(f"{', '.join(wrong)}: decided when the rows were packed; pack again to change that")
        decided = {"layout": "packed", "slots": self.slots, "share_prefixes": self.share_prefixes or False}
        decided["vocab_size"] = self.manifest.processor["tokens"]["vocab_size"]
        if sampling := self.manifest.settings["collator"]["sampling"]:
            decided["sampling"] = FrameSampling(**sampling)
        collator = VLMCollator(processor, **decided, **settings)
        if lines := list(digests.differences(self.manifest.processor, digests.fingerprint(collator))):
            fault = f"{self.path} was packed with another processor: {'; '.join(lines)}"
            raise ConfigError(f"{fault}. Give that one, or pack again")
        return collator

    def _slot_rule(self, *, fixed_sizes: bool) -> SlotRule:
        """Return how samples are padded in rows.

        Raises:
            ConfigError: the rows cannot have fixed sizes.
        """
        sizes, capacity = self.manifest.sizes, self.manifest.capacity
        slots = SlotRule(**self.manifest.settings["collator"]["slots"])
        if not fixed_sizes:
            return slots
        if self.share_prefixes is not None:
            fault = "the rows share prefixes: what they compute is shorter than they are, and has no fixed size"
            raise ConfigError(f"{fault}: leave fixed_sizes out, or pack without sharing")
        if sizes.longest_row > capacity:
            fault = f"fixed_sizes=True pads rows to {capacity} tokens, but the longest has {sizes.longest_row}"
            raise ConfigError(f"{fault} (overlength='own_row'). Pack again with overlength='drop' or more capacity")
        return replace(slots, pad_to=capacity, max_segments=sizes.most_segments)

    def _read(self, row: SupportsIndex, *, without: Sequence[str] = ()) -> list[tuple[int, Encoded]]:
        """Return (index in the data set, sample) for each sample of a row."""
        number, at = self._where(row)
        shard, key, tokens = self.manifest.shards[number], (os.getpid(), number), self.manifest.processor["tokens"]
        with _reading(f"row {at} of {self.path / shard.file}"):
            file = self._files.pop(key, None) or _opened(self.path, shard)
            self._files[key] = file
            if len(self._files) > MOST_OPEN:
                del self._files[next(iter(self._files))]
            columns = [name for name in file.schema_arrow.names if name not in without]
            table = file.read_row_group(at, columns=columns, use_threads=False)
            return _samples_of(table, (tokens["image_token_id"], tokens["video_token_id"]))

    def _where(self, row: SupportsIndex) -> tuple[int, int]:
        """Return (shard number, row number within the shard) of a row."""
        at = index(row)
        if not -len(self) <= at < len(self):
            raise IndexError(f"row {at} of {len(self)}")
        return divmod(at % len(self), self.manifest.settings["shard_rows"])
