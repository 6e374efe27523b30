"""Files of rows: written one by one, read row by row, and compared with the data set.

    written    its samples are read, measured and written, row after row
    opened     the footer's SHA-256, so that another file of the same size is refused
    read       the checksum of each row, which the footer holds
    compared   places [17, 4]   digests [a3.., 09..]   stored with the row
               dataset[17] [4]  digests [a3.., 77..]   computed now: sample 4 was changed

A sample's digest covers what the collator reads of it: text, options, id, and the bytes of its media in any place.
Without it, samples of two data sets that are equally long would share a store.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, final

from vlmpack.collate.collator import VLMCollator, sample_id_of
from vlmpack.collate.encoded import Encoded
from vlmpack.data.images import ImageError
from vlmpack.data.videos import VideoLimits, open_video
from vlmpack.errors import ConfigError, Refusal, SampleError
from vlmpack.files import atomic_file, unreadable, writing
from vlmpack.loading.resumable import MapStyle, sample_at
from vlmpack.loading.state import digest_of
from vlmpack.plan.lengths import divided_up
from vlmpack.store.cache import content_of, plain
from vlmpack.store.executors import InOrder
from vlmpack.store.folder import WorkFolder
from vlmpack.store.manifest import NAME, Shard, read_left_out, sha256_of
from vlmpack.store.records import (
    CHECKSUMS,
    MEDIA,
    Images,
    checksums,
    each_medium_once,
    open_writer,
    pyarrow,
    record_of,
    schema,
)
from vlmpack.store.symbols import content_sums

TAIL = 8
"""Bytes behind a footer: its length in 4 bytes, and b"PAR1"."""
MOST_OPEN = 64
"""Files that are open at a time, of those used last: a store may have more than a process may open."""
DIGEST_BYTES = 16
PART = 256
"""Samples of the list of those left out that are compared at a time."""
NAMED = 5
"""Changed samples that a refusal lists."""

# ---------------------------------------------------------------------- written


class PlannedSample(NamedTuple):
    """One sample of a planned row."""

    place: int
    """In the data set."""
    tokens: int
    """Measured for the plan."""
    targets: int
    """Measured for the plan."""


@final
@dataclass(frozen=True, kw_only=True)
class ShardJob:
    """Which rows go into a file."""

    file: str
    """Its name."""
    rows: tuple[tuple[PlannedSample, ...], ...]
    """The samples of each row."""


@final
@dataclass(frozen=True, kw_only=True)
class ShardWriter:
    """Writes files of rows; pickles to workers."""

    dataset: MapStyle
    """Samples by place."""
    collator: VLMCollator
    """Measures the samples."""
    folder: WorkFolder
    """Of the store."""
    images: Images
    """The form in which images are kept."""
    has_media: bool
    """Some sample has images or videos."""
    jobs: tuple[ShardJob, ...]
    """The files to write."""
    plan: str
    """SHA-256 of the plan; a file of another one is not continued."""

    def __call__(self, at: int) -> Shard:
        """Write the file of one job, and note its entry in the manifest in the work folder.

        Raises:
            SampleError: a sample is not what was measured, or its image cannot be read; names its place.
            ConfigError: a sample cannot be stored, or the disk is full.
        """
        job = self.jobs[at]
        with atomic_file(self.folder.out / job.file, folder=self.folder.unfinished) as path:
            self._write(job, path)
            shard = Shard(
                file=job.file,
                rows=len(job.rows),
                bytes=path.stat().st_size,
                sha256=sha256_of(path),
                footer=footer_digest(path),
            )
            self.folder.write_json(_note(self.folder, job.file), {"plan": self.plan, **asdict(shard)})
        return shard

    def _write(self, job: ShardJob, path: Path) -> None:
        """Write the rows one by one; an error that the data set raises is no error of the file."""
        written = []
        with open_writer(path, self._schema) as writer:
            for planned in job.rows:
                row = self._row(planned)
                written.append(checksums(row))
                with writing(self.folder.out / job.file):
                    writer.write_table(row)
            writer.add_key_value_metadata({CHECKSUMS: " ".join(written)})

    def _row(self, planned: Sequence[PlannedSample]) -> Any:
        features = [self.dataset[sample.place] for sample in planned]
        samples = [self._outline(feature, sample) for feature, sample in zip(features, planned, strict=True)]
        digests = [sample_digest(feature, self.collator) for feature in features]
        places = [sample.place for sample in planned]
        limits = self.collator.limits, self.collator.file_rules.limits
        record = record_of(samples, places, digests, self.images, *limits)
        if self._is_shared:
            record = each_medium_once(record)
        columns = self._schema
        return pyarrow().Table.from_pylist([{name: record[name] for name in columns.names}], schema=columns)

    @property
    def _schema(self) -> Any:
        """The columns of the file."""
        has_runs = self.collator.metadata.by_processor
        return schema(has_media=self.has_media, is_shared=self._is_shared, has_runs=has_runs)

    @property
    def _is_shared(self) -> bool:
        return self.collator.share_prefixes is not None

    def _outline(self, feature: Any, planned: PlannedSample) -> Encoded:
        sample = self.collator.measure(feature, planned.place)
        if (sample.num_tokens, sample.num_targets) != (planned.tokens, planned.targets):
            raise SampleError(
                f"it has {sample.num_tokens} tokens, {sample.num_targets} of them learnt, and had {planned.tokens} "
                f"tokens, {planned.targets} of them learnt, when it was measured: the data set was changed meanwhile; "
                "pack into another folder",
                index=planned.place,
                reason="changed",
                sample_id=sample.sample_id,
            )
        return sample


def finished_shard(folder: WorkFolder, file: str, plan: str) -> Shard | None:
    """Read the note of a file that an interrupted run has finished, for the same plan; None: there is none."""
    try:
        entry = json.loads(_note(folder, file).read_text(encoding="utf-8"))
        shard = Shard(**{name: value for name, value in entry.items() if name != "plan"})
        is_whole = (folder.out / file).stat().st_size == shard.bytes
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):  # not finished, or the note is damaged
        return None
    return shard if is_whole and entry.get("plan") == plan else None


def _note(folder: WorkFolder, file: str) -> Path:
    return folder.path / f"{file}.json"


def footer_digest(path: Path) -> str:
    """Compute the SHA-256 of the footer of a parquet file, its length included.

    Raises:
        ValueError: it has none.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - TAIL, 0))
        tail = file.read(TAIL)
        length = int.from_bytes(tail[:4], "little") + TAIL
        if len(tail) < TAIL or length > size:
            raise ValueError("it ends without a footer")
        file.seek(size - length)
        return hashlib.sha256(file.read(length)).hexdigest()


