"""gpu tree: rows whose samples share prefixes, as attention computes them and as whole steps.

attention is timed on one group of samples, forward and backward, in three ways:

    packed     every sample whole in one row
    gathered   each node's queries attend to the gathered keys of its path, which the backward pass gathers again
    gathering  of the keys and values alone, there and back

Gradients of the prefix's keys and values are sums over all branches. Their error in low precision is compared with
that of the packed row, whose samples' gradients are added up in float32 afterwards; and so is the error of sums in low
precision, which the step does not make.

step compares a step of each model on the tree with one on the packed row, and counts host-device syncs of vlmpack's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.cases.tree import Rollouts, TreePair, row_flops
from benchmarks.figures import Figure, Target
from benchmarks.gpu.models import PACKED
from benchmarks.gpu.run import Cell, Lab
from benchmarks.gpu.shapes import GpuShapes, ModelShape
from benchmarks.gpu.steps import NO_SYNCS, guess, is_ours
from benchmarks.timing import alternate
from vlmpack.attention.backends import AttentionCall, choose
from vlmpack.layout import PackedRow, PrefixTree, Segments
from vlmpack.model.row import attend_along_paths

TREE = "gpu tree"
ATTENTION_SECONDS = 6.0
CALLS = 12.0
"""Of one step, of both rows together."""
SUMMED_RIGHT = Target(limit=2.0, better="lower")
SHARE = Target(limit=0.9, better="higher")
Qkv = list[torch.Tensor]


def tree_cells(shapes: GpuShapes) -> list[Cell]:
    """One for each group of samples, and one for each model."""
    attention = [
        Cell(
            case=TREE,
            name=f"attention, {rollouts}",
            guess=ATTENTION_SECONDS + shapes.cell_seconds,
            run=lambda lab, rollouts=rollouts: _attention(lab, rollouts),
        )
        for rollouts in shapes.trees
    ]
    return [*attention, *(_step_cell(shapes, shape) for shape in shapes.models)]


# ---------------------------------------------------------------------- attention


def _attention(lab: Lab, rollouts: Rollouts) -> Iterator[Figure]:
    tree, heads = tree_of(rollouts), lab.shapes.heads[0]
    device, dtype = lab.device.name, lab.device.dtype
    rng = torch.Generator().manual_seed(lab.settings.seed)
    qkv = [
        torch.randn(tree.num_tokens, n, heads.dim, generator=rng).to(device, dtype)
        for n in (heads.heads, heads.kv_heads, heads.kv_heads)
    ]
    ways: dict[str, Callable[[], object]] = {
        "packed": lambda: _along_samples(tree, qkv),
        "gathered": lambda: _along_paths(tree, qkv),
        "gathering": lambda: _gathered_alone(tree, qkv),
    }
    timings = alternate(ways, seconds=lab.settings.seconds, device=device)
    where = f"attention, {rollouts}"
    for name in ways:
        yield Figure.timed(TREE, f"{where}, {name}", timings, name, lab.settings)
    yield Figure.compared(TREE, f"{where}, packed / gathered", timings, ("packed", "gathered"), lab.settings)
    yield Figure.compared(TREE, f"{where}, gathering / gathered", timings, ("gathering", "gathered"), lab.settings)
    pairs = sum(n * (n + 1) // 2 for n in tree.segments.lengths) / tree.attended_pairs
    yield Figure(case=TREE, name=f"{where}, pairs, packed / gathered", value=pairs, unit="x")
    truth = _along_samples(tree, [x.float() for x in qkv])
    alone = _error(_along_samples(tree, qkv), truth, rollouts)
    for name, run, target in (("float32", _along_paths, SUMMED_RIGHT), ("low precision", _summed_low, None)):
        error = _error(run(tree, qkv), truth, rollouts) / alone
        name = f"{where}, error of the prefix's gradients summed in {name} / packed"
        yield Figure(case=TREE, name=name, value=error, unit="x", target=target)


def tree_of(rollouts: Rollouts) -> PrefixTree:
    """One prefix with its branches."""
    samples = range(rollouts.samples)
    return PrefixTree(
        segments=Segments.from_lengths([rollouts.prefix + rollouts.branch for _ in samples]),
        parents=(-1, *(0 for _ in samples)),
        lengths=(rollouts.prefix, *(rollouts.branch for _ in samples)),
        leaves=tuple(1 + at for at in samples),
    )


def _backend(qkv: Qkv) -> Callable[..., torch.Tensor]:
    attend, scale = choose(AttentionCall.of(qkv[0], qkv[1])), qkv[0].shape[-1] ** -0.5
    return lambda q, k, v, segments, **keys: attend(q, k, v, segments, causal=True, scale=scale, **keys)


def _leaves(qkv: Qkv) -> Qkv:
    return [x.detach().requires_grad_() for x in qkv]


def _gradients(out: torch.Tensor, qkv: Qkv) -> Qkv:
    """Of keys and values; each entry of the output counts as much wherever it is computed."""
    return list(torch.autograd.grad(out, qkv[1:], torch.cos(out.detach())))


def _along_samples(tree: PrefixTree, qkv: Qkv) -> Qkv:
    """Gradients of the packed row, added up in float32."""
    place = tree.place(qkv[0].device)
    row = _leaves([x.index_select(0, place) for x in qkv])
    gradients = _gradients(_backend(row)(*row, tree.segments), row)
    return [
        torch.zeros(tree.num_tokens, *x.shape[1:], device=x.device).index_add(0, place, x.float()) for x in gradients
    ]


def _along_paths(tree: PrefixTree, qkv: Qkv) -> Qkv:
    """Gradients of the tree, in float32: of a shared query, as often as it is shared."""
    leaves = _leaves(qkv)
    q, k, v = leaves
    out = attend_along_paths(_backend(leaves), q, k, v, tree)
    return [x.float() for x in _gradients(_for_each_sample(tree, out), leaves)]


def _summed_low(tree: PrefixTree, qkv: Qkv) -> Qkv:
    """The same, where PyTorch's own gathering adds up in the element type."""
    leaves, index = _leaves(qkv), tree.key_index(qkv[0].device)
    keys = [x.index_select(0, index) for x in leaves[1:]]
    out = _backend(leaves)(leaves[0], *keys, tree.nodes, keys=tree.keys)
    return [x.float() for x in _gradients(_for_each_sample(tree, out), leaves)]


