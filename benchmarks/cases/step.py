"""step, host and compile: a training step on a packed row, against Hugging Face's own on the padded batch.

    speed-up         time of the padded step / time of the packed step
    ideal speed-up   FLOPs of the padded step / FLOPs of the samples, each alone and without padding
    share of ideal   speed-up / ideal speed-up: 1 means that packing itself costs no time

Both FLOP counts are for the unmodified model, including logits at every position. The packed step needs fewer, because
its head computes only labeled positions. So the share can legitimately exceed 1.

`memory` is the ratio of the two steps' peak memory, measured once. `host` is the time of a packed forward pass outside
the model's own modules. `compile` counts how often layers are recompiled for rows of many lengths. It only counts:
guards do not depend on the generated code, so none is generated (`aot_eager`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from typing import final

import torch
from torch._dynamo import config as compiler
from torch._dynamo.utils import counters

from benchmarks.flops import count_flops
from benchmarks.measuring import BenchSettings, Figure, Spread, Target, alternate, new_garbage_only, one_thread
from benchmarks.receipts import ReceiptShapes, hf_inputs, receipt_batch, receipt_model, receipt_samples
from vlmpack.errors import VlmpackError
from vlmpack.families import Family, family_named
from vlmpack.layout import pack
from vlmpack.machine import peak_bytes
from vlmpack.model import PackedStep, compile_layers
from vlmpack.testing import padded


@final
class StepPair:
    """Forward and backward of one batch, padded and packed, with two models of the same weights."""

    def __init__(self, settings: BenchSettings, shapes: ReceiptShapes) -> None:
        self.family = family_named(settings.family)
        self.model, other = (
            receipt_model(self.family, shapes, seed=settings.seed, device=settings.device) for _ in range(2)
        )
        self.step, self.device = PackedStep(other), settings.device
        samples = receipt_samples(self.family, other.config, shapes, seed=settings.seed)
        self.batch = padded(samples).to(settings.device)
        self.singles = [hf_inputs(padded([one]).to(settings.device)) for one in samples]
        self.steps: dict[str, Callable[[], torch.Tensor]] = {"padded": self.padded, "packed": self.packed}

    def padded(self) -> torch.Tensor:
        """Run the unmodified model on the padded batch with its 2D mask; return the loss."""
        self.model.zero_grad()
        loss = self.model(**hf_inputs(self.batch)).loss
        loss.backward()
        return loss.detach()

    def packed(self) -> torch.Tensor:
        """Run the packed step, which packs the same batch; return the loss."""
        self.step.model.zero_grad()
        loss = self.step(self.batch).loss
        loss.backward()
        return loss.detach()

    def alone(self) -> None:
        """Run the unmodified model on each sample alone: the minimum amount of work."""
        for inputs in self.singles:
            self.model(**inputs).loss.backward()

    def peaks(self) -> dict[str, int]:
        """Return the peak memory of each step in bytes, including weights, gradients and the batch.

        Run each step once before, so that tensors that are created once and kept do not count.
        """
        held, models = list(hf_inputs(self.batch).values()), {"padded": self.model, "packed": self.step.model}
        for model in models.values():
            model.zero_grad()
        return {
            name: peak_bytes(step, held=[*models[name].parameters(), *held], device=self.device)
            for name, step in self.steps.items()
        }


def check_same_loss(losses: Mapping[str, torch.Tensor], limit: float = 1e-4) -> None:
    """Check that all steps compute the same loss; otherwise, comparing their times would be meaningless.

    Raises:
        VlmpackError: a loss is NaN, or its relative difference from the first one exceeds `limit`.
    """
    values = {name: float(loss) for name, loss in losses.items()}
    first = next(iter(values.values()))
    if not all(abs(loss - first) <= limit * abs(first) for loss in values.values()):
        raise VlmpackError(f"the steps do not compute the same loss ({values}); run `vlmpack doctor --probe`")


def measure_step(settings: BenchSettings, shapes: ReceiptShapes) -> list[Figure]:
    """Time both steps on the same padded batch. The time of the packed step includes packing.

    Raises:
        VlmpackError: the two losses differ, so there is nothing to compare.
    """
    started, pair = time.perf_counter(), StepPair(settings, shapes)
    losses: dict[str, torch.Tensor] = {}
    flops = {name: count_flops(lambda n=name, s=step: losses.update({n: s()})) for name, step in pair.steps.items()}
    check_same_loss(losses)
    alone, peaks = count_flops(pair.alone), pair.peaks()
    left = settings.seconds - (time.perf_counter() - started)
    timings = alternate(pair.steps, seconds=left, device=settings.device)
    of, ideal, memory = ("padded", "packed"), flops["padded"] / alone, peaks["packed"] / peaks["padded"]
    less = Target(limit=0.7, better="lower")
    figures = [
        Figure.timed("step", "padded step", timings, "padded", settings),
        Figure.timed("step", "packed step", timings, "packed", settings),
        Figure.compared("step", "speed-up", timings, of, settings),
        Figure(case="step", name="ideal speed-up", value=ideal, unit="x"),
        Figure(case="step", name="FLOPs, packed / alone", value=flops["packed"] / alone, unit="x"),
        Figure.compared(
            "step", "share of ideal", timings, of, settings, scale=1 / ideal, target=share_of_ideal(pair.family)
        ),
        Figure(case="step", name="memory, packed / padded", value=memory, unit="x", target=less),
    ]
    return [replace(figure, family=settings.family) for figure in figures]


def share_of_ideal(family: Family) -> Target:
    """Return the target for a family's share of ideal.

    It is lower with experts, gated delta layers or bidirectional tokens, where a row needs more and smaller matrix
    products than a padded batch: one for each sample or expert.
    """
    sparse = family.has("experts") or family.has("gated_delta") or family.bidirectional is not None
    return Target(limit=0.85 if sparse else 0.95, better="higher")


def measure_host(settings: BenchSettings, shapes: ReceiptShapes) -> Iterator[Figure]:
    """Measure the host's own time in a packed forward pass: everything outside the model's backbone and head."""
    family, clock = family_named(settings.family), time.perf_counter if settings.clock == "wall" else time.process_time
    model = receipt_model(family, shapes, seed=settings.seed, device=settings.device)
    row = pack(receipt_batch(family, model.config, shapes, seed=settings.seed, device=settings.device))
    step, inside, results = PackedStep(model), list[float](), list[tuple[float, float]]()
    for module in (family.backbone(model), family.head(model)):
        module.register_forward_pre_hook(lambda *_: inside.append(-clock()))
        module.register_forward_hook(lambda *_: inside.append(clock()))
    ends = time.perf_counter() + settings.seconds
    with torch.no_grad(), one_thread(), new_garbage_only():
        while len(results) < 10 or time.perf_counter() < ends:
            inside.clear()
            started = clock()
            step(row)
            results.append((clock() - started - sum(inside), sum(inside)))
    own, share = Spread.of([own for own, _ in results]), Spread.of([own / models for own, models in results])
    more = {"family": settings.family, "target": Target(limit=1e-3, better="lower")}
    yield Figure.measured("host", "the host's own time", own, "s", **more)
    yield Figure.measured("host", "own time / time of the model's modules", share, "x", family=settings.family)


# ---------------------------------------------------------------------- compiled layers

READS_VALUES = ("Data dependent", "Dynamic shape operator", "Tensor.item", "_local_scalar_dense")
"""Phrases in PyTorch's reasons for a graph break at a host–device sync."""


