"""PackedDataset: the rows that `write_rows` wrote, as a map-style data set of batches for a model.

    pad_to_max_length    every row is as wide as the capacity
    pad_cu_seqlens       every row has as many boundaries: the last one is repeated

Names and rules of the two are those of Megatron-Bridge's offline packing. There, real lengths end before a final
end-of-text token; here they are stored, so that a target counts whatever its id is.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex, final, overload

import numpy as np
from torch.utils.data import Dataset

from vlmpack.collate.assemble import SharePrefixes
from vlmpack.collate.collator import VLMCollator
from vlmpack.collate.encoded import Encoded
from vlmpack.collate.video import FrameSampling
from vlmpack.data.images import DEFAULT_LIMITS
from vlmpack.errors import ConfigError, LayoutError, SampleError
from vlmpack.files import unreadable
from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.row import PackedRow
from vlmpack.layout.segments import Segments, SlotRule
from vlmpack.plan.plan import Plan
from vlmpack.store.content import tree_of
from vlmpack.store.manifest import NAME, PLAN, Manifest, Shard, check_files, differences, fingerprint
from vlmpack.store.records import MEDIA, pyarrow, samples_of

DECIDED = (
    *("layout", "slots", "share_prefixes", "max_length", "overlength", "train_on", "markers", "vocab_size"),
    *("sampling", "add_stop", "ignored_keys"),
)
"""Settings of a collator that were decided when the rows were packed."""
SAMPLES = "vlmpack.samples"
"""Key of a file's footer: the digest of its samples."""
MOST_OPEN = 64
"""Files that are open at a time, of those used last: a store may have more than a process may open."""


