"""tree: a training step on a row whose samples share prefixes, against the same row without sharing.

P/R x G          G samples of one prompt of P tokens, including an image, each followed by R labeled tokens
speed-up         time of the packed row / time of the tree
ideal            FLOPs of the step on the packed row / FLOPs of the step on the tree, counted
share of ideal   speed-up / ideal
in pieces        a group larger than a row, by `PackedStep.group`, and under one loss (`StepConfig.capacity`), against a
                 row of each sample
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch

from benchmarks.cases.step import check_same_loss
from benchmarks.flops import count_flops
from benchmarks.measuring import BenchSettings, Figure, Skipped, Target, alternate
from benchmarks.receipts import ReceiptShapes, image_grid, receipt_model
from vlmpack.families import Family, family_named
from vlmpack.layout import PackedRow, pack, share
from vlmpack.layout.batch import IGNORE
from vlmpack.model import PackedStep, StepConfig, enable_packing
from vlmpack.testing import Sample, build_sample, joined, padded

CASE = "tree"


@final
@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Sizes of the samples of one prompt."""

    prefix: int
    """P: tokens of the prompt, including its image."""
    branch: int
    """R: tokens of each sample after the prompt."""
    samples: int
    """G: number of samples."""
    image_tokens: int = 128
    """Tokens of the image, in a model that takes images."""

    def __str__(self) -> str:
        return f"{self.prefix}/{self.branch} x {self.samples}"


@final
@dataclass(frozen=True, kw_only=True)
class TreeShapes:
    """Sizes of the model and of the rows."""

    receipts: ReceiptShapes = field(default_factory=ReceiptShapes)
    """Sizes of the model."""
    rollouts: tuple[Rollouts, ...] = tuple(
        Rollouts(prefix=prefix, branch=branch, samples=samples)
        for prefix, branch in ((192, 192), (192, 48), (240, 24))
        for samples in (4, 8, 16)
    )
    """Rows to time; in families with gated delta layers, only the last three."""
    groups: tuple[Rollouts, ...] = (
        Rollouts(prefix=256, branch=32, samples=64),
        Rollouts(prefix=256, branch=8, samples=64),
    )
    """Groups to time in pieces of as many tokens as the prefix has."""


@final
class TreePair:
    """Forward and backward of the same samples, in a row of complete samples and with shared prefixes computed once."""

    def __init__(self, step: PackedStep, row: PackedRow, device: str) -> None:
        self.step, self.device = step, device
        self.rows = {"packed": row.to(device), "tree": share(row).to(device)}
        self.steps: dict[str, Callable[[], torch.Tensor]] = {
            name: lambda row=row: self._run(row) for name, row in self.rows.items()
        }

    def _run(self, row: PackedRow) -> torch.Tensor:
        self.step.model.zero_grad()
        loss = self.step(row).loss
        loss.backward()
        return loss.detach()


def row_of(family: Family, config: Any, groups: Sequence[Rollouts], *, seed: int) -> PackedRow:
    """Pack groups of samples into a row on the host; every sample of a group has its own copy of the image's pixels."""
    samples = [one for at, group in enumerate(groups) for one in _samples(family, config, group, 1000 * at + seed)]
    return pack(padded(samples))


def _samples(family: Family, config: Any, rollouts: Rollouts, seed: int) -> Iterator[Sample]:
    """Yield the samples of one prompt; the prompt is not labeled."""
    grids = [image_grid(rollouts.image_tokens, family.merge(config))] if family.has_vision else []
    image = len(build_sample(config, stretches=[0] * (len(grids) + 1), image_grids=grids)["input_ids"])
    stretches = [1, rollouts.prefix - image - 1] if grids else [rollouts.prefix]
    prompt = build_sample(config, stretches=stretches, image_grids=grids, seed=seed)
    prompt["labels"] = torch.full_like(prompt["labels"], IGNORE)
    for branch in range(rollouts.samples):
        own = build_sample(config, stretches=[rollouts.branch], labeled=rollouts.branch, seed=seed + 1 + branch)
        yield joined([prompt, own])


