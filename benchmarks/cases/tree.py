"""tree: a training step on a row whose samples share prefixes, against the same row without sharing.

    P/R x G          G samples of one prompt of P tokens with an image, each with R tokens of its own: these are learnt
    speed-up         time of the packed row / time of the tree
    ideal            FLOPs of the packed row / FLOPs of the tree, both by formula: each node's tokens once, causal pairs
                     along the paths, the head on distinct targets, distinct images once
    share of ideal   speed-up / ideal
    memory           peak of the packed row / peak of the tree, without weights and inputs; it is held to the same
                     ideal, because activations grow with the tokens and patches that are computed

Finding the tree is timed on groups of long samples with images, and compared with the time of their step. That is the
time of a step that was measured, times the ratio of FLOPs. Where samples have nothing to share, looking for it is all
that it costs: the row goes on as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch

from benchmarks.figures import BenchSettings, Figure, Target
from benchmarks.flops import step_flops
from benchmarks.receipts import ReceiptShapes, image_grid, receipt_batch, receipt_model
from benchmarks.timing import alternate
from vlmpack.errors import VlmpackError
from vlmpack.families import Family, family_named
from vlmpack.layout import IGNORE, PackedRow, pack, share
from vlmpack.machine import peak_bytes
from vlmpack.model import PackedStep
from vlmpack.testing import Sample, build_sample, joined, padded

CASE = "tree"
SAME_LOSS = 1e-4
"""Relative difference between the losses of the two rows above which they did not compute the same."""
SPEED = Target(limit=0.9, better="higher")
SPEED_OF_DELTA = Target(limit=0.8, better="higher")
"""Of families with gated delta layers, whose recurrence runs level by level."""
MEMORY = Target(limit=0.85, better="higher")
FINDING = Target(limit=0.02, better="lower")
NOTHING_SHARED = Target(limit=0.01, better="lower")


@final
@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Samples of one prompt."""

    prefix: int
    """P: tokens of the prompt, its image among them."""
    branch: int
    """R: tokens of each sample behind it."""
    samples: int
    """G."""
    image_tokens: int = 128
    """Of the image, in a model that takes any."""

    def __str__(self) -> str:
        return f"{self.prefix}/{self.branch} x {self.samples}"


@final
@dataclass(frozen=True, kw_only=True)
class TreeShapes:
    """Sizes of the model and of the rows."""

    receipts: ReceiptShapes = field(default_factory=ReceiptShapes)
    """Of the model, and of the row with nothing to share."""
    rollouts: tuple[Rollouts, ...] = tuple(
        Rollouts(prefix=prefix, branch=branch, samples=samples)
        for prefix, branch in ((192, 192), (192, 48), (240, 24))
        for samples in (4, 8, 16)
    )
    """Rows that are timed; of a family with gated delta layers the last three."""
    long: Rollouts = field(default_factory=lambda: Rollouts(prefix=1500, branch=500, samples=8, image_tokens=1000))
    """One group of the row whose tree is found."""
    groups: int = 8
    """Such groups in that row, each with an image of its own."""


@final
@dataclass(frozen=True, kw_only=True)
class TreePair:
    """Forward and backward of the same samples, each by itself in a row, and with what they share computed once."""

    step: PackedStep
    """On the model."""
    packed_row: PackedRow
    """Every sample whole."""
    tree_row: PackedRow
    """The same row with its tree."""

    @classmethod
    def of(cls, step: PackedStep, family: Family, rollouts: Rollouts, *, seed: int, device: str = "cpu") -> TreePair:
        """Two rows of one group."""
        row = row_of(family, step.model.config, [rollouts], seed=seed)
        return cls(step=step, packed_row=row.to(device), tree_row=share(row).to(device))

    @property
    def steps(self) -> dict[str, Callable[[], torch.Tensor]]:
        """Both by name; each returns its loss."""
        return {"packed": lambda: self._run(self.packed_row), "tree": lambda: self._run(self.tree_row)}

    def _run(self, row: PackedRow) -> torch.Tensor:
        self.step.model.zero_grad()
        loss = self.step(row).loss
        loss.backward()
        return loss.detach()

    def check(self) -> None:
        """Run each once. Times of steps that compute different things mean nothing.

        Raises:
            VlmpackError: the losses differ.
        """
        losses = {name: float(step()) for name, step in self.steps.items()}
        if not abs(losses["tree"] - losses["packed"]) <= SAME_LOSS * abs(losses["packed"]):
            raise VlmpackError(f"the two rows do not compute the same loss ({losses}); run `vlmpack doctor --probe`")

    def memory(self, device: str) -> float:
        """Peak of activations of the packed row over that of the tree."""
        peaks = []
        for name, row in (("packed", self.packed_row), ("tree", self.tree_row)):
            self.step.model.zero_grad()
            tensors = [x for x in row.to_hf().values() if isinstance(x, torch.Tensor)]
            held = [*self.step.model.parameters(), *tensors]
            peaks.append(peak_bytes(self.steps[name], held=held, device=device) - sum(x.nbytes for x in held))
        return peaks[0] / peaks[1]


def row_of(family: Family, config: Any, groups: Sequence[Rollouts], *, seed: int) -> PackedRow:
    """A packed row of groups of samples, on the host; the pixels of a group's image are there once a sample."""
    samples = [
        sample for at, group in enumerate(groups) for sample in samples_of(family, config, group, 1000 * at + seed)
    ]
    return pack(padded(samples))


