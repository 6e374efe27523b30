"""gpu memory: the largest micro-batch that fits beside an optimiser's state, found by doubling.

Forward and backward once for each size, until memory runs out, the largest to try is reached, or the time is up. The
optimiser's state is a block that nobody else can have: `GpuShapes.optimizer_bytes` a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from vlmpack.bench.figure import Figure, Skipped, Target
from vlmpack.bench.gpu.device import if_it_fits, reserved
from vlmpack.bench.gpu.models import FIXED, LONGEST, PACKED, Bodies, Ways
from vlmpack.bench.gpu.run import Cell, Found, Lab
from vlmpack.bench.gpu.shapes import GpuShapes, ModelShape
from vlmpack.bench.gpu.step import guess

CASE = "gpu memory"
WAYS = (PACKED, LONGEST, FIXED)
TWICE = Target(limit=2.0, better="higher")
LIKELY = 16
"""A micro-batch that is not likely to be passed; for the guess of time only."""


def cells(shapes: GpuShapes, shape: ModelShape, *, recomputed: bool = False) -> list[Cell]:
    """One, with or without recomputed activations."""
    return [
        Cell(
            case=CASE,
            name=f"{shape.family}, {_mode(recomputed)}",
            guess=guess(shapes, shape, LIKELY, calls=2.0 * len(WAYS)),
            run=lambda lab: _measure(lab, shape, recomputed=recomputed),
            pace=shape.family,
        )
    ]


def _mode(recomputed: bool) -> str:
    return "recomputed" if recomputed else "all activations kept"


def _measure(lab: Lab, shape: ModelShape, *, recomputed: bool) -> Found:
    bodies = lab.models.get(shape)
    largest: dict[str, int] = {}
    with bodies.recomputing(recomputed), reserved(lab.shapes.optimizer_bytes * bodies.weights, lab.device):
        for way in WAYS:
            largest[way], ended = _search(lab, bodies, way)
            if not largest[way]:
                yield Skipped(case=CASE, name=f"{shape.family}, {_mode(recomputed)}, {way}", why=ended)
                continue
            name = f"{_mode(recomputed)}, {way}, largest micro-batch ({ended})"
            yield Figure(case=CASE, name=name, value=largest[way], unit="samples", family=shape.family)
    yield from _compared(shape, largest, _mode(recomputed))


def _compared(shape: ModelShape, largest: dict[str, int], mode: str) -> Iterator[Figure]:
    for way in (LONGEST, FIXED):
        if largest[way] and largest[PACKED]:
            yield Figure(
                case=CASE,
                name=f"{mode}, largest micro-batch, packed / {way}",
                value=largest[PACKED] / largest[way],
                unit="x",
                family=shape.family,
                target=TWICE,
            )


def _search(lab: Lab, bodies: Bodies, way: str) -> tuple[int, str]:
    """(largest micro-batch that fitted, what ended the search)."""
    fitted, samples = 0, 1
    while samples <= lab.shapes.largest:
        if lab.seconds_left < 0:
            return fitted, "the time was up"
        if if_it_fits(lambda samples=samples: _once(lab, bodies, way, samples), lab.device) is None:
            return fitted, f"{samples} did not fit"
        fitted, samples = samples, 2 * samples
    return fitted, "larger ones were not tried"


def _once(lab: Lab, bodies: Bodies, way: str, samples: int) -> torch.Tensor:
    """One step; waits for it, so that what fails does so here."""
    ways = Ways.of(bodies, lab.shapes, samples, lab.device, seed=lab.settings.seed)
    step: Callable[[], torch.Tensor] = ways.steps[way]
    loss = step()
    ways.clear()
    lab.device.wait()
    lab.device.release()
    return loss
