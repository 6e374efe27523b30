"""gpu step, gpu memory and gpu waits: whole training steps of receipt-like batches.

step times forward and backward, padded in three ways and packed in two:

    padded to longest         the unmodified model on sdpa, with its 2D mask
    padded to longest, flash  the same on FlashAttention, where it is installed
    padded to width           on sdpa at a fixed sequence length, as recipes with static shapes have it
    packed                    the same padded batch, packed inside the step
    packed, slots of 8        with every sample's place a multiple of 8

    ideal speed-up            FLOPs of the padded step / FLOPs of the unmodified model on the samples alone
    share of ideal            speed-up / ideal speed-up
    utilisation               FLOPs that are needed (real tokens, causal pairs, labelled rows of the head) a second,
                              over those of a matrix product in the same rounds
    step / roofline           time of the step over that of the needed FLOPs at the product's speed

A way that does not fit into memory is left out, and the report names it.

memory finds the largest micro-batch that fits beside an optimiser's state, by doubling: forward and backward once for
each size, until memory runs out, the largest size is reached, or the time is up. The optimiser's state is a reserved
block of `GpuShapes.optimizer_bytes` a parameter.

waits counts host–device syncs of a step and names the lines that cause them, and measures the host's own time. A step
without syncs is queued ahead of the device, and its host time is hidden behind the step before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

import vlmpack
from benchmarks.figures import Figure, Skipped, Target
from benchmarks.flops import Ceilings
from benchmarks.gpu.device import host_seconds, if_it_fits, reserved
from benchmarks.gpu.models import (
    FIXED,
    FLASH,
    LONGEST,
    PACKED,
    PACKED_WAYS,
    PADDED_WAYS,
    Bodies,
    Ways,
    check_losses,
    why_no_flash,
)
from benchmarks.gpu.run import Cell, Entries, Lab
from benchmarks.gpu.shapes import GpuShapes, ModelShape
from benchmarks.timing import Spread, Timings, alternate
from vlmpack.machine import peak_bytes

STEP = "gpu step"
SHARE = Target(limit=0.95, better="higher")
ROOFLINE = Target(limit=1.25, better="lower")
GAIN = Target(limit=1.5, better="higher")
CALLS = 6
"""Of each way: one that is weighed, one or two that warm up, three rounds."""
SHARE_PACKED = 0.6
"""Time of a packed step over that of a padded one, at most."""
SETUP = 5.0
"""Seconds to make a batch, and perhaps a model."""
PLANNING = 1.0
"""Seconds that cuDNN's attention, in the padded ways, plans for every image of a new size."""
RATE = "samples a second"


@final
@dataclass(frozen=True, kw_only=True)
class Plan:
    """The subject of one cell."""

    shape: ModelShape
    """The model."""
    samples: int
    """The micro-batch."""
    recomputed: bool
    """True: activations are recomputed in the backward pass."""

    def __str__(self) -> str:
        return f"micro-batch {self.samples}" + ", recomputed" * self.recomputed


def step_cells(
    shapes: GpuShapes, shape: ModelShape, micro_batches: Sequence[int], *, recomputed: bool = False
) -> list[Cell]:
    """One for each micro-batch."""
    plans = [Plan(shape=shape, samples=samples, recomputed=recomputed) for samples in micro_batches]
    return [
        Cell(
            case=STEP,
            name=f"{shape.family}, {plan}",
            guess=guess(
                shapes, shape, plan.samples, calls=CALLS * (len(PADDED_WAYS) + SHARE_PACKED * len(PACKED_WAYS))
            ),
            pace=shape.family,
            run=lambda lab, plan=plan: _measure_step(lab, plan),
        )
        for plan in plans
    ]


def flash_cell() -> Cell:
    """A cell that gives the reason why a way is missing, if it is."""
    return Cell(case=STEP, name=FLASH, guess=0.1, run=lambda _: _flash())


def _flash() -> Entries:
    if why := why_no_flash():
        yield Skipped(case=STEP, name=FLASH, why=why)


