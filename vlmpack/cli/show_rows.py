"""Rows to be shown: of a data set that is planned now, or of a folder that was packed before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
from rich.console import Console

from vlmpack.cli.inputs import InputOptions, measured, open_inputs
from vlmpack.collate import Encoded
from vlmpack.errors import ConfigError
from vlmpack.layout import Segments
from vlmpack.plan import plan_bins
from vlmpack.store import PackedDataset


@final
@dataclass(frozen=True, kw_only=True)
class ShownRow:
    """One row, without its pixels."""

    told: str
    """Its place among the rows, and how full it is: real tokens over the capacity, as for all rows together."""
    segments: Segments
    """Where samples lie."""
    types: np.ndarray
    """int64 [T]: 0 text and padding, 1 image, 2 video."""
    sample_ids: tuple[int | str, ...]
    """Names of the samples: their own ids, or their places in the data set."""


@final
@dataclass(frozen=True, kw_only=True)
class ShownRows:
    """All rows of a source."""

    told: str
    """The source in one line."""
    count: int
    """Rows."""
    capacity: int
    """Tokens that a row may hold."""
    samples: Callable[[int], Sequence[Encoded]]
    """The samples of a row."""
    lay: Callable[[Sequence[Encoded]], Segments]
    """Where they lie in it."""

    def row(self, at: int) -> ShownRow:
        """One row; negative places count from the end.

        Raises:
            ConfigError: there is no such row.
        """
        check_row(at, self.count)
        number = at % self.count
        samples = self.samples(number)
        segments = self.lay(samples)
        types = np.zeros(segments.total, np.int64)
        for (start, stop), sample in zip(segments.spans[: len(samples)], samples, strict=True):
            types[start:stop] = sample.types
        names = tuple(place if one.sample_id is None else one.sample_id for place, one in enumerate(samples))
        return ShownRow(told=self._told(number, segments), segments=segments, types=types, sample_ids=names)

    def _told(self, number: int, segments: Segments) -> str:
        held = f"{segments.total:,} of {self.capacity:,} tokens, {segments.num_tokens / self.capacity:.2%} full"
        return f"row {number:,} of 0 to {self.count - 1:,}: {held}"


def check_row(at: int, count: int, *, most: str = "") -> None:
    """Refuse a row unless it is one of so many.

    Args:
        at: its place; negative ones count from the end.
        count: rows.
        most: "at most " where there may be fewer.

    Raises:
        ConfigError: there is no such row.
    """
    if not -count <= at < count:
        raise ConfigError(f"--row {at}: there are {most}{count} rows, 0 to {count - 1}")


def checked_processor(source: str, processor: str | None) -> str:
    """The processor of a data set.

    Raises:
        ConfigError: it needs one, and none was named; or nothing of the data set's name is here.
    """
    if processor is not None:
        return processor
    if source != "synthetic" and not Path(source).expanduser().exists():
        raise ConfigError(
            f"there is no file or folder {source} here; give a folder written by `vlmpack pack`, or a data set and its "
            "--processor (a hub id, a folder, or tiny)"
        )
    raise ConfigError(
        f"{source} is no folder written by `vlmpack pack`, so it is read as a data set: that needs --processor "
        "(a hub id, a folder, or tiny)"
    )


def stored(source: str) -> ShownRows:
    """The rows of a packed folder.

    Raises:
        ConfigError: it is damaged.
    """
    dataset = PackedDataset(Path(source).expanduser())
    counts, capacity = dataset.manifest.counts, dataset.manifest.capacity
    return ShownRows(
        told=f"{source}: {counts.samples:,} samples in {counts.rows:,} rows of {capacity:,} tokens, "
        f"{dataset.manifest.fill_ratio:.2%} full{_left_out(counts.refused, counts.dropped)}",
        count=len(dataset),
        capacity=capacity,
        samples=dataset.measured,
        lay=lambda samples: Segments.from_lengths([one.num_tokens for one in samples], dataset.slots),
    )


def planned(
    options: InputOptions,
    console: Console,
    *,
    asked: Sequence[int],
    capacity: int,
    workers: int = 0,
    cache: str | None = None,
) -> ShownRows:
    """The rows into which a data set would be packed.

    Args:
        options: of the data set and its processor.
        console: for the progress.
        asked: rows that will be shown: those that there cannot be are refused before a sample is measured.
        capacity: of a row, in tokens.
        workers: processes that read samples.
        cache: file that keeps lengths.

    Raises:
        ConfigError: no sample can be packed, or there are fewer samples than a row that is asked for needs.
    """
    inputs = open_inputs(options)
    for at in asked:
        check_row(at, len(inputs.dataset), most="at most ")
    table = measured(inputs, console, workers=workers, cache=cache)
    if not len(table):
        raise ConfigError(f"none of {table.given} samples can be used: {table.reasons}; `vlmpack analyze` tells why")
    plan = plan_bins(table, capacity, oversize="drop")
    if not len(plan):
        raise ConfigError(f"all {len(table)} samples exceed a row of {capacity} tokens; raise --capacity")
    return ShownRows(
        told=f"{options.dataset}: {len(plan.sample_ids):,} samples in {len(plan):,} rows of {capacity:,} tokens, "
        f"{plan.fill:.2%} full{_left_out(len(table.refused), len(plan.dropped) - len(table.refused))}",
        count=len(plan),
        capacity=capacity,
        samples=lambda row: [inputs.collator.measure(inputs.dataset[place], place) for place in plan.bins[row]],
        lay=lambda samples: Segments.from_lengths([one.num_tokens for one in samples]),
    )


def _left_out(refused: int, too_long: int) -> str:
    counts = {"cannot be used": refused, "exceed a row": too_long}
    return "".join(f"; {count:,} {what}" for what, count in counts.items() if count)
