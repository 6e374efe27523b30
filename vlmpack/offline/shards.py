"""One file of rows: its samples are read, measured and written, row after row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from vlmpack.collate import Encoded, VLMCollator
from vlmpack.data import ImageError
from vlmpack.errors import SampleError
from vlmpack.loading import MapStyle
from vlmpack.offline.arrow import pyarrow
from vlmpack.offline.files import WorkFolder, sha256_of, writing
from vlmpack.offline.manifest import Shard
from vlmpack.offline.media import Images, StoredImage, stored_image
from vlmpack.offline.record import CHECKSUMS, open_writer, record_of, schema
from vlmpack.offline.shardfiles import checksums, footer_digest
from vlmpack.offline.unchanged import sample_digest

NO_ENTRY = (OSError, ValueError, TypeError, AttributeError, RecursionError)
"""What reading the entry of a file raises that was not finished, or whose entry is damaged: it is written anew."""


@final
@dataclass(frozen=True, kw_only=True)
class ShardJob:
    """Which rows go into a file."""

    file: str
    """Its name."""
    rows: tuple[tuple[int, ...], ...]
    """Places in the data set of the samples of each row."""
    lengths: tuple[tuple[int, ...], ...]
    """Tokens of each of them, as measured."""
    targets: tuple[tuple[int, ...], ...]
    """Targets of each of them, as measured."""


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
    """How images are kept."""
    has_media: bool
    """Whether any sample has images or videos."""
    jobs: tuple[ShardJob, ...]
    """The files to write."""
    plan: str
    """SHA-256 of the plan; a file of another one is not continued."""

    def __call__(self, at: int) -> Shard:
        """Write the file of one job, and its entry in the manifest beside what is unfinished.

        Raises:
            SampleError: a sample is not what was measured, or its image cannot be read; names its place.
            ConfigError: a sample cannot be stored, or the disk is full.
        """
        job = self.jobs[at]
        with self.folder.whole_file(self.folder.out / job.file) as path:
            self._write(job, path)
            shard = Shard(
                file=job.file,
                rows=len(job.rows),
                bytes=path.stat().st_size,
                sha256=sha256_of(path),
                footer=footer_digest(path),
            )
            self.folder.write_json(_entry(self.folder, job.file), {"plan": self.plan, **asdict(shard)})
        return shard

    def _write(self, job: ShardJob, path: Path) -> None:
        """Write the rows one by one; what a data set raises of its own is no error of the file."""
        found = []
        with open_writer(path, has_media=self.has_media) as writer:
            for places, lengths, targets in zip(job.rows, job.lengths, job.targets, strict=True):
                row = self._row(places, zip(lengths, targets, strict=True))
                found.append(checksums(row))
                with writing(self.folder.out / job.file):
                    writer.write_table(row)
            writer.add_key_value_metadata({CHECKSUMS: " ".join(found)})

    def _row(self, places: Sequence[int], measured: Iterable[tuple[int, int]]) -> Any:
        features = [self.dataset[place] for place in places]
        samples = [self._sample(*one) for one in zip(features, places, measured, strict=True)]
        digests = [sample_digest(feature, self.collator) for feature in features]
        columns = schema(has_media=self.has_media)
        record = record_of(samples, places, digests, self._store)
        return pyarrow().Table.from_pylist([{name: record[name] for name in columns.names}], schema=columns)

    def _sample(self, feature: Any, place: int, measured: tuple[int, int]) -> Encoded:
        sample = self.collator.measure(feature, place)
        seen = (sample.num_tokens, sample.num_targets)
        if seen != measured:
            tokens, targets = (f"{count} tokens, {learnt} of them learnt" for count, learnt in (seen, measured))
            raise SampleError(
                f"it has {tokens}, and had {targets} when it was measured: the data set was changed meanwhile; pack "
                "into another folder",
                index=place,
                reason="changed",
                sample_id=sample.sample_id,
            )
        return sample

    def _store(self, source: Any, *, sample: Encoded, place: int) -> StoredImage:
        try:
            return stored_image(source, self.images, self.collator.limits)
        except ImageError as error:
            raise SampleError(error.detail, index=place, reason=error.reason, sample_id=sample.sample_id) from error


def written(folder: WorkFolder, file: str, plan: str) -> Shard | None:
    """The entry of a file that an interrupted run has finished, for the same plan."""
    try:
        entry = json.loads(_entry(folder, file).read_text(encoding="utf-8"))
        shard = Shard(**{name: value for name, value in entry.items() if name != "plan"})
        is_whole = (folder.out / file).stat().st_size == shard.bytes
    except NO_ENTRY:
        return None
    return shard if is_whole and entry.get("plan") == plan else None


def _entry(folder: WorkFolder, file: str) -> Path:
    return folder.path / f"{file}.json"
