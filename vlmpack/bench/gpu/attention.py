"""gpu attention: the layers of Qwen-VL models on a row, against padded batches and dense masks.

packed          every back-end that can serve here
padded          a padded batch under the mask that Hugging Face makes of the 2D mask
padded, causal  a padded batch without a mask: right-padded text needs none
dense mask      the row under a block-diagonal mask
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from vlmpack.attention import AttentionCall, explain
from vlmpack.bench.cases.attention import (
    ORACLE,
    AttentionInputs,
    Site,
    check_same,
    dense_way,
    packed_way,
    padded_way,
)
from vlmpack.bench.figure import Figure, Skipped
from vlmpack.bench.formula import BACKWARD_OF_ATTENTION
from vlmpack.bench.gpu.device import if_it_fits
from vlmpack.bench.gpu.run import Cell, Found, Lab
from vlmpack.bench.gpu.shapes import GpuShapes
from vlmpack.bench.timing import alternate

CASE = "gpu attention"
TRUTH = "sdpa_segments"
"""The back-end that others are compared with: the dense oracle's scores would not fit."""
NO_MASK = "padded, causal"
GUESS = 7.0
"""cuDNN plans each of three new shapes for up to a second."""
Way = Callable[[], torch.Tensor]


def cells(shapes: GpuShapes) -> list[Cell]:
    """One for each layer."""
    guess = GUESS + shapes.cell_seconds
    return [
        Cell(case=CASE, name=site.name, guess=guess, run=lambda lab, site=site: _site(lab, site))
        for site in shapes.sites
    ]


def _site(lab: Lab, site: Site) -> Found:
    work = AttentionInputs.of(site, lab.settings, lab.device.dtype)
    reasons = explain(AttentionCall.of(work.q_TNH, work.k_TKH))
    packed = [name for name, why in reasons.items() if not why and name != ORACLE]
    wanted: dict[str, Callable[[], Way]] = {name: lambda name=name: packed_way(work, name) for name in packed}
    wanted |= {"padded": lambda: padded_way(work), "dense mask": lambda: dense_way(work)}
    if site.causal:
        wanted[NO_MASK] = lambda: padded_way(work, without_mask=True)
    for name, why in reasons.items():
        if why:
            yield Skipped(case=CASE, name=f"{site.name}, {name}", why=f"refused: {'; '.join(why)}")
    ways: dict[str, Way] = {}
    results: dict[str, torch.Tensor] = {}
    for name, make in wanted.items():
        way = if_it_fits(make, lab.device)
        result = None if way is None else if_it_fits(way, lab.device)
        if way is None or result is None:
            yield Skipped(case=CASE, name=f"{site.name}, {name}", why="it does not fit into memory")
        else:
            ways[name], results[name] = way, result
    check_same(results, oracle=TRUTH)
    results.clear()
    yield from _figures(lab, work, ways, packed)


def _figures(lab: Lab, work: AttentionInputs, ways: dict[str, Way], packed: list[str]) -> Iterator[Figure]:
    timings, site = alternate(ways, seconds=lab.settings.seconds, device=lab.device.name), work.site.name
    tera = 1e-12 * needed_flops(work.site)
    yield Figure(case=CASE, name=f"{site}, ideal: padded / needed pairs", value=work.ideal, unit="x")
    for name in ways:
        yield Figure.timed(CASE, f"{site}, {name}", timings, name, lab.settings)
        rate = timings.of(name, lab.settings.clock).rate(tera)
        yield Figure.measured(CASE, f"{site}, {name}, needed work", rate, "TFLOP/s")
    for name in packed:
        for other in [way for way in ways if way not in packed]:
            yield Figure.compared(CASE, f"{site}, {other} / {name}", timings, (other, name), lab.settings)


def needed_flops(site: Site) -> float:
    """Forward and backward over the pairs that are needed and no others."""
    pairs = sum(n * (n + 1) // 2 if site.causal else n * n for n in site.lengths)
    return 4 * (1 + BACKWARD_OF_ATTENTION) * site.heads * site.head_dim * pairs
