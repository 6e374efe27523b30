"""compile: how often layers under torch.compile are compiled again while rows of many lengths go through them.

Counted, not timed: guards are the same whatever a compiler makes of a graph, so no machine code is made (`aot_eager`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from typing import final

import torch
from torch._dynamo import config as compiler
from torch._dynamo.utils import counters

from vlmpack.bench.figure import Figure, Target
from vlmpack.bench.settings import BenchSettings
from vlmpack.bench.workload import ReceiptShapes, receipt_batch, receipt_config, receipt_model
from vlmpack.errors import VlmpackError
from vlmpack.families import family_named
from vlmpack.layout import PaddedBatch
from vlmpack.model import PackedStep, compile_layers

CASE = "compile"
AGAIN = Target(limit=3, better="lower")
NONE = Target(limit=0, better="lower")
READS_VALUES = ("Data dependent", "Dynamic shape operator", "Tensor.item", "_local_scalar_dense")
"""What PyTorch says where a graph has to end because the host needs a value from the device."""


@final
@dataclass(frozen=True, kw_only=True)
class CompileShapes:
    """Rows that differ in everything."""

    receipts: ReceiptShapes = field(
        default_factory=lambda: ReceiptShapes(hidden=64, layers=10, kv_heads=2, vision_hidden=64, vision_depth=2)
    )
    """Of the model: more layers than the eight ways in which PyTorch compiles one function. `samples` and `longest` are
    drawn for every row."""
    steps: int = 100
    """Forward and backward passes."""
    samples: tuple[int, int] = (1, 6)
    """Fewest and most of a row."""
    longest: tuple[int, int] = (20, 120)
    """Tokens of the longest sample of a row, at least and at most."""


def measure_compiled(settings: BenchSettings, shapes: CompileShapes) -> list[Figure]:
    """Count steps after the first that compile anything, and what makes graphs end.

    Raises:
        VlmpackError: nothing was compiled at all.
        FailOnRecompileLimitHit: PyTorch would compile no more and go on without, so that there is nothing to count.
    """
    family = family_named(settings.family)
    model = receipt_model(family, shapes.receipts, seed=settings.seed, device=settings.device)
    step, graphs = PackedStep(compile_layers(model, backend="aot_eager")), []
    torch.compiler.reset()
    counters.clear()
    with compiler.patch(fail_on_recompile_limit_hit=True):
        for batch in _batches(settings, shapes):
            step(batch).loss.backward()
            graphs.append(counters["stats"]["unique_graphs"])
    if not graphs[0]:
        raise VlmpackError("no layer was compiled, so that none could be compiled again; is TORCHDYNAMO_DISABLE set?")
    breaks = counters["graph_break"]
    waits = sum(count for why, count in breaks.items() if any(words in why for words in READS_VALUES))
    torch.compiler.reset()
    again = [at for at, (before, after) in enumerate(pairwise(graphs), 2) if after > before]
    return [
        Figure(case=CASE, name=name, value=value, unit=unit, family=family.model_type, target=target)
        for name, value, unit, target in (
            (f"steps of {len(graphs)} that compile again", len(again), "steps", AGAIN),
            ("the last of them", max(again, default=1), "step", None),
            ("graphs in the end", graphs[-1], "graphs", None),
            ("graphs that end because the host needs a value", waits, "graphs", NONE),
        )
    ]


def _batches(settings: BenchSettings, shapes: CompileShapes) -> Iterator[PaddedBatch]:
    """Rows of other lengths each, and as many samples and images as it happens."""
    family, random = family_named(settings.family), Random(settings.seed)
    config = receipt_config(family, shapes.receipts)
    for seed in range(shapes.steps):
        drawn = replace(
            shapes.receipts, samples=random.randint(*shapes.samples), longest=random.randint(*shapes.longest)
        )
        yield receipt_batch(family, config, drawn, seed=seed, device=settings.device)