# ---------------------------------------------------------------------- read


@final
class ShardFiles:
    """Rows by file and number. Pickles as a path; after a fork, the child opens files anew.

    Args:
        folder: of the store.
        shards: its files.
    """

    def __init__(self, folder: Path, shards: Iterable[Shard]) -> None:
        self.folder = folder
        self._shards = {shard.file: shard for shard in shards}
        self._open: OrderedDict[str, Any] = OrderedDict()
        self._process = os.getpid()

    def read(self, name: str, row: int, *, without: Collection[str] = ()) -> Any:
        """Read one row as a pyarrow table.

        Args:
            name: of the file.
            row: its number in the file.
            without: columns of media that are not read.

        Raises:
            ConfigError: the file is missing, damaged, or another one than was written.
        """
        with _reading(f"row {row} of {self.folder / name}"):
            file = self._file(name)
            columns = [column for column in file.schema_arrow.names if column not in without]
            table = file.read_row_group(row, columns=columns, use_threads=False)
            stored = file.metadata.metadata[CHECKSUMS.encode()].decode().split(" ")[row]
            computed = checksums(table)
            if len(table) != 1 or not stored.startswith(computed) or (len(computed) < len(stored) and not without):
                raise ValueError("its checksum is another one")
        return table

    def digests(self, name: str) -> Sequence[tuple[int, str]]:
        """Return (place in the data set, digest) of every sample of a file; raises as `read`."""
        pairs = []
        for row in range(self._shards[name].rows):
            table = self.read(name, row, without=MEDIA)
            pairs += zip(table["places"][0].as_py(), table["digests"][0].as_py(), strict=True)
        return pairs

    def _file(self, name: str) -> Any:
        if self._process != os.getpid():
            self._open, self._process = OrderedDict(), os.getpid()
        if name not in self._open:
            if footer_digest(self.folder / name) != self._shards[name].footer:
                raise ValueError(f"its footer is not the one that {NAME} lists")
            self._open[name] = pyarrow().parquet.ParquetFile(self.folder / name, page_checksum_verification=True)
            if len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(name)
        return self._open[name]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Raise any error of a damaged file as a ConfigError, and a missing right to read it as another."""
    try:
        yield
    except (FileNotFoundError, PermissionError) as error:
        raise unreadable(name, error) from error
    except (ConfigError, MemoryError):
        raise
    except Exception as error:  # on damaged bytes pyarrow raises errors of every kind; OSError: a page's checksum
        raise ConfigError(
            f"{name} cannot be read: {error}. The file is damaged: restore it, or remove the folder and pack again"
        ) from error


# ---------------------------------------------------------------------- compared


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
        content = [sample_id_of(sample), *content_of(sample, collator, *read)]
        text = json.dumps(content, default=plain, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()
    except (Refusal, ConfigError, TypeError, ValueError, RecursionError):  # bad, or tokenised before
        return digest_of(sample)


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


def check_unchanged(
    dataset: MapStyle,
    collator: VLMCollator,
    out: Path,
    shards: Sequence[Shard],
    in_order: InOrder,
    progress: Callable[[int, int], None],
) -> None:
    """Compare the samples that a store holds, or lists as left out, with the data set.

    Args:
        dataset: samples by place; those of the store are read, and their media whole.
        collator: of the store.
        out: its folder.
        shards: the files that are finished.
        in_order: computes the parts.
        progress: is called with (parts done, parts in all).

    Raises:
        ConfigError: a sample was changed; lists places. A file is damaged.
    """
    listed = tuple((entry["index"], entry["digest"]) for entry in read_left_out(out))
    names = tuple(shard.file for shard in shards)
    work = partial(_compare, dataset, collator, ShardFiles(out, shards), names, listed)
    total = len(shards) + divided_up(len(listed), PART)
    with closing(in_order(work, total)) as parts:
        for done, (compared, changed) in enumerate(parts, 1):
            if changed:
                places = ", ".join(map(str, sorted(changed)[:NAMED]))
                raise ConfigError(
                    f"{out} holds other samples than the data set: {len(changed)} of {compared} compared were changed "
                    f"since they were packed (at {places}{', ...' * (len(changed) > NAMED)}). Pack into another "
                    "folder, or remove this one"
                )
            progress(done, total)


def _compare(
    dataset: MapStyle,
    collator: VLMCollator,
    files: ShardFiles,
    names: Sequence[str],
    listed: Sequence[tuple[int, str]],
    part: int,
) -> tuple[int, list[int]]:
    """Compare a file of rows, or some of the samples left out: how many, and the places of those that differ."""
    if part < len(names):
        stored = files.digests(names[part])
    else:
        start = (part - len(names)) * PART
        stored = listed[start : start + PART]

    def is_equal(place: int, digest: str) -> bool:
        is_there = 0 <= place < len(dataset)
        return is_there and sample_digest(sample_at(dataset, place), collator) == digest

    return len(stored), [place for place, digest in stored if not is_equal(place, digest)]
