"""gpu head: logits and cross-entropy of labelled rows only, against those of all rows, at the first model's sizes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from vlmpack.bench.cases.head import SHARES, HeadInputs, all_rows, labelled_rows, measure_chunks
from vlmpack.bench.figure import Figure, Skipped
from vlmpack.bench.gpu.device import if_it_fits
from vlmpack.bench.gpu.run import Cell, Found, Lab
from vlmpack.bench.gpu.shapes import GpuShapes
from vlmpack.bench.memory import peak_bytes
from vlmpack.bench.timing import alternate
from vlmpack.model import StepConfig

CASE = "gpu head"
GUESS = 4.0


def cells(shapes: GpuShapes) -> list[Cell]:
    """One for each share of labelled rows."""
    guess = GUESS + shapes.cell_seconds / len(SHARES)
    labelled = [
        Cell(case=CASE, name=f"{share:.0%} labelled", guess=guess, run=lambda lab, share=share: _measure(lab, share))
        for share in SHARES
    ]
    return [*labelled, Cell(case=CASE, name="chunks", guess=guess, run=_chunks)]


def _measure(lab: Lab, share: float) -> Found:
    inputs = _inputs(lab)
    count, name = round(share * len(inputs.targets)), f"{share:.0%} labelled"
    ways: dict[str, Callable[[], object]] = {
        "labelled rows": lambda: labelled_rows(inputs, count, chunk=StepConfig().head_chunk),
        "all rows": lambda: all_rows(inputs, count),
    }
    held = [inputs.hidden, inputs.targets, inputs.head.weight]
    peaks: dict[str, int] = {}
    for way, function in ways.items():
        inputs.clear()
        lab.device.release()
        peak = if_it_fits(lambda function=function: _peak(function, held, lab), lab.device)
        if peak is None:
            yield Skipped(case=CASE, name=f"{name}, {way}", why="it does not fit into memory")
            return
        peaks[way] = peak
        yield Figure(case=CASE, name=f"{name}, {way}, peak memory", value=peak, unit="bytes")
    seconds = lab.settings.seconds / len(SHARES)
    timings = alternate(ways, seconds=seconds, device=lab.device.name)
    yield from (Figure.timed(CASE, f"{name}, {way}", timings, way, lab.settings) for way in ways)
    yield Figure.compared(CASE, f"{name}, labelled / all rows", timings, ("labelled rows", "all rows"), lab.settings)
    ratio = peaks["labelled rows"] / peaks["all rows"]
    yield Figure(case=CASE, name=f"{name}, labelled / all rows, peak memory", value=ratio, unit="x")


def _chunks(lab: Lab) -> Found:
    lab.device.release()
    inputs = _inputs(lab)
    chunks = if_it_fits(lambda: list(measure_chunks(inputs, lab.settings, case=CASE)), lab.device)
    if chunks is None:
        yield Skipped(case=CASE, name="chunks", why="all rows at once do not fit into memory")
        return
    yield from chunks


def _peak(function: Callable[[], object], held: list[torch.Tensor], lab: Lab) -> int:
    function()
    return peak_bytes(function, held=held, device=lab.device.name)


def _inputs(lab: Lab) -> HeadInputs:
    """Random hidden states of a row, made on the device."""
    sizes, tokens = lab.shapes.models[0].sizes, lab.shapes.tokens
    hidden, vocabulary = sizes["hidden"], sizes.get("vocab_size", lab.shapes.receipts.vocab_size)
    where = {"device": lab.device.name, "dtype": lab.device.dtype}
    return HeadInputs(
        hidden=torch.randn(tokens, hidden, **where).requires_grad_(),
        targets=torch.randint(vocabulary, (tokens,), device=lab.device.name),
        head=nn.Linear(hidden, vocabulary, bias=False, **where),
    )