@final
@dataclass(frozen=True, kw_only=True)
class CompileShapes:
    """Rows with different numbers of samples and different lengths."""

    receipts: ReceiptShapes = field(
        default_factory=lambda: ReceiptShapes(hidden=64, layers=10, kv_heads=2, vision_hidden=64, vision_depth=2)
    )
    """Sizes of the model. It has more layers than eight, the number of times that PyTorch recompiles one function."""
    steps: int = 100
    samples: tuple[int, int] = (1, 6)
    """Minimum and maximum number of samples in a row."""
    longest: tuple[int, int] = (20, 120)
    """Minimum and maximum number of tokens of a row's longest sample."""


def measure_compiled(settings: BenchSettings, shapes: CompileShapes) -> Iterator[Figure]:
    """Count the steps after the first that compile anything, and the graph breaks where the host needs a value.

    Raises:
        VlmpackError: nothing was compiled.
        FailOnRecompileLimitHit: PyTorch reached its recompile limit. It would stop compiling, so nothing could be
            counted.
    """
    family, random, graphs = family_named(settings.family), Random(settings.seed), []
    model = receipt_model(family, shapes.receipts, seed=settings.seed, device=settings.device)
    step = PackedStep(compile_layers(model, backend="aot_eager"))
    torch.compiler.reset()
    counters.clear()
    with compiler.patch(fail_on_recompile_limit_hit=True):
        for seed in range(shapes.steps):
            samples, longest = random.randint(*shapes.samples), random.randint(*shapes.longest)
            drawn = replace(shapes.receipts, samples=samples, longest=longest)
            step(receipt_batch(family, model.config, drawn, seed=seed, device=settings.device)).loss.backward()
            graphs.append(counters["stats"]["unique_graphs"])
    if not graphs[0]:
        raise VlmpackError("no layer was compiled, so that none could be compiled again; is TORCHDYNAMO_DISABLE set?")
    syncs = sum(n for why, n in counters["graph_break"].items() if any(words in why for words in READS_VALUES))
    torch.compiler.reset()
    again = sum(after > before for before, after in pairwise(graphs))
    counts = {
        f"steps of {len(graphs)} that compile again": again,
        "graphs that end because the host needs a value": syncs,
    }
    for (name, value), limit in zip(counts.items(), (2, 0), strict=True):
        target = Target(limit=limit, better="lower")
        yield Figure(case="compile", name=name, value=value, unit="", family=settings.family, target=target)
