"""plan: bin packing of a million lengths, and of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import final

import numpy as np

from benchmarks.measuring import BenchSettings, Figure, Target, alternate
from vlmpack.plan import PackingBuffer, plan_bins

CASE = "plan"


@final
@dataclass(frozen=True, kw_only=True)
class PlanShapes:
    """Numbers of samples to plan."""

    many: int = 1_000_000
    stream: int = 20_000
    """Samples of a stream."""
    waiting: int = 64
    """Samples in the packing buffer of a stream."""


@final
@dataclass(frozen=True, kw_only=True)
class LengthSet:
    """A distribution of lengths that resembles a dataset."""

    draw: Callable[[np.random.Generator, int], np.ndarray]
    capacity: int
    """Tokens of a row."""

    def lengths(self, samples: int, seed: int = 0) -> np.ndarray:
        """Draw lengths: int64 [samples]."""
        return self.draw(np.random.default_rng(seed), samples)


def _lognormal(middle: float, spread: float, low: int, high: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    def draw(random: np.random.Generator, samples: int) -> np.ndarray:
        return np.clip(np.rint(random.lognormal(np.log(middle), spread, samples)), low, high).astype(np.int64)

    return draw


LENGTH_SETS: Mapping[str, LengthSet] = {
    "CORD": LengthSet(draw=_lognormal(1000, 0.42, 400, 2500), capacity=4096),
    "LVIS": LengthSet(draw=_lognormal(513, 1.32, 1, 12_000), capacity=12_000),
    "uniform": LengthSet(draw=lambda random, samples: random.integers(16, 4097, samples), capacity=8192),
}
"""Receipts; a long tail with mean 1,150 and 99th percentile 11,000; and uniform lengths."""


def measure_plan(settings: BenchSettings, shapes: PlanShapes) -> Iterator[Figure]:
    """Time plans, count their rows, and pack streams."""
    for name, lengths in LENGTH_SETS.items():
        yield from _ahead(name, lengths, settings, shapes)
        yield from _stream(name, lengths, settings, shapes)


def _ahead(name: str, lengths: LengthSet, settings: BenchSettings, shapes: PlanShapes) -> Iterator[Figure]:
    """Measure the time of the plan, and the number of its rows."""
    sizes = lengths.lengths(shapes.many, settings.seed)
    timings = alternate({"plan": lambda: plan_bins(sizes, lengths.capacity)}, seconds=settings.seconds / 4)
    words, target = f"{name}: {shapes.many:,} lengths", Target(limit=0.4, better="lower")
    yield Figure.timed(CASE, words, timings, "plan", settings, target=target)
    best_fit = len(plan_bins(sizes, lengths.capacity, strategy="best_fit_decreasing"))
    ratio, target = len(plan_bins(sizes, lengths.capacity)) / best_fit, Target(limit=1.0, better="lower")
    yield Figure(case=CASE, name=f"{name}: rows / best-fit-decreasing", value=ratio, unit="x", target=target)


def _stream(name: str, lengths: LengthSet, settings: BenchSettings, shapes: PlanShapes) -> Iterator[Figure]:
    """Measure the fraction of empty tokens in a stream's rows, the longest stay in the packing buffer, and the rate."""
    sizes = lengths.lengths(shapes.stream, settings.seed)
    rows, stay = stream(sizes, lengths.capacity, shapes.waiting)
    ways = {"stream": lambda: stream(sizes, lengths.capacity, shapes.waiting)}
    timings = alternate(ways, seconds=settings.seconds / 20)
    empty = 100 * (1 - float(sizes.sum()) / (rows * lengths.capacity))
    waste, wait = ("left empty by a stream", empty, "%", 0.1), ("longest stay", stay, "samples", 200)
    for words, value, unit, limit in (waste, wait):
        target = Target(limit=limit, better="lower")
        yield Figure(case=CASE, name=f"{name}: {words}", value=value, unit=unit, target=target)
    yield Figure.rate(CASE, f"{name}: a stream", timings, "stream", shapes.stream, "samples/s", settings.clock)


def stream(lengths: np.ndarray, capacity: int, waiting: int) -> tuple[int, int]:
    """Pack a stream; return its rows, and the most samples that arrived while one was among the `waiting`."""
    buffer, rows, stay = PackingBuffer(capacity), 0, 0
    for sample, length in enumerate(lengths.tolist()):
        buffer.add(sample, length)
        if len(buffer) == waiting:
            rows, stay = rows + 1, max(stay, sample - buffer.take()[0])
    while row := buffer.take():
        rows, stay = rows + 1, max(stay, len(lengths) - row[0])
    return rows, stay
