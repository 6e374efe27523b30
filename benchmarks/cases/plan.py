"""plan: rows from a million lengths, and from a stream; against TRL's packer where it is installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from benchmarks.figures import BenchSettings, Figure, Skipped, Target
from benchmarks.timing import CLOCKS, alternate
from vlmpack.plan import Budget, CostModel, PackingBuffer, Plan, balance_rows, plan_bins

CASE = "plan"
SECONDS = Target(limit=0.4, better="lower")
GROWTH = Target(limit=1.1, better="lower")
EMPTY_PERCENT = Target(limit=0.1, better="lower")
DELAY = Target(limit=200, better="lower")
SAMPLE_SECONDS = Target(limit=20e-6, better="lower")
EXCESS_PERCENT = Target(limit=1.5, better="lower")
IMBALANCE_PERCENT = Target(limit=1.0, better="lower")
TRL = Target(limit=0.1, better="lower")
NO_MORE = Target(limit=1.0, better="lower")

QWEN3_VL_8B = CostModel.from_sizes(
    hidden=4096,
    layers=36,
    intermediate=12288,
    kv_hidden=1024,
    vision_hidden=1152,
    vision_layers=27,
    vision_intermediate=4304,
)


@final
@dataclass(frozen=True, kw_only=True)
class PlanShapes:
    """Numbers of samples to plan."""

    many: int = 1_000_000
    """Samples of the largest plan."""
    few: int = 10_000
    """Samples of the smallest plan, with which its time is compared."""
    against_trl: int = 100_000
    """Samples of the comparison."""
    stream: int = 20_000
    """Samples of a stream, and of the multi-constraint plan."""
    waiting: int = 64
    """Samples in the packing buffer of a stream."""
    ranks: int = 8
    """Ranks that rows are balanced over."""


@final
@dataclass(frozen=True, kw_only=True)
class LengthSet:
    """Lengths that look like a data set's."""

    draw: Callable[[np.random.Generator, int], np.ndarray]
    """Draws a number of them."""
    capacity: int
    """The row that they are packed into."""

    def lengths(self, samples: int, seed: int = 0) -> np.ndarray:
        """int64 [samples]."""
        return self.draw(np.random.default_rng(seed), samples)


