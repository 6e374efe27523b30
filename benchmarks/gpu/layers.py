"""gpu ceilings, gpu attention and gpu head: layers by themselves.

ceilings are matrix products at the models' shapes and a copy, which bound all else; and the patch embedding of Qwen's
vision towers, as the product that it is (`PatchProduct`) and as the models' convolution.

attention runs the attention layers of Qwen-VL models on a row, against padded batches and dense masks:

    packed          every back-end that can serve here
    padded          a padded batch under the mask that Hugging Face makes of the 2D mask
    padded, causal  a padded batch without a mask: right-padded text needs none
    dense mask      the row under a block-diagonal mask

head computes logits and cross-entropy of labelled rows only, against those of all rows, at the first model's sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.cases.attention import ORACLE, AttentionInputs, Site, check_same, dense_way, packed_way, padded_way
from benchmarks.cases.head import SHARES, HeadInputs, all_rows, labelled_rows, measure_chunks
from benchmarks.figures import Figure, Skipped
from benchmarks.flops import BACKWARD_OF_ATTENTION
from benchmarks.gpu.device import if_it_fits
from benchmarks.gpu.run import Cell, Entries, Lab
from benchmarks.gpu.shapes import GpuShapes
from benchmarks.timing import alternate
from vlmpack.attention.backends import AttentionCall, explain
from vlmpack.machine import peak_bytes
from vlmpack.model import StepConfig

CEILINGS = "gpu ceilings"
CEILING_SECONDS = 3.0
PATCHES = "patch embedding"
TEMPORAL = 2
"""Frames of a patch."""
PIXEL_SIDE = 16
"""Of a patch, where the model has no size of its own."""


def skip_limit_cells(shapes: GpuShapes) -> list[Cell]:
    """One for the copy, one for each product."""
    return [
        Cell(case=CEILINGS, name="copy", guess=CEILING_SECONDS, run=_copy),
        *(
            Cell(
                case=CEILINGS,
                name=name,
                guess=CEILING_SECONDS,
                run=lambda lab, name=name, sizes=sizes: _product(lab, name, *sizes),
            )
            for name, sizes in products(shapes).items()
        ),
        Cell(case=CEILINGS, name=PATCHES, guess=CEILING_SECONDS, run=_patch_embedding),
    ]


def products(shapes: GpuShapes) -> dict[str, tuple[int, int, int]]:
    """[M, K] times [K, N] by name: a square one, and the widest of the first model's blocks and its head."""
    side, sizes = shapes.square, shapes.models[0].sizes
    text, vision = sizes["hidden"], sizes["vision_hidden"]
    head = sizes.get("vocab_size", shapes.receipts.vocab_size)
    return {
        "product, square": (side, side, side),
        "product, text MLP": (shapes.tokens, text, sizes.get("intermediate", 2 * text)),
        "product, text attention": (shapes.tokens, text, text),
        "product, vision MLP": (shapes.tokens, vision, 4 * vision),
        "product, head": (shapes.tokens // 4, text, head),
    }


def _product(lab: Lab, name: str, m: int, k: int, n: int) -> Iterator[Figure]:
    device, dtype = lab.device.name, lab.device.dtype
    left, right = torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)
    out = torch.empty(m, n, device=device, dtype=dtype)
    timings = alternate(
        {"product": lambda: torch.mm(left, right, out=out)}, seconds=lab.settings.seconds / 4, device=device
    )
    rate = timings.of("product", lab.settings.clock).rate(2e-12 * m * k * n)
    yield Figure.measured(CEILINGS, f"{name}, {m} x {k} x {n}", rate, "TFLOP/s")


