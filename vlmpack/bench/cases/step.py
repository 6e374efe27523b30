"""step: forward and backward of a packed batch, against Hugging Face's own step on the padded batch, and the ideal.

    speed-up         time of the padded step / time of the packed step
    ideal speed-up   FLOPs of the padded step / FLOPs of the samples, each alone and without padding
    share of ideal   the one over the other: 1 means that not a moment is lost to packing

Both FLOP counts are of the unmodified model, logits at every position included. The packed step spends fewer: its
head sees labelled positions only. So a share above 1 is possible, and a fair one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from vlmpack.bench.ceilings import Ceilings
from vlmpack.bench.figure import Figure, Target
from vlmpack.bench.formula import step_flops
from vlmpack.bench.settings import BenchSettings
from vlmpack.bench.steps import StepFlops, StepPair
from vlmpack.bench.timing import Timings, alternate
from vlmpack.bench.workload import ReceiptShapes
from vlmpack.families import Family, family_named
from vlmpack.layout import PaddedBatch

CASE = "step"
DENSE = Target(limit=0.95, better="higher")
"""Share of ideal of families whose every layer has attention and an MLP."""
SPARSE = Target(limit=0.85, better="higher")
"""Share of ideal of families with experts or gated delta layers: samples that are cut out, or spread over experts, make
more and smaller products than a padded batch does."""


def measure_step(settings: BenchSettings, shapes: ReceiptShapes) -> list[Figure]:
    """Time both steps on the same padded batch: the packed step packs it itself, inside the measured time.

    Raises:
        VlmpackError: the two losses differ, so there is nothing to compare.
    """
    started = time.perf_counter()
    family, pair = family_named(settings.family), StepPair.of(settings, shapes)
    flops = StepFlops.of(pair)
    causal = causal_ideal(family, pair.model.config, pair.batch)
    peaks = pair.peaks(settings.device)
    ceilings = Ceilings.of(pair.model, tokens=sum(shapes.lengths), hidden=shapes.hidden)
    left = settings.seconds - (time.perf_counter() - started)
    timings = alternate({**pair.steps, **ceilings.callables}, seconds=left, device=settings.device)
    steps, scale = ("padded", "packed"), 1 / flops.ideal_speedup
    figures = [
        Figure.timed(CASE, "padded step", timings, "padded", settings),
        Figure.timed(CASE, "packed step", timings, "packed", settings),
        *_rates(shapes, timings, settings),
        Figure.compared(CASE, "speed-up", timings, steps, settings),
        Figure(case=CASE, name="ideal speed-up", value=flops.ideal_speedup, unit="x"),
        Figure(case=CASE, name="ideal, causal pairs", value=causal, unit="x"),
        Figure(case=CASE, name="FLOPs, packed / alone", value=flops.packed / flops.alone, unit="x"),
        Figure.compared(CASE, "share of ideal", timings, steps, settings, scale=scale, target=target_of(family)),
        *_limits(ceilings, flops, timings, settings),
        Figure(case=CASE, name="memory, packed / padded", value=peaks["packed"] / peaks["padded"], unit="x"),
    ]
    return [replace(figure, family=family.model_type) for figure in figures]


def target_of(family: Family) -> Target:
    """What share of the ideal speed-up the family must reach."""
    return DENSE if family.experts is None and family.delta is None else SPARSE


def causal_ideal(family: Family, config: Any, batch: PaddedBatch) -> float:
    """The ideal by formula, where real samples count the pairs that causal attention needs, and padded ones all."""
    assert batch.metadata is not None
    lengths, grids = batch.metadata.lengths, batch.metadata.image_grids
    padded = step_flops(family, config, [max(lengths)] * len(lengths), grids)
    return padded.total / step_flops(family, config, lengths, grids, causal=True).total


def _rates(shapes: ReceiptShapes, timings: Timings, settings: BenchSettings) -> Iterator[Figure]:
    """What goes through in a second: real tokens and samples, and all tokens that the padded step computes."""
    real, samples = sum(shapes.lengths), len(shapes.lengths)
    counts = {"real tokens": (real, "tokens/s"), "samples": (samples, "samples/s")}
    for step in ("packed", "padded"):
        seconds = timings.of(step, settings.clock)
        for what, (count, unit) in counts.items():
            yield Figure.measured(CASE, f"{step}, {what}", seconds.rate(count), unit)
    padded = timings.of("padded", settings.clock).rate(samples * max(shapes.lengths))
    yield Figure.measured(CASE, "padded, tokens with padding", padded, "tokens/s")


def _limits(ceilings: Ceilings, flops: StepFlops, timings: Timings, settings: BenchSettings) -> Iterator[Figure]:
    """How far both steps are from what the machine could do, by the FLOPs of the samples alone."""
    over = ceilings.over_roofline(flops.alone, timings, "packed", settings.clock)
    yield Figure.measured(CASE, "packed step / roofline of real flops", over, "x")
    for step in ("packed", "padded"):
        share = ceilings.utilisation(flops.alone, timings, step, settings.clock)
        yield Figure.measured(CASE, f"{step}, utilisation on real flops", share, "share")
