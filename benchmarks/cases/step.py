"""step, memory and compile: a training step on a packed row, against Hugging Face's own step on the padded batch.

    speed-up         time of the padded step / time of the packed step
    ideal speed-up   FLOPs of the padded step / FLOPs of the samples, each alone and without padding
    share of ideal   speed-up / ideal speed-up: 1 means that packing costs no time

Both FLOP counts are of the unmodified model, logits at every position included. The packed step spends fewer: its
head computes labelled positions only. So a share above 1 is possible, and a fair one.

memory is the peak of the packed step over that of the padded one. compile counts how often layers under torch.compile
are compiled again while rows of many lengths go through them. It is counted, not timed: guards are the same whatever a
compiler makes of a graph, so no machine code is made (`aot_eager`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from typing import Any, final

import torch
from torch._dynamo import config as compiler
from torch._dynamo.utils import counters

from benchmarks.figures import BenchSettings, Figure, Target
from benchmarks.flops import Ceilings, count_flops, step_flops
from benchmarks.receipts import (
    BY_FORMULA,
    ReceiptShapes,
    alone,
    built_samples,
    hf_inputs,
    receipt_batch,
    receipt_config,
    receipt_model,
)
from benchmarks.timing import Timings, alternate
from vlmpack.errors import VlmpackError
from vlmpack.families import Family, family_named
from vlmpack.layout import PaddedBatch
from vlmpack.machine import peak_bytes
from vlmpack.model import PackedStep, compile_layers
from vlmpack.testing import padded

SAME_LOSS = 1e-4
"""Relative difference between the losses of two float32 steps above which they did not compute the same."""


@final
@dataclass(frozen=True, kw_only=True)
class StepPair:
    """Forward and backward of one batch in two ways, by two models of the same weights."""

    model: Any
    """Unmodified, for the padded step."""
    packed_step: PackedStep
    """On the other model. It is given the padded batch and packs it itself."""
    batch: PaddedBatch
    """The batch."""
    singles: Sequence[Mapping[str, torch.Tensor]]
    """Each of its samples without padding, as the unmodified model takes it."""

    @classmethod
    def of(cls, settings: BenchSettings, shapes: ReceiptShapes) -> StepPair:
        """The two steps of `settings.family`.

        Raises:
            FamilyError: there is no such family.
        """
        family = family_named(settings.family)
        models = [receipt_model(family, shapes, seed=settings.seed, device=settings.device) for _ in range(2)]
        config, seed, device = models[0].config, settings.seed, settings.device
        batch = receipt_batch(family, config, shapes, seed=seed, device=device)
        if family.model_type in BY_FORMULA or not family.has_vision:
            singles = alone(batch)
        else:
            singles = [hf_inputs(padded([one]).to(device)) for one in built_samples(config, shapes, seed=seed)]
        return cls(model=models[0], packed_step=PackedStep(models[1]), batch=batch, singles=singles)

    @property
    def steps(self) -> dict[str, Callable[[], torch.Tensor]]:
        """Both by name."""
        return {"padded": self.padded, "packed": self.packed}

    def padded(self) -> torch.Tensor:
        """The unmodified model on the padded batch with its 2D mask; returns the loss."""
        self.model.zero_grad()
        loss = self.model(**hf_inputs(self.batch)).loss
        loss.backward()
        return loss.detach()

    def packed(self) -> torch.Tensor:
        """The packed step; returns the loss."""
        self.packed_step.model.zero_grad()
        loss = self.packed_step(self.batch).loss
        loss.backward()
        return loss.detach()

    def alone(self) -> None:
        """The unmodified model on each sample by itself: what has to be computed, and not a token more."""
        for inputs in self.singles:
            self.model(**inputs).loss.backward()

    def peaks(self, device: str) -> dict[str, int]:
        """Peak bytes of each step, its own weights, its gradients and the batch included. Run each once before: what is
        made once and kept is not the step's."""
        held = [tensor for tensor in self.batch.to_hf().values() if isinstance(tensor, torch.Tensor)]
        models = {"padded": self.model, "packed": self.packed_step.model}
        for model in models.values():
            model.zero_grad()
        return {
            name: peak_bytes(step, held=[*models[name].parameters(), *held], device=device)
            for name, step in self.steps.items()
        }


