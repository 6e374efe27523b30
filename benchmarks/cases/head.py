"""head: logits and cross-entropy of labelled rows only, against those of all rows; and in chunks, against one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.figures import BenchSettings, Figure, Target
from benchmarks.receipts import ReceiptShapes
from benchmarks.timing import alternate
from vlmpack.layout import IGNORE
from vlmpack.machine import peak_bytes
from vlmpack.model import StepConfig, target_logprobs

CASE = "head"
SHARES = (0.1, 0.5)
"""Labelled tokens of all tokens."""
CHUNKS = (256, 512, 1024)
"""Rows of logits alive at a time, against all labelled rows at once."""
PROPORTIONAL = Target(limit=1.1, better="lower")
MEMORY_SHARES = (0.25, 0.5, 0.75, 1.0)
"""The same for memory. With very few of them the weight's gradient outweighs all logits."""


@final
@dataclass(frozen=True, kw_only=True)
class HeadInputs:
    """Inputs of the head for one row. T row tokens, D channels, V ids."""

    hidden: torch.Tensor
    """[T, D], with a gradient."""
    targets: torch.Tensor
    """int64 [T]: a target for every token, of which a case labels as many as it wants."""
    head: nn.Linear
    """D to V."""

    def clear(self) -> None:
        """Drop all gradients."""
        self.hidden.grad = None
        self.head.zero_grad()


def measure_head(settings: BenchSettings, shapes: ReceiptShapes) -> list[Figure]:
    """Time both heads at several shares of labelled tokens, weigh what a labelled token costs, and a row in chunks."""
    inputs = head_inputs(shapes, settings)
    return [*_times(inputs, settings), *_memory(inputs, settings), *measure_chunks(inputs, settings)]


def _times(inputs: HeadInputs, settings: BenchSettings) -> list[Figure]:
    """In proportion, the ratio is the share."""
    figures = []
    for share in SHARES:
        count = round(share * len(inputs.targets))
        timings = alternate(
            {
                "labelled": lambda count=count: labelled_rows(inputs, count, chunk=StepConfig().head_chunk),
                "all": lambda count=count: all_rows(inputs, count),
            },
            seconds=settings.seconds / (len(SHARES) + 1),
            device=settings.device,
        )
        name = f"{share:.0%} labelled"
        figures += [
            Figure.timed(CASE, f"all rows, {name}", timings, "all", settings),
            Figure.compared(CASE, f"labelled / all rows, {name}", timings, ("labelled", "all"), settings),
        ]
    return figures


def _memory(inputs: HeadInputs, settings: BenchSettings) -> list[Figure]:
    """Weigh each further labelled token, between one number of them and the next."""
    counts = [round(share * len(inputs.targets)) for share in MEMORY_SHARES]
    peaks = [_peak(inputs, count, settings) for count in counts]
    slopes = [(b - a) / (n - m) for (a, b), (m, n) in zip(pairwise(peaks), pairwise(counts), strict=True)]
    ratio = max(slopes) / min(slopes)
    return [
        Figure(case=CASE, name="memory, a labelled token", value=sum(slopes) / len(slopes), unit="bytes"),
        Figure(case=CASE, name="memory, dearest / cheapest token", value=ratio, unit="x", target=PROPORTIONAL),
    ]


def measure_chunks(inputs: HeadInputs, settings: BenchSettings, *, case: str = CASE) -> Iterator[Figure]:
    """All rows labelled: time and memory of their logits in chunks, which are computed twice, against all at once."""
    rows = len(inputs.targets)
    ways = {
        chunk: lambda chunk=chunk: labelled_rows(inputs, rows, chunk=chunk)
        for chunk in (*(chunk for chunk in CHUNKS if chunk < rows), rows)
    }
    held = [inputs.hidden, inputs.targets, inputs.head.weight]
    peaks = {chunk: peak_bytes(way, held=held, device=settings.device) for chunk, way in ways.items()}
    timings = alternate(
        {str(chunk): way for chunk, way in ways.items()},
        seconds=settings.seconds / (len(SHARES) + 1),
        device=settings.device,
    )
    yield Figure.timed(case, f"{rows} labelled rows at once", timings, str(rows), settings)
    for chunk in list(ways)[:-1]:
        name = f"chunks of {chunk} / {rows} at once"
        yield Figure.compared(case, name, timings, (str(chunk), str(rows)), settings)
        yield Figure(case=case, name=f"memory, {name}", value=peaks[chunk] / peaks[rows], unit="x")


def _peak(inputs: HeadInputs, count: int, settings: BenchSettings) -> int:
    """Peak of the head with this many labelled rows, all of them in one chunk."""
    inputs.clear()
    return peak_bytes(lambda: labelled_rows(inputs, count, chunk=count), device=settings.device)


def head_inputs(shapes: ReceiptShapes, settings: BenchSettings) -> HeadInputs:
    """Random hidden states of a whole row."""
    rng, tokens = torch.Generator().manual_seed(settings.seed), sum(shapes.lengths)
    head = nn.Linear(shapes.hidden, shapes.vocab_size, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=rng) * shapes.hidden**-0.5)
    return HeadInputs(
        hidden=torch.randn(tokens, shapes.hidden, generator=rng).to(settings.device).requires_grad_(),
        targets=torch.randint(shapes.vocab_size, (tokens,), generator=rng).to(settings.device),
        head=head.to(settings.device),
    )


def labelled_rows(inputs: HeadInputs, count: int, *, chunk: int) -> torch.Tensor:
    """The packed step's way: the last `count` rows go through the head, `chunk` of them at a time."""
    inputs.clear()
    index = torch.arange(len(inputs.targets) - count, len(inputs.targets), device=inputs.targets.device)
    hidden, targets = inputs.hidden.index_select(0, index), inputs.targets.index_select(0, index)
    loss = -target_logprobs(hidden, targets, inputs.head, chunk=chunk).sum() / count
    loss.backward()
    return loss.detach()


def all_rows(inputs: HeadInputs, count: int) -> torch.Tensor:
    """The usual way: logits of every row in float32, of which the loss then leaves most out."""
    inputs.clear()
    targets = inputs.targets.clone()
    targets[: len(targets) - count] = IGNORE
    loss = F.cross_entropy(inputs.head(inputs.hidden).float(), targets, ignore_index=IGNORE)
    loss.backward()
    return loss.detach()
