"""How long every sample is, from its text and the headers of its images: no pixel is decoded.

dataset ──▶ part of 32 samples ──key──▶ found in the cache? ──yes──▶ Entry ──▶ LengthTable
                  │                            │ no                    ▲
                  └─────── one of several processes: outline ──────────┘
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from torch.utils.data import IterableDataset

from vlmpack.collate import Encoded, VLMCollator, sample_id_of
from vlmpack.data import StoredRows
from vlmpack.errors import SampleError, check_kind
from vlmpack.loading import MapStyle, check_samples, sample_at
from vlmpack.offline.cache import Entry, LengthCache
from vlmpack.offline.content import sample_key, settings_key
from vlmpack.offline.workers import Start, in_order
from vlmpack.plan import LengthTable, Refused, divided_up

Told = Callable[[int, int | None], None]
"""Is called with the number of samples done and the number of all; None: nobody knows it."""

PART = 32
"""Samples that go to a worker at a time."""
WRITE_EVERY = 2.0
"""Seconds after which new entries are written to the cache: at most this much is lost."""


def measure_lengths(
    dataset: MapStyle | Iterable[Mapping[str, Any]],
    collator: VLMCollator,
    *,
    workers: int = 0,
    cache: str | Path | None = None,
    progress: Told | None = None,
    estimate: bool = False,
    start: Start | None = None,
) -> LengthTable:
    """The lengths of all samples, exactly as `collator.collate` will make them, in a small part of the time.

    Text is rendered and tokenised; of an image the header is read, and the processor's rule says how many tokens it
    will have. `max_length` and `overlength` of the collator apply. Its skip log and limit do not: samples that cannot
    be used are listed in `LengthTable.refused`, the too long ones among them. Damage behind a header is not seen.

    A `datasets.Dataset` that has no format of its own is read without decoding its images.

    Args:
        dataset: samples as the collator takes them; with `len` and `[i]`, or else anything to iterate over, which is
            measured in this process whatever `workers` says.
        collator: the one that will be used for training.
        workers: processes; 0: this one alone.
        cache: a file in which what was measured is found again, see `LengthCache`; None: none.
        progress: is called with (samples done, samples in all or None) now and then.
        estimate: one token for each square of an image's pixels, begun ones included (ceil(H/32) * ceil(W/32) for
            Qwen3-VL), whatever the processor's bounds and rule are.
        start: how processes are started; None: as Python does it here.

    Returns:
        One entry a sample, in the order of the data set, the same whatever the number of workers.

    Raises:
        ConfigError: something else than samples (a path) and a collator, or no sample can be measured so; the workers
            or the cache fail.
    """
    check_samples(dataset)
    check_kind("collator", collator, VLMCollator, "VLMCollator(processor)")
    store = None if cache is None else LengthCache(cache)
    settings = b"" if store is None else settings_key(collator, estimate=estimate)
    measurer = Measurer(collator=collator, estimate=estimate, cache=store, settings=settings)
    total = _length(dataset)
    parts = closing(_parts(dataset, total, measurer, workers, start))
    with _written(store) as write, parts as measured:
        rows, refused, done = [], [], 0
        for found in measured:
            for index, one in enumerate(found, done):
                if one.entry.reason is None:
                    rows.append(_row(index, one.entry))
                else:
                    refused.append(_refused(index, one))
            write({one.key: one.entry for one in found if one.key is not None and one.is_new})
            done += len(found)
            if progress is not None:
                progress(done, total)
    return LengthTable.from_rows(rows, refused)


def lengths_of(sample: Encoded) -> Entry:
    """The lengths of one sample, cut into patches or only measured."""
    text, image, video = np.bincount(sample.types, minlength=3).tolist()
    return Entry(
        text_tokens=text,
        image_tokens=image,
        video_tokens=video,
        images=len(sample.images),
        videos=len(sample.videos),
        patches=sum(prod(visual.grid) for visual in (*sample.images, *sample.videos)),
        targets=sample.num_targets,
    )


# ---------------------------------------------------------------------- one part


class Found(NamedTuple):
    """One sample, measured or found in the cache."""

    entry: Entry
    """Its lengths, or why it was refused."""
    sample_id: int | str | None
    """Its own id, where it has one."""
    key: bytes | None
    """Under which it is cached; None: it is not."""
    is_new: bool
    """Whether the cache does not have it yet."""


@final
@dataclass(frozen=True, kw_only=True)
class Measurer:
    """Measures parts of a data set, in whichever process it finds itself."""

    collator: VLMCollator
    """Measures the samples."""
    estimate: bool
    """Whether images are estimated only."""
    cache: LengthCache | None
    """Is read here and written by the caller."""
    settings: bytes
    """Of `settings_key`; empty without a cache."""

    def measure(self, samples: Sequence[Any]) -> list[Found]:
        """Measure samples, or the refusals that a data set raised in their place."""
        keys = [self._key(sample) for sample in samples]
        known = {} if self.cache is None else self.cache.get([key for key in keys if key is not None])
        return [self._found(sample, key, known) for sample, key in zip(samples, keys, strict=True)]

    def _key(self, sample: Any) -> bytes | None:
        if self.cache is None:
            return None
        collator = self.collator
        seen = {"has_vision": collator.metadata.has_vision, "markers": collator.markers}
        return sample_key(sample, self.settings, collator.limits, **seen)

    def _found(self, sample: Any, key: bytes | None, known: Mapping[bytes, Entry]) -> Found:
        if isinstance(sample, SampleError):
            return Found(entry=_refusal(sample), sample_id=sample.sample_id, key=None, is_new=False)
        if key is not None and key in known:
            return Found(entry=known[key], sample_id=sample_id_of(sample), key=key, is_new=False)
        try:
            entry = lengths_of(self.collator.measure(sample, 0, estimate=self.estimate))
        except SampleError as error:
            entry = _refusal(error)
        return Found(entry=entry, sample_id=sample_id_of(sample), key=key, is_new=True)


def _refusal(error: SampleError) -> Entry:
    return Entry(reason=error.reason, detail=error.detail)


def _parts(
    dataset: Any, total: int | None, measurer: Measurer, workers: int, start: Start | None
) -> Generator[list[Found]]:
    """The data set's samples as they were found, some at a time."""
    if total is None:
        samples = iter(dataset)
        while part := list(islice(samples, PART)):
            yield measurer.measure(part)
        return
    yield from in_order(_PartOf(undecoded(dataset), measurer), divided_up(total, PART), workers=workers, start=start)