def measure_tree(settings: BenchSettings, shapes: TreeShapes) -> Iterator[Figure | Skipped]:
    """Measure rows with a tree against rows without one; the first row always, others while there is time."""
    family, ends = family_named(settings.family), time.perf_counter() + settings.seconds
    step = PackedStep(receipt_model(family, shapes.receipts, seed=settings.seed, device=settings.device))
    chosen = shapes.rollouts[-3:] if family.has("gated_delta") else shapes.rollouts
    turns = [*((_rollouts, each) for each in chosen), *((_in_pieces, each) for each in shapes.groups)]
    for at, (measure, sizes) in enumerate(turns):
        left = ends - time.perf_counter()
        if at and left < 0:
            why = "the time was used up before its turn; give a larger --budget"
            yield Skipped(case=CASE, name=f"{settings.family}, {sizes}", why=why, owed=True)
            continue
        one = replace(settings, seconds=max(left, 0) / (len(turns) - at))
        for figure in measure(step, family, sizes, one):
            yield replace(figure, family=settings.family)


def _rollouts(step: PackedStep, family: Family, rollouts: Rollouts, settings: BenchSettings) -> Iterator[Figure]:
    row = row_of(family, step.model.config, [rollouts], seed=settings.seed)
    pair, of, is_delta = TreePair(step, row, settings.device), ("packed", "tree"), family.has("gated_delta")
    losses: dict[str, torch.Tensor] = {}
    flops = {name: count_flops(lambda n=name, s=one: losses.update({n: s()})) for name, one in pair.steps.items()}
    check_same_loss(losses)
    ideal = flops["packed"] / flops["tree"]
    timings = alternate(pair.steps, seconds=settings.seconds, device=settings.device)
    yield Figure.timed(CASE, f"{rollouts}: packed row", timings, "packed", settings)
    yield Figure.timed(CASE, f"{rollouts}: tree", timings, "tree", settings)
    yield Figure.compared(CASE, f"{rollouts}: speed-up", timings, of, settings)
    yield Figure(case=CASE, name=f"{rollouts}: ideal", value=ideal, unit="x")
    target = Target(limit=0.8 if is_delta else 0.9, better="higher")  # a recurrence runs one tree level after the other
    name = f"{rollouts}: share of ideal"
    yield Figure.compared(CASE, name, timings, of, settings, scale=1 / ideal, target=target)


def _in_pieces(step: PackedStep, family: Family, group: Rollouts, settings: BenchSettings) -> Iterator[Figure]:
    model, capacity = step.model, group.prefix
    rows = [pack(padded([one])) for one in _samples(family, model.config, group, settings.seed)]
    row, items = share(row_of(family, model.config, [group], seed=settings.seed)), group.samples * group.branch

    def packed() -> torch.Tensor:
        losses = []
        for each in rows:
            loss = step(each, num_items_in_batch=items).loss
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def one_loss() -> torch.Tensor:
        pieces = PackedStep(model, StepConfig(capacity=capacity))
        try:
            loss = pieces(row).loss
            loss.backward()
        finally:
            enable_packing(model)
        return loss.detach()

    steps = {"packed": packed, "group": lambda: step.group(row, capacity=capacity).backward().loss, "loss": one_loss}
    losses: dict[str, torch.Tensor] = {}
    flops = {name: count_flops(lambda n=name, s=one: losses.update({n: s()})) for name, one in steps.items()}
    flops["tree"] = count_flops(lambda: step(row).loss.backward())
    check_same_loss(losses)
    timings, ideal = alternate(steps, seconds=settings.seconds, device=settings.device), flops["packed"] / flops["tree"]
    target, of = Target(limit=0.9, better="higher"), ("packed", "group")
    name = f"{group} in pieces of {capacity}"
    yield Figure(case=CASE, name=f"{name}: ideal", value=ideal, unit="x")
    yield Figure(
        case=CASE, name=f"{name}: FLOPs / tree", value=flops["group"] / flops["tree"], unit="x",
        target=Target(limit=1.01, better="lower"),
    )  # fmt: skip
    yield Figure.compared(CASE, f"{name}: share of ideal", timings, of, settings, scale=1 / ideal, target=target)
    yield Figure.compared(CASE, f"{name}: speed-up under one loss", timings, ("packed", "loss"), settings)
