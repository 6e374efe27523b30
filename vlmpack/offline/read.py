"""PackedDataset: the rows that `write_rows` wrote, as a map-style data set of batches for a model."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex, final, overload

import numpy as np
from torch.utils.data import Dataset

from vlmpack.collate import Encoded, VLMCollator
from vlmpack.data import DEFAULT_LIMITS
from vlmpack.errors import ConfigError, LayoutError, SampleError
from vlmpack.layout import PackedRow, Segments
from vlmpack.offline.files import sha256_of, size_of
from vlmpack.offline.fingerprint import differences, fingerprint
from vlmpack.offline.fixed import slot_rule
from vlmpack.offline.manifest import NAME, PLAN, Manifest
from vlmpack.offline.record import MEDIA, samples_of
from vlmpack.offline.shardfiles import ShardFiles
from vlmpack.plan import Plan

DECIDED = ("layout", "slots", "max_length", "overlength", "train_on", "markers", "vocab_size")
"""Settings of a collator that were decided when the rows were packed."""


@final
class PackedDataset(Dataset[dict[str, Any]]):
    """Rows of a store. `dataset[row]` is a batch for `model(**batch)`, `dataset.row(row)` the same as an object, and
    `dataset[2:5]` a list of batches.

    Equal to what `VLMCollator(layout="packed")` makes of the same samples: images are decoded and cut into patches when
    a row is asked for. Files are opened by each process when it needs them first.

    Args:
        path: the folder that `write_rows` or `vlmpack pack` wrote.
        processor: as for `VLMCollator`, with the settings that it had then; None: rows can be looked at by `measured`
            and not be trained on.
        pad_to_max_length: make every row as wide as the capacity.
        pad_cu_seqlens: give every row as many boundaries; needs `pad_to_max_length`.
        pad_seq_to_mult: what samples are rounded up to; None: as packed. Others have to divide that.
        verify: compare the SHA-256 of every file now, which reads all of them. Without it, sizes are compared now, and
            footers and rows by their checksums when they are read first.
        settings: further settings of `VLMCollator`: `on_bad`, `skip_log`, `skip_limit`, `limits`, `pixel_dtype`, ...

    Raises:
        ConfigError: no store, files that are missing or damaged, a processor that differs from the one that packed
            (says in what), or settings that contradict each other.
    """

    def __init__(
        self,
        path: str | Path,
        processor: Any = None,
        *,
        pad_to_max_length: bool = False,
        pad_cu_seqlens: bool = False,
        pad_seq_to_mult: int | None = None,
        verify: bool = False,
        **settings: Any,
    ) -> None:
        _check_kinds(path, processor)
        self.path = Path(path).absolute()
        self.manifest = Manifest.load(path)
        """Counts, and the fixed sizes that CUDA graphs need."""
        self.slots = slot_rule(
            self.manifest,
            pad_to_max_length=pad_to_max_length,
            pad_cu_seqlens=pad_cu_seqlens,
            pad_seq_to_mult=pad_seq_to_mult,
        )
        """How samples lie in the rows."""
        _check_files(self.path, self.manifest, verify=verify)
        self.collator = None if processor is None else self._collator(processor, settings)
        """Cuts images into patches, and counts samples in its log of skipped samples; None: without a processor."""
        self._files = ShardFiles(self.path, self.manifest.shards)
        self._starts = [0, *accumulate(shard.rows for shard in self.manifest.shards)]

    def __len__(self) -> int:
        """Rows."""
        return self.manifest.counts.rows

    def __repr__(self) -> str:
        counts = self.manifest.counts
        return (
            f"PackedDataset({str(self.path)!r}, {counts.rows} rows of {self.manifest.capacity} tokens, "
            f"{self.manifest.fill:.2%} full, {counts.samples} samples, {counts.images} images, {counts.videos} videos"
            f"{', no processor' if self.collator is None else ''})"
        )

    @overload
    def __getitem__(self, row: SupportsIndex) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, row: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, row: SupportsIndex | slice) -> dict[str, Any] | list[dict[str, Any]]:
        """A row as a dictionary for `model(**batch)`; of a slice, as many, in a list.

        Raises:
            TypeError: rows have numbers, and this is none (the name of a column).
            IndexError: there is no such row.
            SampleError: an image cannot be used, and `on_bad` is "raise"; names file, row and sample.
            ConfigError: a file is damaged, or there is no processor.
        """
        if isinstance(row, slice):
            return [self[at] for at in range(len(self))[row]]
        return self.row(row).to_hf()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[row] for row in range(len(self)))

    def row(self, row: SupportsIndex) -> PackedRow:
        """A row as an object; raises as `dataset[row]`."""
        if self.collator is None:
            raise ConfigError(f"the rows of {self.path} need the processor: PackedDataset(path, processor)")
        samples = self._read(row)
        try:
            packed = self.collator.decode([sample for _, sample in samples])
        except SampleError as error:
            raise self._named(error, row, [place for place, _ in samples]) from error
        assert isinstance(packed, PackedRow), "the collator packs"
        return packed

    def measured(self, row: SupportsIndex) -> tuple[Encoded, ...]:
        """The samples of a row without their images: token ids, labels, grids. Needs no processor.

        Raises:
            IndexError: there is no such row.
            ConfigError: a file is damaged.
        """
        return tuple(sample for _, sample in self._read(row, without=MEDIA))

    def segments(self, row: SupportsIndex) -> Segments:
        """Where the samples of a row lie; raises as `measured`."""
        return Segments.from_lengths([sample.num_tokens for sample in self.measured(row)], self.slots)

    def collate(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The `collate_fn` of a loader of single rows: hands the row on, and makes a step of loss 0 of no row.

        Raises:
            ConfigError: several rows; a row is a whole batch.
        """
        if len(rows) > 1:
            raise ConfigError(
                f"{len(rows)} rows were put into one batch, and each is a batch by itself: set "
                "per_device_train_batch_size=1 (or DataLoader(batch_size=None)) and accumulate gradients instead"
            )
        if rows:
            return rows[0]
        if self.collator is None:
            raise ConfigError("an empty row needs the processor: PackedDataset(path, processor)")
        return self.collator([])

    @cached_property
    def plan(self) -> Plan:
        """Each row as one sample, for `PackedBatchSampler(dataset.plan, ranks=..., remainder="empty" or "drop")`."""
        rows, packed = len(self), Plan.load(self.path / PLAN)
        lengths = packed.tokens
        return Plan(
            sample_ids=np.arange(rows),
            bounds=np.arange(rows + 1),
            lengths=lengths,
            dropped=np.zeros(0, np.int64),
            capacity=max(packed.capacity, int(lengths.max())),
        )

    # ------------------------------------------------------------------ how

    def _collator(self, processor: Any, settings: Mapping[str, Any]) -> VLMCollator:
        wrong = [name for name in DECIDED if name in settings]
        if wrong:
            raise ConfigError(f"{', '.join(wrong)}: decided when the rows were packed; pack again to change that")
        vocab_size = self.manifest.processor["tokens"]["vocab_size"]
        collator = VLMCollator(processor, layout="packed", slots=self.slots, vocab_size=vocab_size, **settings)
        found = list(differences(self.manifest.processor, fingerprint(collator)))
        if found:
            raise ConfigError(
                f"{self.path} was packed with another processor: {'; '.join(found)}. Give that one, or pack again"
            )
        return collator

    def _read(self, row: SupportsIndex, *, without: Sequence[str] = ()) -> tuple[tuple[int, Encoded], ...]:
        """(place in the data set, sample) of every sample of a row."""
        file, at = self._where(row)
        tokens = self.manifest.processor["tokens"]
        limits = DEFAULT_LIMITS if self.collator is None else self.collator.limits
        try:
            table = self._files.read(file, at, without=without)
            return samples_of(table, (tokens["image_token_id"], tokens["video_token_id"]), limits)
        except LayoutError as error:
            raise ConfigError(f"row {at} of {self.path / file} contradicts itself: {error}") from error

    def _where(self, row: SupportsIndex) -> tuple[str, int]:
        """The file of a row, and its number in there."""
        at = _number(row, len(self))
        shard = bisect_right(self._starts, at) - 1
        return self.manifest.shards[shard].file, at - self._starts[shard]

    def _named(self, error: SampleError, row: SupportsIndex, places: Sequence[int]) -> SampleError:
        """The refusal of a sample, by its place in the data set and in the store."""
        file, at = self._where(row)
        place = None if error.index is None else places[error.index]
        detail = f"{error.detail} (row {row} of the store: row {at} of {self.path / file})"
        return SampleError(detail, index=place, reason=error.reason, sample_id=error.sample_id)