@final
@dataclass(frozen=True)
class _PartOf:
    """Takes a part out of a map-style data set and measures it: what a worker process is sent."""

    dataset: Any
    measurer: Measurer

    def __call__(self, part: int) -> list[Found]:
        places = range(part * PART, min((part + 1) * PART, len(self.dataset)))
        return self.measurer.measure([sample_at(self.dataset, place) for place in places])


def undecoded(dataset: Any) -> Any:
    """A `datasets.Dataset` without a format of its own as plain values, images encoded; anything else as it is."""
    datasets = sys.modules.get("datasets")
    if datasets is None or not isinstance(dataset, datasets.Dataset) or dataset.format["type"] is not None:
        return dataset
    return StoredRows(table=dataset.with_format("arrow", columns=dataset.format["columns"]))


def _length(dataset: Any) -> int | None:
    """Samples of a map-style data set; None: it can only be iterated over."""
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, MapStyle):
        return None
    return len(dataset)


# ---------------------------------------------------------------------- all parts together


def _row(index: int, entry: Entry) -> dict[str, Any]:
    return {"sample_ids": index, **entry._asdict()}


def _refused(index: int, found: Found) -> Refused:
    entry = found.entry
    assert entry.reason is not None and entry.detail is not None
    return Refused(index=index, sample_id=found.sample_id, reason=entry.reason, detail=entry.detail)


@contextmanager
def _written(store: LengthCache | None) -> Iterator[Callable[[Mapping[bytes, Entry]], None]]:
    """A function that takes new entries and writes them now and then; what is left is written at the end, or before
    an error goes on its way."""
    if store is None:
        yield lambda entries: None
        return
    waiting: dict[bytes, Entry] = {}
    due = time.monotonic() + WRITE_EVERY

    def write(entries: Mapping[bytes, Entry]) -> None:
        nonlocal due
        waiting.update(entries)
        if time.monotonic() > due:
            store.put(waiting)
            waiting.clear()
            due = time.monotonic() + WRITE_EVERY

    with store:
        try:
            yield write
        finally:
            store.put(waiting)
