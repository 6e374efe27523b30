"""PackedDataset: the rows that `write_rows` wrote, as a map-style data set of batches for a model.

    pad_to_max_length    every row is as wide as the capacity
    pad_cu_seqlens       every row has as many boundaries: the last one is repeated
    pad_seq_to_mult      samples start at multiples of it; decided when packing, because the plan has to count it

Names and rules of the three are those of Megatron-Bridge's offline packing. There, real lengths end before a final
end-of-text token; here they are stored, so that a token that is learnt counts whatever its id is.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
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
from vlmpack.collate.frame_sampling import FrameSampling
from vlmpack.data.images import DEFAULT_LIMITS, ImageLimits
from vlmpack.data.videos import DEFAULT_VIDEO_LIMITS
from vlmpack.errors import ConfigError, LayoutError, SampleError, check_whole_number
from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.row import PackedRow
from vlmpack.layout.segments import Segments, SlotRule
from vlmpack.plan.plan import Plan
from vlmpack.store.manifest import PLAN, Manifest, check_shard_files, differences, fingerprint
from vlmpack.store.records import MEDIA, samples_of
from vlmpack.store.shards import ShardFiles
from vlmpack.store.symbols import tree_of

DECIDED = (
    *("layout", "slots", "share_prefixes", "max_length", "overlength", "train_on", "markers", "vocab_size"),
    *("sampling", "add_stop", "ignored_keys"),
)
"""Settings of a collator that were decided when the rows were packed."""


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
        pad_seq_to_mult: what samples are rounded up to; None: as packed. Others have to divide that.
        verify: compare the SHA-256 of every file now, which reads all of them. Without it, sizes are compared now, and
            footers and rows by their checksums when they are read first.
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
        pad_seq_to_mult: int | None = None,
        verify: bool = False,
        **settings: Any,
    ) -> None:
        _check_kinds(path, processor)
        self.path = Path(path).absolute()
        self.manifest = Manifest.load(path)
        """Counts, and the fixed sizes that CUDA graphs need."""
        self.share_prefixes = sharing_of(self.manifest, has_fixed_sizes=pad_to_max_length or pad_cu_seqlens)
        """Settings by which samples of a row share prefixes; None: they share nothing."""
        self.slots = slot_rule(
            self.manifest, pad_to_max_length=pad_to_max_length, pad_cu_seqlens=pad_cu_seqlens, multiple=pad_seq_to_mult
        )
        """The rule by which samples lie in the rows."""
        check_shard_files(self.path, self.manifest, verify=verify)
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
        samples, limits = [sample for _, sample in self._read(row)], self._limits
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
        if (sampling := self.manifest.settings["collator"].get("sampling")) is not None:
            decided["sampling"] = FrameSampling(**sampling)
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
        video_limits = DEFAULT_VIDEO_LIMITS if self.collator is None else self.collator.file_rules.limits
        try:
            table = self._files.read(file, at, without=without)
            return samples_of(table, (tokens["image_token_id"], tokens["video_token_id"]), self._limits, video_limits)
        except LayoutError as error:
            raise ConfigError(f"row {at} of {self.path / file} contradicts itself: {error}") from error

    @property
    def _limits(self) -> ImageLimits:
        return DEFAULT_LIMITS if self.collator is None else self.collator.limits

    def _where(self, row: SupportsIndex) -> tuple[str, int]:
        """Return the file of a row, and its number in there."""
        at = _number(row, len(self))
        shard = bisect_right(self._starts, at) - 1
        return self.manifest.shards[shard].file, at - self._starts[shard]

    def _named(self, error: SampleError, row: SupportsIndex, places: Sequence[int]) -> SampleError:
        """Name a refused sample by its place in the data set and in the store."""
        file, at = self._where(row)
        place = None if error.index is None else places[error.index]
        detail = f"{error.detail} (row {row} of the store: row {at} of {self.path / file})"
        return SampleError(detail, index=place, reason=error.reason, sample_id=error.sample_id)


def _number(row: SupportsIndex, rows: int) -> int:
    """Return the number of a row, counted from the start."""
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
            "a store makes its collator, and needs the processor only: give PackedDataset(path, "
            "collator.processor), and further settings by name, such as on_bad='skip'"
        )


# ---------------------------------------------------------------------- fixed sizes


def sharing_of(manifest: Manifest, *, has_fixed_sizes: bool) -> SharePrefixes | None:
    """Return the settings by which the rows of a store share prefixes; None: they share nothing.

    Raises:
        ConfigError: rows that share are to have a fixed size.
    """
    settings = manifest.settings["collator"].get("share_prefixes")
    if settings is not None and has_fixed_sizes:
        raise ConfigError(
            "the rows share prefixes: what they compute is shorter than they are, and has no fixed size. Leave "
            "pad_to_max_length and pad_cu_seqlens out, or pack without share_prefixes"
        )
    return None if settings is None else SharePrefixes(**settings)


def slot_rule(manifest: Manifest, *, pad_to_max_length: bool, pad_cu_seqlens: bool, multiple: int | None) -> SlotRule:
    """Return the rule by which samples lie in the rows.

    Raises:
        ConfigError: the settings contradict each other, or what the rows were planned for.
    """
    slots = SlotRule(**manifest.settings["slots"])
    multiple = slots.multiple if multiple is None else check_whole_number("pad_seq_to_mult", multiple)
    if slots.multiple % multiple:
        raise ConfigError(
            f"pad_seq_to_mult={multiple}, but the rows were planned for samples rounded up to {slots.multiple}: with "
            f"another multiple they may not fit. Pack again with SlotRule(multiple={multiple}) (vlmpack pack "
            f"--pad-seq-to-mult {multiple}), or give a divisor of {slots.multiple}"
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
        multiple=multiple,
        pad_to=manifest.capacity if pad_to_max_length else None,
        max_segments=manifest.sizes.most_segments if pad_cu_seqlens else None,
    )
