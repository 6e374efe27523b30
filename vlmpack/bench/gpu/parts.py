"""What a run consists of, the more important first: an early end leaves the most telling figures."""

from __future__ import annotations

from vlmpack.bench.gpu import attention, ceilings, correctness, equality, head, memory, step, waits
from vlmpack.bench.gpu.run import Cell
from vlmpack.bench.gpu.shapes import GpuShapes

FIRST = 3
"""Micro-batches that are measured before anything else about a model."""


def all_cells(shapes: GpuShapes) -> list[Cell]:
    """Every cell of a run, in order. A model stays on the device for all that follows one another about it."""
    found = [*ceilings.cells(shapes), *correctness.cells(shapes), *equality.cells(shapes)]
    found.append(step.flash())
    for shape in shapes.models:
        found += step.cells(shapes, shape, shapes.micro_batches[:FIRST])
        found += waits.cells(shapes, shape)
    found += [*attention.cells(shapes), *head.cells(shapes)]
    for shape in shapes.models:
        found += memory.cells(shapes, shape)
        found += step.cells(shapes, shape, shapes.recomputed, recomputed=True)
        found += step.cells(shapes, shape, shapes.micro_batches[FIRST:])
        found += memory.cells(shapes, shape, recomputed=True)
    return [*found, step.summary()]
