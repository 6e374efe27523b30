"""gpu waits: how often a step makes the host wait for the device, and who asked; and the host's own time.

A step that does not wait is queued ahead of the device, and its host time is hidden behind the step before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import vlmpack
from vlmpack.bench.figure import Figure, Target
from vlmpack.bench.gpu.device import host_seconds
from vlmpack.bench.gpu.models import LONGEST, PACKED_WAYS, Ways
from vlmpack.bench.gpu.run import Cell, Lab
from vlmpack.bench.gpu.shapes import GpuShapes, ModelShape
from vlmpack.bench.gpu.step import guess
from vlmpack.bench.timing import Spread

CASE = "gpu waits"
NONE = Target(limit=0.0, better="lower")
SAMPLES = 2
ROUNDS = 5
NAMED = 8
"""Places that are named, the most frequent first."""
PACKAGE = Path(vlmpack.__file__).parent
BENCH = str(Path(__file__).parents[1])


def cells(shapes: GpuShapes, shape: ModelShape) -> list[Cell]:
    """One for the model."""
    calls = (ROUNDS + 2.0) * (1 + len(PACKED_WAYS))
    return [
        Cell(
            case=CASE,
            name=shape.family,
            guess=guess(shapes, shape, SAMPLES, calls=calls),
            run=lambda lab: _measure(lab, shape),
            pace=shape.family,
        )
    ]


def _measure(lab: Lab, shape: ModelShape) -> Iterator[Figure]:
    bodies = lab.models.get(shape)
    ways = Ways.of(bodies, lab.shapes, SAMPLES, lab.device, seed=lab.settings.seed)
    try:
        for way in (*PACKED_WAYS, LONGEST):
            yield from _way(lab, ways, way)
    finally:
        ways.clear()


def _way(lab: Lab, ways: Ways, way: str) -> Iterator[Figure]:
    family, step = ways.bodies.shape.family, ways.steps[way]
    step()
    found = lab.device.waits(step)
    ours = [place for place in found if is_ours(place)]
    if way in PACKED_WAYS:
        name = f"{way}, waits of vlmpack's own"
        yield Figure(case=CASE, name=name, value=len(ours), unit="times", family=family, target=NONE)
    yield Figure(case=CASE, name=f"{way}, waits", value=len(found), unit="times", family=family)
    for place, count in Counter(map(_short, found)).most_common(NAMED):
        yield Figure(case=CASE, name=f"{way}, waits at {place}", value=count, unit="times", family=family)
    seconds = Spread.of([host_seconds(step, lab.device) for _ in range(ROUNDS)])
    yield Figure.measured(CASE, f"{way}, host time", seconds, "s", family=family)


def is_ours(place: str) -> bool:
    """Whether vlmpack asked; the line of this benchmark that calls `backward` is not meant."""
    return place.startswith(str(PACKAGE)) and not place.startswith(BENCH)


def _short(place: str) -> str:
    """Without the folders that everybody's installation has elsewhere."""
    path, _, rest = place.partition(":")
    return f"{'/'.join(Path(path).parts[-3:])}:{rest}"
