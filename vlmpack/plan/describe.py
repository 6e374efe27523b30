"""A column of numbers summed up: mean, percentiles, and a histogram."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

ROUND = (1, 2, 5, 10)
"""Widths of bins, times a power of ten."""


@final
@dataclass(frozen=True, kw_only=True)
class Summary:
    """Summary statistics of one per-sample number."""

    mean: float
    median: float
    p95: float
    """95 % of the samples have at most this many (interpolated between two samples)."""
    p99: float
    """99 % of the samples have at most this many."""
    max: int
    total: int


def summary(values: np.ndarray) -> Summary:
    """Summarise int64 [N]; without samples, everything is 0."""
    values = values if len(values) else np.zeros(1, np.int64)
    median, p95, p99 = np.percentile(values, (50, 95, 99)).tolist()
    return Summary(
        mean=float(values.mean()), median=median, p95=p95, p99=p99, max=int(values.max()), total=int(values.sum())
    )


@final
@dataclass(frozen=True, kw_only=True)
class HistogramBin:
    """Samples from `start` (included) to `stop` (not included)."""

    start: int
    stop: int | None
    """None: the last bin, which has everything from `start` on."""
    count: int
    """Samples in it."""


def histogram(values: np.ndarray, *, most: int = 12) -> tuple[HistogramBin, ...]:
    """Bins of one round width, from the one with the smallest value to the one with the 99th percentile.

    What lies beyond is in one open bin at the end, so that a few long samples do not push all others together.

    Args:
        values: int64 [N], not negative.
        most: bins at most, the open one included.
    """
    if not len(values):
        return ()
    smallest, p99 = int(values.min()), int(np.percentile(values, 99, method="higher"))
    width = _width(smallest, p99, most - 1)
    first, last = smallest // width, p99 // width
    inside = values[values < (last + 1) * width] // width - first
    counts = np.bincount(inside, minlength=last - first + 1).tolist()
    bins = [
        HistogramBin(start=at * width, stop=(at + 1) * width, count=count) for at, count in enumerate(counts, first)
    ]
    beyond = len(values) - len(inside)
    return (*bins, HistogramBin(start=(last + 1) * width, stop=None, count=beyond)) if beyond else tuple(bins)


def _width(smallest: int, largest: int, most: int) -> int:
    """The smallest round width with which `most` bins hold both."""
    power = 1
    while True:
        for factor in ROUND[:-1]:
            width = factor * power
            if largest // width - smallest // width < most:
                return width
        power *= 10