def guess(shapes: GpuShapes, shape: ModelShape, samples: int, *, calls: float) -> float:
    """Seconds that so many steps take at most: all tokens to the full width, through all weights."""
    sizes = shape.sizes
    layer = 4 * sizes["hidden"] ** 2 + 3 * sizes["hidden"] * sizes.get("intermediate", 2 * sizes["hidden"])
    vision = 12 * sizes["vision_hidden"] ** 2 * sizes["vision_depth"] * 4  # four patches a token
    head = sizes["hidden"] * sizes.get("vocab_size", shapes.receipts.vocab_size)
    flops = 6 * samples * shapes.width * (sizes["layers"] * layer + vision + head)
    return SETUP + PLANNING * samples + calls * shape.slowness * flops / shapes.flops_per_second


def summary_cell() -> Cell:
    """Best packed against best padded, whatever the micro-batch."""
    return Cell(case=STEP, name="best against best", guess=0.0, run=_summary)


def _measure_step(lab: Lab, plan: Plan) -> Entries:
    bodies = lab.models.get(plan.shape)
    ways = Ways.of(bodies, lab.shapes, plan.samples, lab.device, seed=lab.settings.seed)
    with bodies.recomputing(plan.recomputed):
        yield from _weighed_and_timed(lab, plan, ways)


def _weighed_and_timed(lab: Lab, plan: Plan, ways: Ways) -> Entries:
    def figure(name: str, value: float, unit: str) -> Figure:
        return Figure(case=STEP, name=f"{plan}, {name}", value=value, unit=unit, family=plan.shape.family)

    def too_large(name: str, reason: str = "") -> Skipped:
        why = f"it does not fit into memory{reason}"
        return Skipped(case=STEP, name=f"{plan.shape.family}, {plan}, {name}", why=why)

    peaks: dict[str, int] = {}
    losses: dict[str, torch.Tensor] = {}
    for name, step in ways.steps.items():
        _clear(lab, ways)
        peak = if_it_fits(lambda name=name, step=step: _weigh(name, step, losses, ways, lab), lab.device)
        if peak is None:
            yield too_large(name)
        else:
            peaks[name] = peak
            yield figure(f"{name}, peak memory", peak, "bytes")
    if losses:
        check_losses(losses)
    while peaks:
        _clear(lab, ways)
        before = lab.device.retries()
        figures = if_it_fits(lambda: _figures(lab, plan, ways, list(peaks)), lab.device)
        if figures is not None:
            if retries := lab.device.retries() - before:
                yield figure("times the allocator gave back its cache", retries, "times")
            yield from figures
            return
        largest = max(peaks, key=lambda name: peaks[name])
        del peaks[largest]
        yield too_large(largest, " beside the product and the copy that it is compared with")


def _clear(lab: Lab, ways: Ways) -> None:
    ways.clear()
    lab.device.release()


def _weigh(name: str, step: Callable[[], torch.Tensor], losses: dict[str, torch.Tensor], ways: Ways, lab: Lab) -> int:
    """Peak bytes of one call, which also warms up and leaves its loss."""
    return peak_bytes(lambda: losses.update({name: step()}), held=ways.held, device=lab.device.name)


def _figures(lab: Lab, plan: Plan, ways: Ways, fitting: list[str]) -> list[Figure]:
    """All that is timed, in turn with the machine's ceilings."""
    lengths, steps = _lengths(ways), ways.steps
    ceilings = Ceilings.of(ways.bodies.model, tokens=sum(lengths), hidden=plan.shape.sizes["hidden"])
    callables: dict[str, Callable[[], object]] = {**{name: steps[name] for name in fitting}, **ceilings.callables}
    timings = alternate(callables, seconds=lab.settings.seconds, device=lab.device.name)
    return [
        *(figure for name in fitting for figure in _speed(lab, plan, ways, timings, ceilings, name)),
        *(
            figure
            for base in fitting
            if base in PADDED_WAYS
            for figure in _gains(lab, plan, ways, timings, base, fitting)
        ),
    ]


