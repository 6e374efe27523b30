"""Measure how long every sample is, from its text and the headers of its images: no pixel is decoded.

dataset ──▶ part of 32 samples ──key──▶ in the cache? ──yes──▶ Entry ──▶ LengthTable
                  │                            │ no              ▲
                  └─── a worker process: measure ────────────────┘
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from torch.utils.data import IterableDataset, Subset

from vlmpack.collate.collator import VLMCollator, sample_id_of
from vlmpack.collate.encoded import Encoded
from vlmpack.data.readers import StoredRows
from vlmpack.errors import ConfigError, Refusal, SampleError, SkippedWarning, check_kind, check_whole_number
from vlmpack.files import atomic_file, writing
from vlmpack.loading.resumable import MapStyle, check_samples, sample_at
from vlmpack.plan.length_table import LengthTable, Refused
from vlmpack.plan.lengths import divided_up
from vlmpack.plan.prefix_marks import PrefixMarks, groups_of_marks
from vlmpack.store.cache import Entry, LengthCache, sample_key, settings_key
from vlmpack.store.executors import Start, in_order, in_order_on_ray
from vlmpack.store.folder import WorkFolder
from vlmpack.store.symbols import check_marks, marks_of, num_patches

SampleProgress = Callable[[int, int | None], None]
"""Is called with the number of samples that are measured and the number of all; None: the data set has no length."""

PART = 32
"""Samples that go to a worker at a time."""
LISTED = 3
"""Refused samples that a warning names."""
RAY_PART = 2048
"""Samples of a Ray task; a kill costs the work on those that were under way."""
WRITE_EVERY = 2.0
"""Seconds after which new entries are written to the cache: at most this much is lost."""
NO_COLUMNS = "no_columns"
"""Reason of a row without known columns: a bad sample, unless all rows are so."""
_UNREADABLE = "row_unreadable"
"""Reason of a row of which not even the columns could be read."""


def measure_lengths(
    dataset: MapStyle | Iterable[Mapping[str, Any]],
    collator: VLMCollator,
    *,
    workers: int = 0,
    cache: str | Path | None = None,
    progress: SampleProgress | None = None,
    estimate: bool = False,
    min_shared: int | None = None,
    start: Start | None = None,
) -> LengthTable:
    """Measure all samples exactly as `collator.collate` will make them, in a small part of the time.

    Text is rendered and tokenised; of an image the header is read, and the processor's resize rule gives its tokens.
    `max_length` and `overlength` of the collator apply. Its log and limit of skipped samples do not: samples that
    cannot be used are listed in `LengthTable.refused`, the too long ones among them; a `SkippedWarning` names the first
    of them, but for those that `overlength="drop"` leaves out. Damage behind a header is not found.

    A `datasets.Dataset` that has no format of its own is read without decoding its images.

    Args:
        dataset: samples as the collator takes them; with `len` and `[i]`, or else anything to iterate over, which is
            measured in this process whatever `workers` is.
        collator: the one that will be used for training.
        workers: processes; 0: this one alone.
        cache: a file that keeps lengths between calls, see `LengthCache`; None: none.
        progress: is called with (samples done, samples in all or None) now and then.
        estimate: one token for each square of an image's pixels, begun ones included (ceil(H/32) * ceil(W/32) for
            Qwen3-VL), whatever the processor's bounds and rule are.
        min_shared: find samples that begin alike with so many tokens or more, `LengthTable.groups`; images and videos
            are compared by their bytes, which are read whole. None: groups are not looked for.
        start: how processes are started; None: Python's default on this system.

    Returns:
        One entry a sample, in the order of the data set, the same whatever the number of workers.

    Raises:
        ConfigError: something else than samples (a path) and a collator, or no sample can be measured so, such as all
            without a known column; the collator shares only longer prefixes than `min_shared`; the workers or the
            cache fail.
    """
    check_samples(dataset)
    check_kind("collator", collator, VLMCollator, "VLMCollator(processor)")
    if min_shared is not None:
        check_whole_number("min_shared", min_shared, remedy="or None to look for no shared prefixes")
        check_marks(collator)
        if collator.share_prefixes is not None and min_shared < (least := collator.share_prefixes.min_shared):
            raise ConfigError(
                f"min_shared is {min_shared}, but the collator repeats shared prefixes of less than {least} tokens, so "
                f"planned rows would be too long: give min_shared={least}, or the collator SharePrefixes(min_shared="
                f"{min_shared})"
            )
    entries = None if cache is None else LengthCache(cache)
    has_marks = min_shared is not None
    measurer = Measurer(
        dataset=undecoded(dataset),
        collator=collator,
        estimate=estimate,
        has_marks=has_marks,
        cache=entries,
        settings=b"" if entries is None else settings_key(collator, estimate=estimate, has_marks=has_marks),
    )
    total = None if isinstance(dataset, IterableDataset) or not isinstance(dataset, MapStyle) else len(dataset)
    if total is None:
        parts = _streamed(dataset, measurer)
    else:
        parts = in_order(measurer, divided_up(total, PART), workers=workers, start=start)
    samples: list[Measured] = []
    with closing(parts), closing(parts if entries is None else _saved(parts, entries)) as measured:
        for part in measured:
            samples += part
            if progress is not None:
                progress(len(samples), total)
    table = _table_of(samples, min_shared)
    _check_columns(table, collator)
    if refused := [each for each in table.refused if not collator.leaves_out(each.reason)]:
        warnings.warn(_about_refused(refused, table.measured), SkippedWarning, stacklevel=2)
    return table


def _table_of(samples: Sequence[Measured], min_shared: int | None) -> LengthTable:
    rows, refused = [], []
    for index, (entry, sample_id, _) in enumerate(samples):
        if entry.reason is None:
            rows.append({"sample_ids": index, **entry._asdict()})
        else:
            refused.append(Refused(index=index, sample_id=sample_id, reason=entry.reason, detail=entry.detail or ""))
    marks = [PrefixMarks.from_bytes(row["marks"]) for row in rows if row["marks"] is not None]
    groups = None if min_shared is None else groups_of_marks(marks, min_shared=min_shared)
    return LengthTable.from_rows(rows, refused, groups)


def _check_columns(table: LengthTable, collator: VLMCollator) -> None:
    """Raise if no row has known columns: then the data set's names are at fault, and not its rows.

    Raises:
        ConfigError: so it is, and bad samples are not to be skipped; names the first row.
    """
    read = [refused for refused in table.refused if refused.reason != _UNREADABLE]
    if collator.on_bad == "raise" and not len(table) and read and {refused.reason for refused in read} == {NO_COLUMNS}:
        first = read[0]
        named = {"index": first.index, "reason": first.reason, "sample_id": first.sample_id}
        raise ConfigError(str(SampleError(first.detail, **named)))


def _about_refused(refused: Sequence[Refused], total: int) -> str:
    """Return a warning of refused samples: how many there are, the first ones, and where all are."""
    errors = [
        SampleError(each.detail, index=each.index, reason=each.reason, sample_id=each.sample_id)
        for each in refused[:LISTED]
    ]
    listed = "; ".join(f"{error} ({error.reason})" for error in errors)
    more = f"; and {len(refused) - LISTED:,} more" if len(refused) > LISTED else ""
    return (
        f"{len(refused):,} of {total:,} samples cannot be used, so that no plan of this table has them: {listed}{more}"
        ". All are listed in `refused` of the table, and counted in `reasons`; repair them, or leave them out"
    )


def lengths_of(sample: Encoded) -> Entry:
    """Count tokens, media, patches and targets of one sample, cut into patches or only measured."""
    text, image, video, audio = np.bincount(sample.types, minlength=4).tolist()
    return Entry(
        text_tokens=text + audio,
        image_tokens=image,
        video_tokens=video,
        images=len(sample.images),
        videos=len(sample.videos),
        patches=sum(num_patches(visual) for visual in (*sample.images, *sample.videos)),
        targets=sample.num_targets,
    )


# ---------------------------------------------------------------------- one part


class Measured(NamedTuple):
    """One sample, measured or read from the cache."""

    entry: Entry
    """Its lengths, or why it was refused."""
    sample_id: int | str | None
    """Its `id` or `sample_id`, where it has one."""
    new_key: bytes | None = None
    """Key under which it is to be cached; None: it has no key, or is in the cache already."""


@final
@dataclass(frozen=True, kw_only=True)
class Measurer:
    """Measures parts of a data set; pickles to workers."""

    dataset: Any
    """Samples by place, or a stream of them."""
    collator: VLMCollator
    """Measures the samples."""
    estimate: bool
    """Images are estimated only."""
    has_marks: bool
    """Entries have marks of what samples begin with."""
    cache: LengthCache | None
    """Is read here and written by the caller."""
    settings: bytes
    """Of `settings_key`; empty without a cache."""
    first: int = 0
    """Place of the first sample in the whole data set, for errors: not 0 where `dataset` is a part of it."""

    def __call__(self, part: int) -> list[Measured]:
        """Measure one part of a map-style data set."""
        places = range(part * PART, min((part + 1) * PART, len(self.dataset)))
        return self.measure([sample_at(self.dataset, place) for place in places], places.start)

    def measure(self, samples: Sequence[Any], start: int) -> list[Measured]:
        """Measure samples, or the refusals that a data set raised in their place; `start`: place of the first."""
        places = range(self.first + start, self.first + start + len(samples))
        if self.cache is None:
            return [self._measured(sample, place, None, {}) for sample, place in zip(samples, places, strict=True)]
        keys = [sample_key(sample, self.settings, self.collator, has_marks=self.has_marks) for sample in samples]
        cached = self.cache.get([key for key in keys if key is not None])
        return [self._measured(*each, cached) for each in zip(samples, places, keys, strict=True)]

    def _measured(self, sample: Any, place: int, key: bytes | None, cached: Mapping[bytes, Entry]) -> Measured:
        if isinstance(sample, SampleError):
            return Measured(_refusal(sample), sample.sample_id)
        if key is not None and key in cached:
            return Measured(cached[key], sample_id_of(sample))
        try:
            measured = self.collator.measure(sample, place, estimate=self.estimate)
            entry = lengths_of(measured)
            if self.has_marks:
                marks = marks_of(measured, self.collator.metadata, self.collator.limits)
                entry = entry._replace(marks=marks.to_bytes())
        except SampleError as error:
            entry = _refusal(error)
        except ConfigError as error:
            refusal = error.__cause__
            if not isinstance(refusal, Refusal) or refusal.reason != NO_COLUMNS:
                raise
            entry = Entry(reason=refusal.reason, detail=refusal.message)  # other rows may have columns
        return Measured(entry, sample_id_of(sample), key)


def _refusal(error: SampleError) -> Entry:
    return Entry(reason=error.reason, detail=error.detail)


def _streamed(dataset: Any, measurer: Measurer) -> Generator[list[Measured]]:
    """Measure a data set without places, some samples at a time."""
    samples, start = iter(dataset), 0
    while part := list(islice(samples, PART)):
        yield measurer.measure(part, start)
        start += len(part)


def undecoded(dataset: Any) -> Any:
    """Read a `datasets.Dataset` without a format of its own as plain values, images encoded; else return `dataset`."""
    datasets = sys.modules.get("datasets")
    if datasets is None or not isinstance(dataset, datasets.Dataset) or dataset.format["type"] is not None:
        return dataset
    return StoredRows(table=dataset.with_format("arrow", columns=dataset.format["columns"]))


def _saved(parts: Iterable[list[Measured]], cache: LengthCache) -> Generator[list[Measured]]:
    """Yield parts, and write their new entries every few seconds, at the end, and before an error leaves."""
    pending, due = {}, time.monotonic() + WRITE_EVERY
    with cache:
        try:
            for part in parts:
                pending |= {sample.new_key: sample.entry for sample in part if sample.new_key is not None}
                if time.monotonic() > due:
                    cache.put(pending)
                    pending, due = {}, time.monotonic() + WRITE_EVERY
                yield part
        finally:
            cache.put(pending)


# ---------------------------------------------------------------------- on Ray


def measure_on_ray(
    dataset: MapStyle,
    collator: VLMCollator,
    *,
    folder: WorkFolder,
    progress: SampleProgress,
    min_shared: int | None = None,
) -> LengthTable:
    """Measure a map-style data set by Ray tasks, in parts that lie in the work folder until all are there."""
    total = len(dataset)
    parts = [range(start, min(start + RAY_PART, total)) for start in range(0, total, RAY_PART)]
    files = {folder.path / f"lengths-{part.start:09d}.zip": part for part in parts}
    missing = {path: part for path, part in files.items() if not path.is_file()}
    work = partial(_measure_places, dataset, collator, tuple(missing.values()), min_shared is not None)
    with closing(in_order_on_ray(work, len(missing))) as measured:
        for (path, part), (table, marks) in zip(missing.items(), measured, strict=True):
            if min_shared is not None:
                _save_marks(_marks_file(path), marks)
            table.save(path)
            progress(part.stop, total)
    table = LengthTable.concatenate([LengthTable.load(path) for path in files])
    _check_columns(table, collator)
    if min_shared is None:
        return table
    marks = [sample for path in files for sample in _load_marks(_marks_file(path))]
    return replace(table, groups=groups_of_marks(marks, min_shared=min_shared))


def _measure_places(
    dataset: MapStyle, collator: VLMCollator, parts: Sequence[range], has_marks: bool, part: int
) -> tuple[LengthTable, list[bytes]]:
    """Measure one part of a data set, and mark its samples; places count from the start of the whole data set."""
    places = parts[part]
    measurer = Measurer(
        dataset=undecoded(Subset(dataset, places)),  # pyright: ignore[reportArgumentType]
        collator=collator,
        estimate=False,
        has_marks=has_marks,
        cache=None,
        settings=b"",
        first=places.start,
    )
    samples = [sample for at in range(divided_up(len(places), PART)) for sample in measurer(at)]
    table = _table_of(samples, None)
    refused = tuple(replace(refusal, index=refusal.index + places.start) for refusal in table.refused)
    marks = [entry.marks for entry, _, _ in samples if entry.marks is not None]
    return replace(table, sample_ids=table.sample_ids + places.start, refused=refused), marks


def _marks_file(path: Path) -> Path:
    return path.with_suffix(".marks.npz")


def _save_marks(path: Path, marks: Sequence[bytes]) -> None:
    """Write the marks of a part, whole or not at all."""
    with atomic_file(path) as temporary, writing(path), temporary.open("wb") as file:
        np.savez(file, sizes=[len(each) for each in marks], content=np.frombuffer(b"".join(marks), np.uint8))


def _load_marks(path: Path) -> list[PrefixMarks]:
    with np.load(path, allow_pickle=False) as arrays:
        content, ends = arrays["content"].tobytes(), np.cumsum(arrays["sizes"]).tolist()
    return [PrefixMarks.from_bytes(content[start:end]) for start, end in pairwise([0, *ends])]
