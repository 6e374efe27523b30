"""One file of rows: its samples are read, outlined and written, row after row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from vlmpack.collate import VLMCollator
from vlmpack.collate.encoded import Encoded
from vlmpack.data.images import ImageError
from vlmpack.errors import SampleError
from vlmpack.offline.arrow import pyarrow
from vlmpack.offline.files import WorkFolder, sha256_of
from vlmpack.offline.manifest import Shard
from vlmpack.offline.media import Images, StoredImage, stored_image
from vlmpack.offline.record import open_writer, record_of, schema
from vlmpack.stream.source import MapStyle


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


@final
@dataclass(frozen=True, kw_only=True)
class ShardWriter:
    """Writes files of rows; pickles to workers."""

    dataset: MapStyle
    """Samples by place."""
    collator: VLMCollator
    """Makes outlines of them."""
    folder: WorkFolder
    """Of the store."""
    images: Images
    """How images are kept."""
    has_media: bool
    """Whether any sample has images or videos."""
    jobs: tuple[ShardJob, ...]
    """The files to write."""

    def __call__(self, at: int) -> Shard:
        """Write the file of one job, and its entry in the manifest beside what is unfinished.

        Raises:
            SampleError: a sample is not what was measured, or its image cannot be read; names its place.
            ConfigError: a sample cannot be stored, or the disk is full.
        """
        job = self.jobs[at]
        with self.folder.whole_file(self.folder.out / job.file) as path:
            with open_writer(path, has_media=self.has_media) as writer:
                for places, lengths in zip(job.rows, job.lengths, strict=True):
                    writer.write_table(self._row(places, lengths))
            shard = Shard(file=job.file, rows=len(job.rows), bytes=path.stat().st_size, sha256=sha256_of(path))
            self.folder.write_json(self.folder.path / f"{job.file}.json", asdict(shard))
        return shard

    def _row(self, places: Sequence[int], lengths: Sequence[int]) -> Any:
        samples = [self._sample(place, length) for place, length in zip(places, lengths, strict=True)]
        columns = schema(has_media=self.has_media)
        record = record_of(samples, places, self._store)
        return pyarrow().Table.from_pylist([{name: record[name] for name in columns.names}], schema=columns)

    def _sample(self, place: int, length: int) -> Encoded:
        sample = self.collator.outline(self.dataset[place], place)
        if sample.num_tokens != length:
            raise SampleError(
                f"it has {sample.num_tokens} tokens, and had {length} when it was measured: the data set was changed "
                "meanwhile; pack into another folder",
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


def written(folder: WorkFolder, file: str) -> Shard | None:
    """The entry of a file that an interrupted run has finished."""
    entry, path = folder.path / f"{file}.json", folder.out / file
    if not (entry.is_file() and path.is_file()):
        return None
    shard = Shard(**json.loads(entry.read_text(encoding="utf-8")))
    return shard if shard.bytes == path.stat().st_size else None