def _speed(lab: Lab, plan: Plan, ways: Ways, timings: Timings, ceilings: Ceilings, name: str) -> Iterator[Figure]:
    """Yield the speed of one way, by the clock and against the machine."""
    clock, family, words = lab.settings.clock, plan.shape.family, f"{plan}, {name}"
    lengths, needed, seconds = _lengths(ways), ways.needed().total, timings.of(name, clock)
    over = ceilings.over_roofline(needed, timings, name, clock)
    target = ROOFLINE if name in PACKED_WAYS else None
    yield Figure.measured(STEP, f"{words}, time", seconds, "s", family=family)
    yield Figure.measured(STEP, f"{words}, {RATE}", seconds.rate(len(lengths)), "samples/s", family=family)
    yield Figure.measured(STEP, f"{words}, real tokens", seconds.rate(sum(lengths)), "tokens/s", family=family)
    yield Figure.measured(STEP, f"{words}, needed work", seconds.rate(1e-12 * needed), "TFLOP/s", family=family)
    share = ceilings.utilisation(needed, timings, name, clock)
    yield Figure.measured(STEP, f"{words}, utilisation on real work", share, "share", family=family)
    yield Figure.measured(STEP, f"{words}, step / roofline", over, "x", family=family, target=target)


def _gains(lab: Lab, plan: Plan, ways: Ways, timings: Timings, base: str, fitting: list[str]) -> Iterator[Figure]:
    """Yield the gains of packing over one padded way."""
    family, ideal = plan.shape.family, ways.padded(base).total / ways.alone().total
    yield Figure(case=STEP, name=f"{plan}, {base}, ideal speed-up", value=ideal, unit="x", family=family)
    for name in (name for name in fitting if name in PACKED_WAYS):
        ratio, words = timings.ratio(base, name, lab.settings.clock), f"{plan}, {base} / {name}"
        yield Figure.measured(STEP, f"{words}, speed-up", ratio, "x", family=family)
        share = ratio.scaled(1 / ideal)
        yield Figure.measured(STEP, f"{words}, share of ideal", share, "x", family=family, target=SHARE)


def _lengths(ways: Ways) -> tuple[int, ...]:
    assert ways.batch.metadata is not None
    return ways.batch.metadata.lengths


def _summary(lab: Lab) -> Iterator[Figure]:
    for shape in lab.shapes.models:
        best = {kind: _best(lab, shape, kind) for kind in (PADDED_WAYS, PACKED_WAYS)}
        padded, packed = best[PADDED_WAYS], best[PACKED_WAYS]
        if padded is None or packed is None:
            continue
        name = f"best packed ({_setting(packed)}) / best padded ({_setting(padded)}), {RATE}"
        value = packed.value / padded.value
        yield Figure(case=STEP, name=name, value=value, unit="x", family=shape.family, target=GAIN)


def _best(lab: Lab, shape: ModelShape, kind: Sequence[str]) -> Figure | None:
    ends = tuple(f", {way}, {RATE}" for way in kind)
    rates = [figure for figure in lab.figures if figure.family == shape.family and figure.name.endswith(ends)]
    return max(rates, key=lambda figure: figure.value, default=None)


def _setting(figure: Figure) -> str:
    return figure.name.removesuffix(f", {RATE}")


MEMORY = "gpu memory"
WAYS = (PACKED, LONGEST, FIXED)
TWICE = Target(limit=2.0, better="higher")
LIKELY = 16
"""A micro-batch that is not likely to be passed; for the guess of time only."""


def memory_cells(shapes: GpuShapes, shape: ModelShape, *, recomputed: bool = False) -> list[Cell]:
    """One, with or without recomputed activations."""
    return [
        Cell(
            case=MEMORY,
            name=f"{shape.family}, {_mode(recomputed)}",
            guess=guess(shapes, shape, LIKELY, calls=2.0 * len(WAYS)),
            run=lambda lab: _measure_memory(lab, shape, recomputed=recomputed),
            pace=shape.family,
        )
    ]


def _mode(recomputed: bool) -> str:
    return "recomputed" if recomputed else "all activations kept"


def _measure_memory(lab: Lab, shape: ModelShape, *, recomputed: bool) -> Entries:
    bodies = lab.models.get(shape)
    largest: dict[str, int] = {}
    with bodies.recomputing(recomputed), reserved(lab.shapes.optimizer_bytes * bodies.weights, lab.device):
        for way in WAYS:
            largest[way], ended = _search(lab, bodies, way)
            if not largest[way]:
                yield Skipped(case=MEMORY, name=f"{shape.family}, {_mode(recomputed)}, {way}", why=ended)
                continue
            name = f"{_mode(recomputed)}, {way}, largest micro-batch ({ended})"
            yield Figure(case=MEMORY, name=name, value=largest[way], unit="samples", family=shape.family)
    yield from _compare_memory(shape, largest, _mode(recomputed))