@final
@dataclass(frozen=True, kw_only=True)
class CountedFlops:
    """FLOPs of both steps, and of the samples alone."""

    padded: int
    """Of the padded step."""
    packed: int
    """Of the packed step."""
    alone: int
    """Of the unmodified model on each sample without padding."""

    @classmethod
    def of(cls, pair: StepPair) -> CountedFlops:
        """Count both steps as they run, once they are seen to compute the same loss.

        Raises:
            VlmpackError: they do not.
        """
        losses: dict[str, torch.Tensor] = {}
        steps = {name: lambda name=name, step=step: losses.update({name: step()}) for name, step in pair.steps.items()}
        counts = {name: count_flops(step) for name, step in steps.items()}
        check_same_loss(losses)
        return cls(**counts, alone=count_flops(pair.alone))

    @property
    def ideal_speedup(self) -> float:
        """FLOPs of the padded step over those of the samples alone: the speed-up if time went with FLOPs."""
        return self.padded / self.alone


def check_same_loss(losses: Mapping[str, torch.Tensor]) -> None:
    """Times of steps that compute different things mean nothing.

    Raises:
        VlmpackError: they do.
    """
    values = {name: float(loss) for name, loss in losses.items()}
    if abs(values["packed"] - values["padded"]) > SAME_LOSS * abs(values["padded"]):
        raise VlmpackError(f"the two steps do not compute the same loss ({values}); run `vlmpack doctor --probe`")


STEP = "step"
DENSE = Target(limit=0.95, better="higher")
"""Share of ideal of families whose every layer has attention and an MLP."""
SPARSE = Target(limit=0.85, better="higher")
"""Share of ideal of families with experts, gated delta layers, or tokens that see later ones: samples that are cut out,
or spread over experts, make more and smaller products than a padded batch does."""


def measure_step(settings: BenchSettings, shapes: ReceiptShapes) -> list[Figure]:
    """Time both steps on the same padded batch: the packed step packs it itself, inside the measured time.

    Raises:
        VlmpackError: the two losses differ, so there is nothing to compare.
    """
    started = time.perf_counter()
    family, pair = family_named(settings.family), StepPair.of(settings, shapes)
    flops = CountedFlops.of(pair)
    peaks = pair.peaks(settings.device)
    ceilings = Ceilings.of(pair.model, tokens=sum(shapes.lengths), hidden=shapes.hidden)
    left = settings.seconds - (time.perf_counter() - started)
    timings = alternate({**pair.steps, **ceilings.callables}, seconds=left, device=settings.device)
    steps, scale = ("padded", "packed"), 1 / flops.ideal_speedup
    figures = [
        Figure.timed(STEP, "padded step", timings, "padded", settings),
        Figure.timed(STEP, "packed step", timings, "packed", settings),
        *_rates(shapes, timings, settings),
        Figure.compared(STEP, "speed-up", timings, steps, settings),
        Figure(case=STEP, name="ideal speed-up", value=flops.ideal_speedup, unit="x"),
        *_causal_ideal(family, pair),
        Figure(case=STEP, name="FLOPs, packed / alone", value=flops.packed / flops.alone, unit="x"),
        Figure.compared(STEP, "share of ideal", timings, steps, settings, scale=scale, target=target_of(family)),
        *_limits(ceilings, flops, timings, settings),
        Figure(case=STEP, name="memory, packed / padded", value=peaks["packed"] / peaks["padded"], unit="x"),
    ]
    return [replace(figure, family=family.model_type) for figure in figures]