def _number(row: SupportsIndex, rows: int) -> int:
    """The number of a row, counted from the start."""
    try:
        at = index(row)
    except TypeError:
        raise TypeError(
            f"rows of a store have numbers, got the {type(row).__name__} {row!r:.40}; a row is dataset[0], and a "
            'column of it dataset[0]["input_ids"]'
        ) from None
    if not -rows <= at < rows:
        raise IndexError(f"row {at} of {rows}")
    return at % rows


def _check_kinds(path: object, processor: object) -> None:
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"path has to be the folder that write_rows wrote, got a {type(path).__name__}")
    if isinstance(processor, VLMCollator):
        raise ConfigError(
            "a store has a collator of its own, and needs the processor only: give PackedDataset(path, "
            "collator.processor), and further settings by name, such as on_bad='skip'"
        )


def _check_files(folder: Path, manifest: Manifest, *, verify: bool) -> None:
    for shard in manifest.shards:
        path = folder / shard.file
        size = size_of(path)
        if size != shard.bytes:
            seen = "is not there" if size is None else f"has {size} bytes"
            raise ConfigError(
                f"{path} {seen}, and {NAME} tells of {shard.bytes} bytes; restore it, or pack again into the same "
                "folder, which writes this file alone"
            )
        if verify and sha256_of(path) != shard.sha256:
            raise ConfigError(
                f"{path} is damaged: its SHA-256 is not that of {NAME}; restore it, or remove it and pack again into "
                "the same folder, which writes this file alone"
            )