def _compare_memory(shape: ModelShape, largest: dict[str, int], mode: str) -> Iterator[Figure]:
    for way in (LONGEST, FIXED):
        if largest[way] and largest[PACKED]:
            yield Figure(
                case=MEMORY,
                name=f"{mode}, largest micro-batch, packed / {way}",
                value=largest[PACKED] / largest[way],
                unit="x",
                family=shape.family,
                target=TWICE,
            )


def _search(lab: Lab, bodies: Bodies, way: str) -> tuple[int, str]:
    """Search by doubling: (largest micro-batch that fitted, what ended the search)."""
    fitted, samples = 0, 1
    while samples <= lab.shapes.largest:
        if lab.seconds_left < 0:
            return fitted, "the time was up"
        if if_it_fits(lambda samples=samples: _once(lab, bodies, way, samples), lab.device) is None:
            return fitted, f"{samples} did not fit"
        fitted, samples = samples, 2 * samples
    return fitted, "larger ones were not tried"


def _once(lab: Lab, bodies: Bodies, way: str, samples: int) -> torch.Tensor:
    """Run one step to its end, so that an error is raised at this call."""
    ways = Ways.of(bodies, lab.shapes, samples, lab.device, seed=lab.settings.seed)
    step: Callable[[], torch.Tensor] = ways.steps[way]
    loss = step()
    ways.clear()
    lab.device.wait()
    lab.device.release()
    return loss


SYNCS = "gpu waits"
NO_SYNCS = Target(limit=0.0, better="lower")
SYNC_SAMPLES = 2
SYNC_ROUNDS = 5
MOST_NAMED = 8
"""Places that are named, the most frequent first."""
PACKAGE = Path(vlmpack.__file__).parent


def sync_cells(shapes: GpuShapes, shape: ModelShape) -> list[Cell]:
    """One for the model."""
    calls = (SYNC_ROUNDS + 2.0) * (1 + len(PACKED_WAYS))
    return [
        Cell(
            case=SYNCS,
            name=shape.family,
            guess=guess(shapes, shape, SYNC_SAMPLES, calls=calls),
            run=lambda lab: _measure_syncs(lab, shape),
            pace=shape.family,
        )
    ]


def _measure_syncs(lab: Lab, shape: ModelShape) -> Iterator[Figure]:
    bodies = lab.models.get(shape)
    ways = Ways.of(bodies, lab.shapes, SYNC_SAMPLES, lab.device, seed=lab.settings.seed)
    try:
        for way in (*PACKED_WAYS, LONGEST):
            yield from _syncs_of(lab, ways, way)
    finally:
        ways.clear()


def _syncs_of(lab: Lab, ways: Ways, way: str) -> Iterator[Figure]:
    family, step = ways.bodies.shape.family, ways.steps[way]
    step()
    places = lab.device.syncs(step)
    own_places = [place for place in places if is_ours(place)]
    if way in PACKED_WAYS:
        name = f"{way}, waits of vlmpack's own"
        yield Figure(case=SYNCS, name=name, value=len(own_places), unit="times", family=family, target=NO_SYNCS)
    yield Figure(case=SYNCS, name=f"{way}, waits", value=len(places), unit="times", family=family)
    for place, count in Counter(map(_short, places)).most_common(MOST_NAMED):
        yield Figure(case=SYNCS, name=f"{way}, waits at {place}", value=count, unit="times", family=family)
    seconds = Spread.of([host_seconds(step, lab.device) for _ in range(SYNC_ROUNDS)])
    yield Figure.measured(SYNCS, f"{way}, host time", seconds, "s", family=family)


def is_ours(place: str) -> bool:
    """Return whether a line of vlmpack causes a sync; benchmarks, whose lines call `backward`, are not part of it."""
    return place.startswith(str(PACKAGE))


def _short(place: str) -> str:
    """Without the folders that everybody's installation has elsewhere."""
    path, _, rest = place.partition(":")
    return f"{'/'.join(Path(path).parts[-3:])}:{rest}"
