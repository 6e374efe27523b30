"""step: forward and backward of a packed batch, against Hugging Face's own step on the padded batch, and the ideal.

    speed-up         time of the padded step / time of the packed step
    ideal speed-up   FLOPs of the padded step / FLOPs of the samples, each alone and without padding
    share of ideal   the one over the other: 1 means that not a moment is lost to packing

Both FLOP counts are of the unmodified model, logits at every position included. The packed step spends fewer: its
head sees labelled positions only. So a share above 1 is possible, and a fair one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from vlmpack.bench.figure import Figure, Target
from vlmpack.bench.flops import count_flops, step_flops
from vlmpack.bench.settings import BenchSettings
from vlmpack.bench.timing import Spread, Timings, alternate
from vlmpack.bench.workload import ReceiptShapes, alone, hf_inputs, on_device, receipt_batch, receipt_model
from vlmpack.errors import VlmpackError
from vlmpack.layout import PaddedBatch
from vlmpack.step import PackedStep

CASE = "step"
TARGET = Target(limit=0.9, better="higher")
SAME = 1e-4
"""Relative difference between the losses of two float32 steps above which they did not compute the same."""


def measure_step(settings: BenchSettings, shapes: ReceiptShapes) -> list[Figure]:
    """Time both steps on the same padded batch: the packed step packs it itself, inside the measured time.

    Raises:
        VlmpackError: the two losses differ, so there is nothing to compare.
    """
    model = receipt_model(shapes, seed=settings.seed, device=settings.device)
    batch = on_device(receipt_batch(model.config, shapes, seed=settings.seed), settings.device)
    ideal = ideal_speedup(model, batch)
    steps = both_steps(model, batch, shapes, settings)
    check_same_loss(steps)
    timings = alternate(steps, seconds=settings.seconds, device=settings.device)
    return [
        Figure.timed(CASE, "padded step", timings, "padded", settings),
        Figure.timed(CASE, "packed step", timings, "packed", settings),
        _tokens_per_second(sum(shapes.lengths), timings, settings),
        Figure.compared(CASE, "speed-up", timings, ("padded", "packed"), settings),
        Figure(case=CASE, name="ideal speed-up", value=ideal, unit="x"),
        Figure(case=CASE, name="ideal speed-up, causal pairs", value=_causal_ideal(model.config, batch), unit="x"),
        Figure.compared(
            CASE, "share of ideal", timings, ("padded", "packed"), settings, scale=1 / ideal, target=TARGET
        ),
    ]


def both_steps(
    model: Any, batch: PaddedBatch, shapes: ReceiptShapes, settings: BenchSettings
) -> dict[str, Callable[[], torch.Tensor]]:
    """Forward and backward, padded and packed, by two models of the same weights; each returns its loss."""
    ours = receipt_model(shapes, seed=settings.seed, device=settings.device)
    packed_step, inputs = PackedStep(ours), hf_inputs(batch)

    def padded() -> torch.Tensor:
        model.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        return loss.detach()

    def packed() -> torch.Tensor:
        ours.zero_grad()
        loss = packed_step(batch).loss
        loss.backward()
        return loss.detach()

    return {"padded": padded, "packed": packed}


def check_same_loss(steps: Mapping[str, Callable[[], torch.Tensor]]) -> None:
    """Times of steps that compute different things mean nothing.

    Raises:
        VlmpackError: they do.
    """
    losses = {name: float(step()) for name, step in steps.items()}
    if abs(losses["packed"] - losses["padded"]) > SAME * abs(losses["padded"]):
        raise VlmpackError(f"the two steps do not compute the same loss ({losses}); run `vlmpack doctor`")


def ideal_speedup(model: Any, batch: PaddedBatch) -> float:
    """FLOPs of the padded step over those of the samples alone, counted as they run."""
    runs = [hf_inputs(batch), *alone(batch)]
    padded, *real = (count_flops(lambda inputs=inputs: model(**inputs).loss.backward()) for inputs in runs)
    return padded / sum(real)


def _causal_ideal(config: Any, batch: PaddedBatch) -> float:
    """The same by formula, but real samples count the pairs that causal attention needs, padded ones all."""
    assert batch.facts is not None
    lengths, grids = batch.facts.lengths, batch.facts.image_grids
    padded = step_flops(config, [max(lengths)] * len(lengths), grids)
    return padded.total / step_flops(config, lengths, grids, causal=True).total


def _tokens_per_second(tokens: int, timings: Timings, settings: BenchSettings) -> Figure:
    seconds = timings.of("packed", settings.clock)
    rate = Spread(
        median=tokens / seconds.median, low=tokens / seconds.high, high=tokens / seconds.low, rounds=seconds.rounds
    )
    return Figure.measured(CASE, "packed, real tokens", rate, "tokens/s")