def _lognormal(median: float, spread: float, low: int, high: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    def draw(random: np.random.Generator, samples: int) -> np.ndarray:
        return np.clip(np.rint(random.lognormal(np.log(median), spread, samples)), low, high).astype(np.int64)

    return draw


LENGTH_SETS: Mapping[str, LengthSet] = {
    "CORD": LengthSet(draw=_lognormal(1000, 0.42, 400, 2500), capacity=4096),
    "LVIS": LengthSet(draw=_lognormal(513, 1.32, 1, 12_000), capacity=12_000),
    "uniform": LengthSet(draw=lambda random, samples: random.integers(16, 4097, samples), capacity=8192),
}
"""Receipts; a long tail of mean 1,150 and 99th percentile 11,000; and every length alike."""


def measure_plan(settings: BenchSettings, shapes: PlanShapes) -> Sequence[Figure | Skipped]:
    """Time plans, count their rows, pack streams, share rows out."""
    figures: list[Figure | Skipped] = []
    for name, lengths in LENGTH_SETS.items():
        figures += _offline(name, lengths, settings, shapes) + _stream(name, lengths, settings, shapes)
        figures.append(_balance(name, lengths, settings, shapes))
    return [*figures, _multi_constraint(settings, shapes), _against_trl(settings, shapes)]


def _offline(name: str, lengths: LengthSet, settings: BenchSettings, shapes: PlanShapes) -> list[Figure]:
    """Seconds of the largest plan, how they grow from the smallest (1: as n log n does), and how few its rows are."""
    many, few = (lengths.lengths(samples, settings.seed) for samples in (shapes.many, shapes.few))
    timings = alternate(
        {"many": lambda: plan_bins(many, lengths.capacity), "few": lambda: plan_bins(few, lengths.capacity)},
        seconds=settings.seconds / 4,
    )
    rows = len(plan_bins(many, lengths.capacity))
    best_fit = len(plan_bins(many, lengths.capacity, strategy="best_fit_decreasing"))
    seconds = Figure.timed(CASE, f"{name}: {shapes.many:,} lengths", timings, "many", settings)
    growth = f"{name}: growth from {shapes.few:,}, over n log n"
    expected = shapes.many * np.log2(shapes.many) / (shapes.few * np.log2(shapes.few))
    return [
        replace(seconds, target=SECONDS),
        Figure.compared(CASE, growth, timings, ("many", "few"), settings, scale=1 / expected, target=GROWTH),
        Figure(case=CASE, name=f"{name}: rows / best-fit-decreasing", value=rows / best_fit, unit="x", target=NO_MORE),
    ]


def _stream(name: str, lengths: LengthSet, settings: BenchSettings, shapes: PlanShapes) -> list[Figure]:
    """Measure what a stream leaves empty, the longest delay in the packing buffer, and seconds a sample."""
    sizes = lengths.lengths(shapes.stream, settings.seed)
    rows, delay = stream(sizes, lengths.capacity, shapes.waiting)
    timings = alternate(
        {"stream": lambda: stream(sizes, lengths.capacity, shapes.waiting)}, seconds=settings.seconds / 20
    )
    spreads = {clock: timings.of("stream", clock).scaled(1 / shapes.stream) for clock in CLOCKS}
    clocks = {clock: spread.median for clock, spread in spreads.items()}
    each = Figure.measured(
        CASE, f"{name}: a sample of a stream", spreads[settings.clock], "s", clocks=clocks, target=SAMPLE_SECONDS
    )
    empty = 100 * (1 - float(sizes.sum()) / (rows * lengths.capacity))
    return [
        Figure(case=CASE, name=f"{name}: left empty by a stream", value=empty, unit="%", target=EMPTY_PERCENT),
        Figure(case=CASE, name=f"{name}: longest wait", value=delay, unit="samples", target=DELAY),
        each,
    ]


def stream(lengths: np.ndarray, capacity: int, waiting: int) -> tuple[int, int]:
    """Pack a stream with a packing buffer of `waiting` samples: (rows, most samples that arrived while one stayed)."""
    buffer, rows, delay = PackingBuffer(capacity), 0, 0
    for sample, length in enumerate(lengths.tolist()):
        buffer.add(sample, length)
        if len(buffer) == waiting:
            rows, delay = rows + 1, max(delay, sample - buffer.take()[0])
    while row := buffer.take():
        rows, delay = rows + 1, max(delay, len(lengths) - row[0])
    return rows, delay


def _balance(name: str, lengths: LengthSet, settings: BenchSettings, shapes: PlanShapes) -> Figure:
    """Worst rank over mean, one row a rank and step, by the FLOPs of a Qwen3-VL of 8 billion parameters."""
    sizes = lengths.lengths(shapes.stream, settings.seed)
    plan = plan_bins(sizes, lengths.capacity, seed=settings.seed)
    costs = plan.sums(QWEN3_VL_8B.of_samples(sizes))
    schedule = balance_rows(costs, ranks=shapes.ranks, remainder="drop", seed=settings.seed)
    above = 100 * (schedule.imbalance - 1)
    return Figure(
        case=CASE,
        name=f"{name}: worst of {shapes.ranks} ranks above the mean",
        value=above,
        unit="%",
        target=IMBALANCE_PERCENT,
    )


def _multi_constraint(settings: BenchSettings, shapes: PlanShapes) -> Figure:
    """Compare multi-constraint packing with the lower bound of the constraint that binds most."""
    plan = multi_constraint_plan(shapes.stream, settings.seed)
    above = 100 * (len(plan) / plan.lower_bound - 1)
    return Figure(
        case=CASE, name="three limits: rows above the lower bound", value=above, unit="%", target=EXCESS_PERCENT
    )


def multi_constraint_plan(samples: int, seed: int, capacity: int = 16_384) -> Plan:
    """Plan text with 0 to 6 images a sample, whose patches and images bind as much as its tokens do."""
    random = np.random.default_rng(seed)
    images = random.choice([0, 1, 1, 1, 1, 2, 3, 4, 6], samples)
    of_sample = np.repeat(np.arange(samples), images)
    image_tokens = _lognormal(500, 0.7, 16, 1600)(random, int(images.sum()))
    pixels = np.bincount(of_sample, weights=image_tokens, minlength=samples).astype(np.int64)
    tokens = pixels + _lognormal(270, 0.9, 16, 4000)(random, samples)
    rows = tokens.sum() / capacity
    budgets = [
        Budget(name="patches", costs=4 * pixels, limit=max(int(4 * pixels.sum() / rows), int(4 * pixels.max()))),
        Budget(name="images", costs=images, limit=max(int(np.ceil(images.sum() / rows)), 6)),
    ]
    return plan_bins(tokens, capacity, budgets=budgets, seed=seed)


def _against_trl(settings: BenchSettings, shapes: PlanShapes) -> Figure | Skipped:
    """Our plan's time over that of TRL's `bfd` on the same lengths."""
    name = f"plan / TRL's bfd, {shapes.against_trl:,} lengths"
    try:
        import pyarrow as pa
        from trl.data_utils import _pack_bfd  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        return Skipped(case=CASE, name=name, why=f"TRL cannot be imported ({error})")
    lengths = LENGTH_SETS["CORD"]
    sizes = lengths.lengths(shapes.against_trl, settings.seed)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    tokens = pa.array(np.zeros(offsets[-1], np.int8))  # TRL moves them too: as few bytes as can be
    table = pa.table({"input_ids": pa.ListArray.from_arrays(offsets.astype(np.int32), tokens)})
    timings = alternate(
        {"ours": lambda: plan_bins(sizes, lengths.capacity), "trl": lambda: _pack_bfd(table, lengths.capacity)},
        seconds=settings.seconds / 8,
    )
    return Figure.compared(CASE, name, timings, ("ours", "trl"), settings, target=TRL)
