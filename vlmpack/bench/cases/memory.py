"""memory: peak of the packed step against the padded one."""

from __future__ import annotations

from vlmpack.bench.figure import Figure, Target
from vlmpack.bench.settings import BenchSettings
from vlmpack.bench.steps import StepPair
from vlmpack.bench.workload import ReceiptShapes

CASE = "memory"
TARGET = Target(limit=0.7, better="lower")


def measure_memory(settings: BenchSettings, shapes: ReceiptShapes) -> list[Figure]:
    """Exact numbers, no rounds: see `vlmpack.bench.memory` for what is counted."""
    pair = StepPair.of(settings, shapes)
    for step in pair.steps.values():
        step()  # what is made once and kept is not the step's
    peaks = pair.peaks(settings.device)
    ratio, family = peaks["packed"] / peaks["padded"], settings.family
    return [
        Figure(case=CASE, name="padded step", value=peaks["padded"], unit="bytes", family=family),
        Figure(case=CASE, name="packed step", value=peaks["packed"], unit="bytes", family=family),
        Figure(case=CASE, name="packed / padded", value=ratio, unit="x", target=TARGET, family=family),
    ]