def _for_each_sample(tree: PrefixTree, out: torch.Tensor) -> torch.Tensor:
    return out.index_select(0, tree.place(out.device))


def _gathered_alone(tree: PrefixTree, qkv: Qkv) -> Qkv:
    """Keys and values along all paths, and their gradients: attention that copies, in one line."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return k + v

    q, k, v = _leaves(qkv)
    out = attend_along_paths(attend, q, k, v, tree)
    return list(torch.autograd.grad(out, (k, v), torch.ones_like(out)))


def _error(gradients: Qkv, truth: Qkv, rollouts: Rollouts) -> float:
    """Root mean square over the prefix's keys and values, as a part of the truth's."""
    pairs = [(x[: rollouts.prefix], y[: rollouts.prefix]) for x, y in zip(gradients, truth, strict=True)]
    return max(float((x - y).square().mean().sqrt() / y.square().mean().sqrt()) for x, y in pairs) + 1e-12


# ---------------------------------------------------------------------- whole steps


def _step_cell(shapes: GpuShapes, shape: ModelShape) -> Cell:
    tokens = shapes.rollouts.samples * (shapes.rollouts.prefix + shapes.rollouts.branch)
    samples = -(-tokens // shapes.width)
    return Cell(
        case=TREE,
        name=f"step, {shape.family}",
        guess=guess(shapes, shape, samples, calls=CALLS),
        pace=shape.family,
        run=lambda lab: _step(lab, shape),
    )


def _step(lab: Lab, shape: ModelShape) -> Iterator[Figure]:
    bodies, rollouts = lab.models.get(shape), lab.shapes.rollouts
    step, family = bodies.steps[PACKED], bodies.family
    pair = TreePair.of(step, family, rollouts, seed=lab.settings.seed, device=lab.device.name)
    pair = replace(pair, packed_row=_cast(pair.packed_row, lab), tree_row=_cast(pair.tree_row, lab))
    try:
        for way in pair.steps.values():
            way()
        timings = alternate(pair.steps, seconds=lab.settings.seconds, device=lab.device.name)
        ours = [place for place in lab.device.syncs(pair.steps["tree"]) if is_ours(place)]
    finally:
        step.model.zero_grad(set_to_none=True)
    config, of, where = step.model.config, ("packed", "tree"), f"step, {rollouts}"
    ideal = row_flops(family, config, pair.packed_row) / row_flops(family, config, pair.tree_row)
    figures = [
        Figure.timed(TREE, f"{where}, packed row", timings, "packed", lab.settings),
        Figure.timed(TREE, f"{where}, tree", timings, "tree", lab.settings),
        Figure.compared(TREE, f"{where}, speed-up", timings, of, lab.settings),
        Figure(case=TREE, name=f"{where}, ideal", value=ideal, unit="x"),
        Figure.compared(TREE, f"{where}, share of ideal", timings, of, lab.settings, scale=1 / ideal, target=SHARE),
        Figure(case=TREE, name=f"{where}, syncs of vlmpack's", value=len(ours), unit="times", target=NO_SYNCS),
    ]
    yield from (replace(figure, family=shape.family) for figure in figures)


def _cast(row: PackedRow, lab: Lab) -> PackedRow:
    pixels = row.media.pixel_values
    return row if pixels is None else replace(row, media=replace(row.media, pixel_values=pixels.to(lab.device.dtype)))