@final
class PackedDataset(Dataset[dict[str, Any]]):
    """Rows of a store. `dataset[row]` is a batch for `model(**batch)`, `dataset.row(row)` the same as an object, and
    `dataset[2:5]` a list of batches.

    Equal to what `VLMCollator(layout="packed")` makes of the same samples: images are decoded and cut into patches when
    a row is read. Each process opens files at its first access.

    Args:
        path: the folder that `write_rows` or `vlmpack pack` wrote.
        processor: as for `VLMCollator`, with the settings that it had when packing; None: rows are read by `measured`
            and not be trained on.
        pad_to_max_length: make every row as wide as the capacity.
        pad_cu_seqlens: give every row as many boundaries; needs `pad_to_max_length`.
        verify: compare the SHA-256 of every file now, which reads all of them. Without it, sizes are compared now, and
            pages by their checksums when a row is read.
        settings: further settings of `VLMCollator`: `on_bad`, `skip_log`, `skip_limit`, `limits`, `pixel_dtype`, ...

    Raises:
        ConfigError: no store, files that are missing or damaged, a processor that differs from the one that packed
            (names the differences), or settings that contradict each other.
    """

    def __init__(
        self,
        path: str | Path,
        processor: Any = None,
        *,
        pad_to_max_length: bool = False,
        pad_cu_seqlens: bool = False,
        verify: bool = False,
        **settings: Any,
    ) -> None:
        if not isinstance(path, str | os.PathLike):
            raise ConfigError(f"path has to be the folder that write_rows wrote, got a {type(path).__name__}")
        if isinstance(processor, VLMCollator):
            raise ConfigError(
                "a store makes its collator, and needs the processor only: give PackedDataset(path, "
                "collator.processor), and further settings by name, such as on_bad='skip'"
            )
        self.path = Path(path).absolute()
        self.manifest = Manifest.load(path)
        """Counts, and the fixed sizes that CUDA graphs need."""
        sharing = self.manifest.settings["collator"]["share_prefixes"]
        self.share_prefixes = None if sharing is None else SharePrefixes(**sharing)
        """Settings by which samples of a row share prefixes; None: they share nothing."""
        self.slots = _slot_rule(self.manifest, pad_to_max_length=pad_to_max_length, pad_cu_seqlens=pad_cu_seqlens)
        """The rule by which samples lie in the rows."""
        check_files(self.path, self.manifest, verify=verify)
        self.collator = None if processor is None else self._collator(processor, settings)
        """Cuts images into patches, and counts samples in its log of skipped samples; None: without a processor."""
        self._files = ShardFiles(self.path, self.manifest.shards)
        self._starts = [0, *accumulate(shard.rows for shard in self.manifest.shards)]

    def __len__(self) -> int:
        """Rows."""
        return self.manifest.counts.rows

    def __repr__(self) -> str:
        counts, full = self.manifest.counts, f"{self.manifest.fill_ratio:.2%} full"
        return (
            f"PackedDataset({str(self.path)!r}, {counts.rows} rows of {self.manifest.capacity} tokens, "
            f"{full}, {counts.samples} samples, {counts.images} images, {counts.videos} videos"
            f"{', no processor' if self.collator is None else ''})"
        )

    @overload
    def __getitem__(self, row: SupportsIndex) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, row: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, row: SupportsIndex | slice) -> dict[str, Any] | list[dict[str, Any]]:
        """Return a row as a dictionary for `model(**batch)`; of a slice, as many, in a list.

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
        """Return a row as an object; raises as `dataset[row]`."""
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
        """Return the samples of a row without their images: token ids, labels, grids. Needs no processor.

        Raises:
            IndexError: there is no such row.
            ConfigError: a file is damaged.
        """
        return tuple(sample for _, sample in self._read(row, without=MEDIA))

    def segments(self, row: SupportsIndex) -> Segments:
        """Return the boundaries of the samples of a row; raises as `measured`."""
        return Segments.from_lengths([sample.num_tokens for sample in self.measured(row)], self.slots)

    def tree(self, row: SupportsIndex) -> PrefixTree | None:
        """Return the prefix tree of a row, without its pixels; None: its samples share nothing. Needs no processor.

        Raises:
            IndexError: there is no such row.
            ConfigError: a file is damaged.
        """
        if self.share_prefixes is None:
            return None
        limits = DEFAULT_LIMITS if self.collator is None else self.collator.limits
        samples = [sample for _, sample in self._read(row)]
        return tree_of(samples, limits=limits, min_shared=self.share_prefixes.min_shared)

    def collate(self, rows: Sequence[dict[str, Any]] | dict[str, Any]) -> dict[str, Any]:
        """Return the one row of a list, or a step of loss 0 for an empty list: the `collate_fn` of a loader of rows.

        A loader with `batch_size=None` gives a row by itself, which is returned as it is.

        Raises:
            ConfigError: several rows; a row is a whole batch.
        """
        if isinstance(rows, dict):
            return rows
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
        """Plan each row as one sample: for `PackedBatchSampler(dataset.plan, ranks=..., remainder="empty")`.

        A row is as long as what it computes, shared prefixes once.
        """
        rows, packed = len(self), Plan.load(self.path / PLAN)
        if packed.digest != self.manifest.plan:
            raise ConfigError(
                f"{self.path / PLAN} is the plan of other rows; restore it, or remove the folder and pack again"
            )
        lengths = packed.tree_tokens
        return Plan(
            sample_ids=np.arange(rows),
            bounds=np.arange(rows + 1),
            lengths=lengths,
            dropped=np.zeros(0, np.int64),
            capacity=max(packed.capacity, int(lengths.max())),
        )

    def _collator(self, processor: Any, settings: Mapping[str, Any]) -> VLMCollator:
        wrong = [name for name in DECIDED if name in settings]
        if wrong:
            raise ConfigError(f"{', '.join(wrong)}: decided when the rows were packed; pack again to change that")
        vocab_size = self.manifest.processor["tokens"]["vocab_size"]
        decided = {"layout": "packed", "slots": self.slots, "share_prefixes": self.share_prefixes or False}
        decided["sampling"] = FrameSampling(**self.manifest.settings["collator"]["sampling"])
        collator = VLMCollator(processor, **decided, vocab_size=vocab_size, **settings)
        if lines := list(differences(self.manifest.processor, fingerprint(collator))):
            raise ConfigError(
                f"{self.path} was packed with another processor: {'; '.join(lines)}. Give that one, or pack again"
            )
        return collator

    def _read(self, row: SupportsIndex, *, without: Sequence[str] = ()) -> tuple[tuple[int, Encoded], ...]:
        """Return (place in the data set, sample) of every sample of a row."""
        file, at = self._where(row)
        tokens = self.manifest.processor["tokens"]
        table = self._files.read(file, at, without=without)
        try:
            return samples_of(table, (tokens["image_token_id"], tokens["video_token_id"]))
        except (LayoutError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"row {at} of {self.path / file} contradicts itself: {error}") from error

    def _where(self, row: SupportsIndex) -> tuple[str, int]:
        """Return the file of a row, and its number in there."""
        try:
            at = index(row)
        except TypeError:
            raise TypeError(
                f"rows of a store have numbers, got the {type(row).__name__} {row!r:.40}; a row is dataset[0], and a "
                'column of it dataset[0]["input_ids"]'
            ) from None
        if not -len(self) <= at < len(self):
            raise IndexError(f"row {at} of {len(self)}")
        at %= len(self)
        shard = bisect_right(self._starts, at) - 1
        return self.manifest.shards[shard].file, at - self._starts[shard]

    def _named(self, error: SampleError, row: SupportsIndex, places: Sequence[int]) -> SampleError:
        """Name a refused sample by its place in the data set and in the store."""
        file, at = self._where(row)
        place = None if error.index is None else places[error.index]
        detail = f"{error.detail} (row {row} of the store: row {at} of {self.path / file})"
        return SampleError(detail, index=place, reason=error.reason, sample_id=error.sample_id)


def _slot_rule(manifest: Manifest, *, pad_to_max_length: bool, pad_cu_seqlens: bool) -> SlotRule:
    """Return the rule by which samples lie in the rows.

    Raises:
        ConfigError: the settings contradict each other, or what the rows were planned for.
    """
    slots = SlotRule(**manifest.settings["slots"])
    if manifest.settings["collator"]["share_prefixes"] is not None and (pad_to_max_length or pad_cu_seqlens):
        raise ConfigError(
            "the rows share prefixes: what they compute is shorter than they are, and has no fixed size. Leave "
            "pad_to_max_length and pad_cu_seqlens out, or pack without share_prefixes"
        )
    if pad_cu_seqlens and not pad_to_max_length:
        raise ConfigError(
            "pad_cu_seqlens=True makes boundaries of a fixed number, for CUDA graphs, which need rows of a fixed width "
            "too: set pad_to_max_length=True"
        )
    if pad_to_max_length and manifest.sizes.longest_row > manifest.capacity:
        raise ConfigError(
            f"pad_to_max_length=True pads rows to {manifest.capacity} tokens, but the longest has "
            f"{manifest.sizes.longest_row}: a sample got a row of its own (oversize='own_row'). Pack again with "
            "oversize='drop', or with a larger capacity"
        )
    return replace(
        slots,
        pad_to=manifest.capacity if pad_to_max_length else None,
        max_segments=manifest.sizes.most_segments if pad_cu_seqlens else None,
    )


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
            return file.read_row_group(row, columns=columns, use_threads=False)

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
            file = pyarrow().parquet.ParquetFile(self.folder / name, page_checksum_verification=True)
            if file.metadata.metadata.get(SAMPLES.encode()) != self._shards[name].samples.encode():
                raise ValueError(f"it holds other samples than {NAME} lists")
            self._open[name] = file
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
