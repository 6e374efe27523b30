"""memory: peak of the packed step against the padded one, and logits in proportion to labelled tokens."""

from __future__ import annotations

from itertools import pairwise

import torch

from vlmpack.bench.cases.head import HeadInputs, head_inputs, labelled_rows
from vlmpack.bench.cases.step import both_steps
from vlmpack.bench.figure import Figure, Target
from vlmpack.bench.memory import peak_bytes
from vlmpack.bench.settings import BenchSettings
from vlmpack.bench.workload import ReceiptShapes, on_device, receipt_batch, receipt_model

CASE = "memory"
TARGET = Target(limit=0.7, better="lower")
PROPORTIONAL = Target(limit=1.1, better="lower")
SHARES = (0.25, 0.5, 0.75, 1.0)
"""Labelled tokens of all tokens, for the head. With very few of them the weight's gradient outweighs all logits."""


def measure_memory(settings: BenchSettings, shapes: ReceiptShapes) -> list[Figure]:
    """Exact numbers, no rounds: see `vlmpack.bench.memory` for what is counted."""
    return [*_steps(settings, shapes), *_logits(settings, shapes)]


def _steps(settings: BenchSettings, shapes: ReceiptShapes) -> list[Figure]:
    model = receipt_model(shapes, seed=settings.seed, device=settings.device)
    batch = on_device(receipt_batch(model.config, shapes, seed=settings.seed), settings.device)
    held = [tensor for tensor in batch.to_hf().values() if isinstance(tensor, torch.Tensor)]
    peaks = {}
    for name, step in both_steps(model, batch, shapes, settings).items():
        step()  # what is made once and kept is not the step's
        model.zero_grad()
        peaks[name] = peak_bytes(step, held=[*model.parameters(), *held], device=settings.device)
    return [
        *(Figure(case=CASE, name=f"{name} step", value=peak, unit="bytes") for name, peak in peaks.items()),
        Figure(case=CASE, name="packed / padded", value=peaks["packed"] / peaks["padded"], unit="x", target=TARGET),
    ]


def _logits(settings: BenchSettings, shapes: ReceiptShapes) -> list[Figure]:
    """What each further labelled token costs, between one number of them and the next."""
    inputs = head_inputs(shapes, settings)
    tokens = sum(shapes.lengths)
    counts = [round(share * tokens) for share in SHARES]
    peaks = [_head_peak(inputs, count, settings) for count in counts]
    slopes = [(b - a) / (n - m) for (a, b), (m, n) in zip(pairwise(peaks), pairwise(counts), strict=True)]
    return [
        Figure(case=CASE, name="head, a labelled token", value=sum(slopes) / len(slopes), unit="bytes"),
        Figure(
            case=CASE,
            name="head, dearest / cheapest labelled token",
            value=max(slopes) / min(slopes),
            unit="x",
            target=PROPORTIONAL,
        ),
    ]


def _head_peak(inputs: HeadInputs, count: int, settings: BenchSettings) -> int:
    """Peak of the head with this many labelled rows, all of them in one chunk."""
    inputs.clear()
    return peak_bytes(lambda: labelled_rows(inputs, count, chunk=count), device=settings.device)