def target_of(family: Family) -> Target:
    """The share of the ideal speed-up that the family must reach."""
    sparse = family.has("experts") or family.has("gated_delta") or family.sees is not None
    return SPARSE if sparse else DENSE


def _causal_ideal(family: Family, pair: StepPair) -> Iterator[Figure]:
    """The ideal by formula, where real samples count the pairs that causal attention needs, and padded ones all."""
    if family.model_type not in BY_FORMULA:
        return
    assert pair.batch.metadata is not None
    config, lengths, grids = pair.model.config, pair.batch.metadata.lengths, pair.batch.metadata.image_grids
    rows = step_flops(family, config, [max(lengths)] * len(lengths), grids).total
    value = rows / step_flops(family, config, lengths, grids, causal=True).total
    yield Figure(case=STEP, name="ideal, causal pairs", value=value, unit="x")


def _rates(shapes: ReceiptShapes, timings: Timings, settings: BenchSettings) -> Iterator[Figure]:
    """Real tokens and samples a second, and all tokens that the padded step computes in one."""
    real, samples = sum(shapes.lengths), len(shapes.lengths)
    counts = {"real tokens": (real, "tokens/s"), "samples": (samples, "samples/s")}
    for step in ("packed", "padded"):
        seconds = timings.of(step, settings.clock)
        for what, (count, unit) in counts.items():
            yield Figure.measured(STEP, f"{step}, {what}", seconds.rate(count), unit)
    padded = timings.of("padded", settings.clock).rate(samples * max(shapes.lengths))
    yield Figure.measured(STEP, "padded, tokens with padding", padded, "tokens/s")


def _limits(ceilings: Ceilings, flops: CountedFlops, timings: Timings, settings: BenchSettings) -> Iterator[Figure]:
    """Compare both steps with the roofline of this machine, by the FLOPs of the samples alone."""
    over = ceilings.over_roofline(flops.alone, timings, "packed", settings.clock)
    yield Figure.measured(STEP, "packed step / roofline of real flops", over, "x")
    for step in ("packed", "padded"):
        share = ceilings.utilisation(flops.alone, timings, step, settings.clock)
        yield Figure.measured(STEP, f"{step}, utilisation on real flops", share, "share")


MEMORY = "memory"
LESS_MEMORY = Target(limit=0.7, better="lower")


def measure_memory(settings: BenchSettings, shapes: ReceiptShapes) -> list[Figure]:
    """Exact numbers, no rounds: see `vlmpack.machine` for what is counted."""
    pair = StepPair.of(settings, shapes)
    for step in pair.steps.values():
        step()  # what is made once and kept is not the step's
    peaks = pair.peaks(settings.device)
    ratio, family = peaks["packed"] / peaks["padded"], settings.family
    return [
        Figure(case=MEMORY, name="padded step", value=peaks["padded"], unit="bytes", family=family),
        Figure(case=MEMORY, name="packed step", value=peaks["packed"], unit="bytes", family=family),
        Figure(case=MEMORY, name="packed / padded", value=ratio, unit="x", target=LESS_MEMORY, family=family),
    ]


COMPILE = "compile"
FEW_RECOMPILES = Target(limit=3, better="lower")
NO_GRAPH_BREAKS = Target(limit=0, better="lower")
READS_VALUES = ("Data dependent", "Dynamic shape operator", "Tensor.item", "_local_scalar_dense")
"""Words of PyTorch's reasons for a graph break at a host–device sync."""


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
        Figure(case=COMPILE, name=name, value=value, unit=unit, family=family.model_type, target=target)
        for name, value, unit, target in (
            (f"steps of {len(graphs)} that compile again", len(again), "steps", FEW_RECOMPILES),
            ("the last of them", max(again, default=1), "step", None),
            ("graphs in the end", graphs[-1], "graphs", None),
            ("graphs that end because the host needs a value", waits, "graphs", NO_GRAPH_BREAKS),
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
