"""gpu step: forward and backward of receipt-like batches, padded in three ways and packed in two.

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

A way that does not fit into memory is left out, and the report says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch

from vlmpack.bench.ceilings import Ceilings
from vlmpack.bench.figure import Figure, Skipped, Target
from vlmpack.bench.gpu.device import if_it_fits
from vlmpack.bench.gpu.models import FLASH, PACKED_WAYS, PADDED_WAYS, Ways, check_losses, why_no_flash
from vlmpack.bench.gpu.run import Cell, Found, Lab
from vlmpack.bench.gpu.shapes import GpuShapes, ModelShape
from vlmpack.bench.memory import peak_bytes
from vlmpack.bench.timing import Timings, alternate

CASE = "gpu step"
SHARE = Target(limit=0.95, better="higher")
ROOFLINE = Target(limit=1.25, better="lower")
GAIN = Target(limit=1.5, better="higher")
CALLS = 6
"""Of each way: one that is weighed, one or two that warm up, three rounds."""
SHARE_PACKED = 0.6
"""What a packed step takes of a padded one, at most."""
SETUP = 5.0
"""Seconds to make a batch, and perhaps a model."""
PLANNING = 1.0
"""Seconds that cuDNN's attention, in the padded ways, plans for every image of a new size."""
RATE = "samples a second"


@final
@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one cell measures."""

    shape: ModelShape
    """The model."""
    samples: int
    """The micro-batch."""
    recomputed: bool
    """Whether activations are recomputed in the backward pass."""

    def __str__(self) -> str:
        return f"micro-batch {self.samples}" + ", recomputed" * self.recomputed


def cells(
    shapes: GpuShapes, shape: ModelShape, micro_batches: Sequence[int], *, recomputed: bool = False
) -> list[Cell]:
    """One for each micro-batch."""
    plans = [Plan(shape=shape, samples=samples, recomputed=recomputed) for samples in micro_batches]
    return [
        Cell(
            case=CASE,
            name=f"{shape.family}, {plan}",
            guess=guess(
                shapes, shape, plan.samples, calls=CALLS * (len(PADDED_WAYS) + SHARE_PACKED * len(PACKED_WAYS))
            ),
            pace=shape.family,
            run=lambda lab, plan=plan: _measure(lab, plan),
        )
        for plan in plans
    ]


def flash() -> Cell:
    """Says why a way is missing, if it is."""
    return Cell(case=CASE, name=FLASH, guess=0.1, run=lambda _: _flash())


def _flash() -> Found:
    if why := why_no_flash():
        yield Skipped(case=CASE, name=FLASH, why=why)


def guess(shapes: GpuShapes, shape: ModelShape, samples: int, *, calls: float) -> float:
    """Seconds that so many steps take at most: all tokens to the full width, through all weights."""
    sizes = shape.sizes
    layer = 4 * sizes["hidden"] ** 2 + 3 * sizes["hidden"] * sizes.get("intermediate", 2 * sizes["hidden"])
    vision = 12 * sizes["vision_hidden"] ** 2 * sizes["vision_depth"] * 4  # four patches a token
    head = sizes["hidden"] * sizes.get("vocab_size", shapes.receipts.vocab_size)
    flops = 6 * samples * shapes.width * (sizes["layers"] * layer + vision + head)
    return SETUP + PLANNING * samples + calls * shape.slowness * flops / shapes.flops_per_second


def summary() -> Cell:
    """Best packed against best padded, whatever the micro-batch."""
    return Cell(case=CASE, name="best against best", guess=0.0, run=_summary)


def _measure(lab: Lab, plan: Plan) -> Found:
    bodies = lab.models.get(plan.shape)
    ways = Ways.of(bodies, lab.shapes, plan.samples, lab.device, seed=lab.settings.seed)
    with bodies.recomputing(plan.recomputed):
        yield from _weighed_and_timed(lab, plan, ways)


def _weighed_and_timed(lab: Lab, plan: Plan, ways: Ways) -> Found:
    def figure(name: str, value: float, unit: str) -> Figure:
        return Figure(case=CASE, name=f"{plan}, {name}", value=value, unit=unit, family=plan.shape.family)

    def too_large(name: str, beside: str = "") -> Skipped:
        why = f"it does not fit into memory{beside}"
        return Skipped(case=CASE, name=f"{plan.shape.family}, {plan}, {name}", why=why)

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
        found = if_it_fits(lambda: _figures(lab, plan, ways, list(peaks)), lab.device)
        if found is not None:
            if retries := lab.device.retries() - before:
                yield figure("times the allocator gave back its cache", retries, "times")
            yield from found
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
        *(one for name in fitting for one in _speed(lab, plan, ways, timings, ceilings, name)),
        *(one for base in fitting if base in PADDED_WAYS for one in _gains(lab, plan, ways, timings, base, fitting)),
    ]


def _speed(lab: Lab, plan: Plan, ways: Ways, timings: Timings, ceilings: Ceilings, name: str) -> Iterator[Figure]:
    """How fast one way is, against the clock and against the machine."""
    clock, family, words = lab.settings.clock, plan.shape.family, f"{plan}, {name}"
    lengths, needed, seconds = _lengths(ways), ways.needed().total, timings.of(name, clock)
    over = ceilings.over_roofline(needed, timings, name, clock)
    target = ROOFLINE if name in PACKED_WAYS else None
    yield Figure.measured(CASE, f"{words}, time", seconds, "s", family=family)
    yield Figure.measured(CASE, f"{words}, {RATE}", seconds.rate(len(lengths)), "samples/s", family=family)
    yield Figure.measured(CASE, f"{words}, real tokens", seconds.rate(sum(lengths)), "tokens/s", family=family)
    yield Figure.measured(CASE, f"{words}, needed work", seconds.rate(1e-12 * needed), "TFLOP/s", family=family)
    share = ceilings.utilisation(needed, timings, name, clock)
    yield Figure.measured(CASE, f"{words}, utilisation on real work", share, "share", family=family)
    yield Figure.measured(CASE, f"{words}, step / roofline", over, "x", family=family, target=target)


def _gains(lab: Lab, plan: Plan, ways: Ways, timings: Timings, base: str, fitting: list[str]) -> Iterator[Figure]:
    """What packing gains over one padded way."""
    family, ideal = plan.shape.family, ways.padded(base).total / ways.alone().total
    yield Figure(case=CASE, name=f"{plan}, {base}, ideal speed-up", value=ideal, unit="x", family=family)
    for name in (name for name in fitting if name in PACKED_WAYS):
        ratio, words = timings.ratio(base, name, lab.settings.clock), f"{plan}, {base} / {name}"
        yield Figure.measured(CASE, f"{words}, speed-up", ratio, "x", family=family)
        share = ratio.scaled(1 / ideal)
        yield Figure.measured(CASE, f"{words}, share of ideal", share, "x", family=family, target=SHARE)


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
        yield Figure(case=CASE, name=name, value=value, unit="x", family=shape.family, target=GAIN)


def _best(lab: Lab, shape: ModelShape, kind: Sequence[str]) -> Figure | None:
    ends = tuple(f", {way}, {RATE}" for way in kind)
    rates = [figure for figure in lab.figures if figure.family == shape.family and figure.name.endswith(ends)]
    return max(rates, key=lambda figure: figure.value, default=None)


def _setting(figure: Figure) -> str:
    return figure.name.removesuffix(f", {RATE}")