def _patch_embedding(lab: Lab) -> Iterator[Figure | Skipped]:
    """Forward and backward to the weight, of the product that it amounts to and of models' own convolution."""
    device, dtype, sizes = lab.device.name, lab.device.dtype, lab.shapes.models[0].sizes
    window = (TEMPORAL, *[sizes.get("patch_size", PIXEL_SIDE)] * 2)
    convolution = nn.Conv3d(3, sizes["vision_hidden"], window, stride=window, bias=False, device=device, dtype=dtype)
    pixels = torch.randn(lab.shapes.tokens, 3, *window, device=device, dtype=dtype)
    weight = convolution.weight

    def gradient(out: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(out.sum(), weight)[0]

    ways = {
        "product": lambda: gradient(F.linear(pixels.flatten(1), weight.flatten(1))),
        "convolution": lambda: gradient(convolution(pixels)),
    }
    name = f"{PATCHES}, {len(pixels)} patches"
    try:
        ways["convolution"]()
    except RuntimeError as error:
        yield Skipped(case=CEILINGS, name=f"{name}, convolution", why=f"refused: {error}")
        del ways["convolution"]
    timings = alternate(ways, seconds=lab.settings.seconds / 4, device=device)
    yield Figure.timed(CEILINGS, f"{name}, product", timings, "product", lab.settings)
    if "convolution" in ways:
        yield Figure.compared(
            CEILINGS, f"{name}, convolution / product", timings, ("convolution", "product"), lab.settings
        )


def _copy(lab: Lab) -> Iterator[Figure]:
    source = torch.randint(255, (lab.shapes.copied // 2,), dtype=torch.uint8, device=lab.device.name)
    target = torch.empty_like(source)
    timings = alternate(
        {"copy": lambda: target.copy_(source)}, seconds=lab.settings.seconds / 4, device=lab.device.name
    )
    rate = timings.of("copy", lab.settings.clock).rate(2e-12 * source.nbytes)
    yield Figure.measured(CEILINGS, "copy, bytes read and written", rate, "TB/s")


ATTENTION = "gpu attention"
TRUTH = "sdpa_segments"
"""The back-end that others are compared with: the dense oracle's scores would not fit."""
NO_MASK = "padded, causal"
ATTENTION_SECONDS = 7.0
"""cuDNN plans each of three new shapes for up to a second."""
Way = Callable[[], torch.Tensor]


def attention_cells(shapes: GpuShapes) -> list[Cell]:
    """One for each layer."""
    guess = ATTENTION_SECONDS + shapes.cell_seconds
    return [
        Cell(case=ATTENTION, name=site.name, guess=guess, run=lambda lab, site=site: _site(lab, site))
        for site in shapes.sites
    ]


def _site(lab: Lab, site: Site) -> Entries:
    work = AttentionInputs.of(site, lab.settings, lab.device.dtype)
    reasons = explain(AttentionCall.of(work.q_TNH, work.k_TKH))
    packed = [name for name, why in reasons.items() if not why and name != ORACLE]
    wanted: dict[str, Callable[[], Way]] = {name: lambda name=name: packed_way(work, name) for name in packed}
    wanted |= {"padded": lambda: padded_way(work), "dense mask": lambda: dense_way(work)}
    if site.causal:
        wanted[NO_MASK] = lambda: padded_way(work, without_mask=True)
    for name, why in reasons.items():
        if why:
            yield Skipped(case=ATTENTION, name=f"{site.name}, {name}", why=f"refused: {'; '.join(why)}")
    ways: dict[str, Way] = {}
    results: dict[str, torch.Tensor] = {}
    for name, make in wanted.items():
        way = if_it_fits(make, lab.device)
        result = None if way is None else if_it_fits(way, lab.device)
        if way is None or result is None:
            yield Skipped(case=ATTENTION, name=f"{site.name}, {name}", why="it does not fit into memory")
        else:
            ways[name], results[name] = way, result
    check_same(results, oracle=TRUTH)
    results.clear()
    yield from _figures(lab, work, ways, packed)


def _figures(lab: Lab, work: AttentionInputs, ways: dict[str, Way], packed: list[str]) -> Iterator[Figure]:
    timings, site = alternate(ways, seconds=lab.settings.seconds, device=lab.device.name), work.site.name
    tera = 1e-12 * needed_flops(work.site)
    yield Figure(case=ATTENTION, name=f"{site}, ideal: padded / needed pairs", value=work.ideal, unit="x")
    for name in ways:
        yield Figure.timed(ATTENTION, f"{site}, {name}", timings, name, lab.settings)
        rate = timings.of(name, lab.settings.clock).rate(tera)
        yield Figure.measured(ATTENTION, f"{site}, {name}, needed work", rate, "TFLOP/s")
    for name in packed:
        for other in [way for way in ways if way not in packed]:
            yield Figure.compared(ATTENTION, f"{site}, {other} / {name}", timings, (other, name), lab.settings)


def needed_flops(site: Site) -> float:
    """Forward and backward over the pairs that are needed and no others."""
    pairs = sum(n * (n + 1) // 2 if site.causal else n * n for n in site.lengths)
    return 4 * (1 + BACKWARD_OF_ATTENTION) * site.heads * site.head_dim * pairs


HEAD = "gpu head"
HEAD_SECONDS = 4.0


def head_cells(shapes: GpuShapes) -> list[Cell]:
    """One for each share of labelled rows."""
    guess = HEAD_SECONDS + shapes.cell_seconds / len(SHARES)
    labelled = [
        Cell(
            case=HEAD, name=f"{share:.0%} labelled", guess=guess, run=lambda lab, share=share: _measure_head(lab, share)
        )
        for share in SHARES
    ]
    return [*labelled, Cell(case=HEAD, name="chunks", guess=guess, run=_chunks)]


def _measure_head(lab: Lab, share: float) -> Entries:
    inputs = _head_inputs(lab)
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
        peak = if_it_fits(lambda function=function: _peak_of_head(function, held, lab), lab.device)
        if peak is None:
            yield Skipped(case=HEAD, name=f"{name}, {way}", why="it does not fit into memory")
            return
        peaks[way] = peak
        yield Figure(case=HEAD, name=f"{name}, {way}, peak memory", value=peak, unit="bytes")
    seconds = lab.settings.seconds / len(SHARES)
    timings = alternate(ways, seconds=seconds, device=lab.device.name)
    yield from (Figure.timed(HEAD, f"{name}, {way}", timings, way, lab.settings) for way in ways)
    yield Figure.compared(HEAD, f"{name}, labelled / all rows", timings, ("labelled rows", "all rows"), lab.settings)
    ratio = peaks["labelled rows"] / peaks["all rows"]
    yield Figure(case=HEAD, name=f"{name}, labelled / all rows, peak memory", value=ratio, unit="x")


def _chunks(lab: Lab) -> Entries:
    lab.device.release()
    inputs = _head_inputs(lab)
    chunks = if_it_fits(lambda: list(measure_chunks(inputs, lab.settings, case=HEAD)), lab.device)
    if chunks is None:
        yield Skipped(case=HEAD, name="chunks", why="all rows at once do not fit into memory")
        return
    yield from chunks


def _peak_of_head(function: Callable[[], object], held: list[torch.Tensor], lab: Lab) -> int:
    function()
    return peak_bytes(function, held=held, device=lab.device.name)


def _head_inputs(lab: Lab) -> HeadInputs:
    """Random hidden states of a row, made on the device."""
    sizes, tokens = lab.shapes.models[0].sizes, lab.shapes.tokens
    hidden, vocabulary = sizes["hidden"], sizes.get("vocab_size", lab.shapes.receipts.vocab_size)
    where = {"device": lab.device.name, "dtype": lab.device.dtype}
    return HeadInputs(
        hidden=torch.randn(tokens, hidden, **where).requires_grad_(),
        targets=torch.randint(vocabulary, (tokens,), device=lab.device.name),
        head=nn.Linear(hidden, vocabulary, bias=False, **where),
    )