def samples_of(family: Family, config: Any, rollouts: Rollouts, seed: int) -> Iterator[Sample]:
    """The samples of one prompt; the prompt is not learnt."""
    grids = [image_grid(rollouts.image_tokens, family.merge(config))] if family.has_vision else []
    image = sum(family.media_tokens([grid], config) + 2 for grid in grids)
    stretches = [1, rollouts.prefix - image - 1] if grids else [rollouts.prefix]
    prompt = build_sample(config, stretches=stretches, image_grids=grids, seed=seed)
    prompt["labels"] = torch.full_like(prompt["labels"], IGNORE)
    for branch in range(rollouts.samples):
        own = build_sample(config, stretches=[rollouts.branch], labelled=rollouts.branch, seed=seed + 1 + branch)
        yield joined([prompt, own])


def row_flops(family: Family, config: Any, row: PackedRow) -> int:
    """FLOPs of a step by formula: whole samples, or what a tree needs. Causal pairs, the head on targets."""
    metadata, tree = row.host_metadata(), row.tree
    assert metadata.num_targets is not None
    if tree is None:
        lengths, grids, targets = metadata.lengths, metadata.image_grids, metadata.num_targets
        return step_flops(family, config, lengths, grids, head_tokens=targets, causal=True).total
    grids = [metadata.image_grids[at] for at in tree.images]
    flops = step_flops(family, config, tree.lengths, grids, head_tokens=metadata.num_distinct_targets, causal=True)
    a_pair = step_flops(family, config, [1], causal=True).text_attention
    return flops.total - flops.text_attention + a_pair * tree.attended_pairs


def measure_tree(settings: BenchSettings, shapes: TreeShapes) -> list[Figure]:
    """Time rows with a tree against rows without, weigh them, and time how the tree is found.

    Raises:
        VlmpackError: the two rows do not compute the same loss.
    """
    family = family_named(settings.family)
    step = PackedStep(receipt_model(family, shapes.receipts, seed=settings.seed, device=settings.device))
    chosen = shapes.rollouts[-3:] if family.has("gated_delta") else shapes.rollouts
    one = replace(settings, seconds=settings.seconds / (len(chosen) + 2))
    figures = [figure for rollouts in chosen for figure in _rollouts(step, family, rollouts, one)]
    figures += [*_finding(step, family, shapes, one), _nothing_shared(step, family, shapes, one)]
    return [replace(figure, family=family.model_type) for figure in figures]


def _rollouts(step: PackedStep, family: Family, rollouts: Rollouts, settings: BenchSettings) -> Iterator[Figure]:
    pair = TreePair.of(step, family, rollouts, seed=settings.seed, device=settings.device)
    pair.check()
    config, packed, shared = step.model.config, pair.packed_row, pair.tree_row
    assert shared.tree is not None
    ideal = row_flops(family, config, packed) / row_flops(family, config, shared)
    tokens = shared.segments.total / shared.tree.num_tokens
    memory = pair.memory(settings.device)
    timings, ways = alternate(pair.steps, seconds=settings.seconds, device=settings.device), ("packed", "tree")
    target = SPEED_OF_DELTA if family.has("gated_delta") else SPEED
    yield Figure(case=CASE, name=f"{rollouts}: tokens, packed / tree", value=tokens, unit="x")
    yield Figure.timed(CASE, f"{rollouts}: packed row", timings, "packed", settings)
    yield Figure.timed(CASE, f"{rollouts}: tree", timings, "tree", settings)
    yield Figure.compared(CASE, f"{rollouts}: speed-up", timings, ways, settings)
    yield Figure(case=CASE, name=f"{rollouts}: ideal", value=ideal, unit="x")
    name = f"{rollouts}: share of ideal"
    yield Figure.compared(CASE, name, timings, ways, settings, scale=1 / ideal, target=target)
    yield Figure(case=CASE, name=f"{rollouts}: memory, packed / tree", value=memory, unit="x")
    target = None if family.has("gated_delta") else MEMORY
    yield Figure(case=CASE, name=f"{rollouts}: memory / ideal", value=memory / ideal, unit="x", target=target)


def _finding(step: PackedStep, family: Family, shapes: TreeShapes, settings: BenchSettings) -> Iterator[Figure]:
    """Time `share`, in turn with a step of fewer tokens."""
    config, few = step.model.config, shapes.rollouts[-1]
    row = row_of(family, config, [shapes.long] * shapes.groups, seed=settings.seed)
    pair = TreePair.of(step, family, few, seed=settings.seed, device=settings.device)
    larger = row_flops(family, config, share(row)) / row_flops(family, config, pair.tree_row)
    ways = {"finding": lambda: share(row), "step": pair.steps["tree"]}
    timings = alternate(ways, seconds=settings.seconds, device=settings.device)
    samples, tokens = row.segments.num_samples, row.segments.max_length
    name = f"finding the tree of {samples} samples of {tokens:,} tokens"
    yield Figure.timed(CASE, name, timings, "finding", settings)
    yield Figure.compared(
        CASE, f"{name} / their step", timings, ("finding", "step"), settings, scale=1 / larger, target=FINDING
    )


def _nothing_shared(step: PackedStep, family: Family, shapes: TreeShapes, settings: BenchSettings) -> Figure:
    """Time `share` on samples that have nothing in common, in turn with their step: it returns the row itself.

    Raises:
        VlmpackError: it returns another row.
    """
    row = pack(receipt_batch(family, step.model.config, shapes.receipts, seed=settings.seed))
    if share(row) is not row:
        raise VlmpackError("samples that have nothing in common were laid out as a tree")
    pair = TreePair(step=step, packed_row=row.to(settings.device), tree_row=row)
    ways = {"looking": lambda: share(row), "step": pair.steps["packed"]}
    timings = alternate(ways, seconds=settings.seconds, device=settings.device)
    name = "nothing to share: looking for it / the step"
    return Figure.compared(CASE, name, timings, ("looking", "step"), settings, target=NOTHING_SHARED)
