"""gpu ceilings: matrix products at the models' shapes, and a copy: what nothing on this machine is faster than.

And the patch embedding of Qwen's vision towers, as the product that it is (`patches.py`) and as models' convolution.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from vlmpack.bench.figure import Figure, Skipped
from vlmpack.bench.gpu.run import Cell, Lab
from vlmpack.bench.gpu.shapes import GpuShapes
from vlmpack.bench.timing import alternate

CASE = "gpu ceilings"
GUESS = 3.0
PATCHES = "patch embedding"
TEMPORAL = 2
"""Frames of a patch."""
PIXEL_SIDE = 16
"""Of a patch, where the model has no size of its own."""


def cells(shapes: GpuShapes) -> list[Cell]:
    """One for the copy, one for each product."""
    return [
        Cell(case=CASE, name="copy", guess=GUESS, run=_copy),
        *(
            Cell(case=CASE, name=name, guess=GUESS, run=lambda lab, name=name, sizes=sizes: _product(lab, name, *sizes))
            for name, sizes in products(shapes).items()
        ),
        Cell(case=CASE, name=PATCHES, guess=GUESS, run=_patch_embedding),
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
    yield Figure.measured(CASE, f"{name}, {m} x {k} x {n}", rate, "TFLOP/s")


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
        yield Skipped(case=CASE, name=f"{name}, convolution", why=f"refused: {error}")
        del ways["convolution"]
    timings = alternate(ways, seconds=lab.settings.seconds / 4, device=device)
    yield Figure.timed(CASE, f"{name}, product", timings, "product", lab.settings)
    if "convolution" in ways:
        yield Figure.compared(CASE, f"{name}, convolution / product", timings, ("convolution", "product"), lab.settings)


def _copy(lab: Lab) -> Iterator[Figure]:
    source = torch.randint(255, (lab.shapes.copied // 2,), dtype=torch.uint8, device=lab.device.name)
    target = torch.empty_like(source)
    timings = alternate(
        {"copy": lambda: target.copy_(source)}, seconds=lab.settings.seconds / 4, device=lab.device.name
    )
    rate = timings.of("copy", lab.settings.clock).rate(2e-12 * source.nbytes)
    yield Figure.measured(CASE, "copy, bytes read and written", rate, "TB/s")
