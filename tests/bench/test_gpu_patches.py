"""Patch embeddings as products: the same numbers, and a library without a kernel for the convolution costs one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from vlmpack.bench import BenchSettings, Figure
from vlmpack.bench.gpu import ceilings
from vlmpack.bench.gpu.device import Cpu
from vlmpack.bench.gpu.models import Models, random_model
from vlmpack.bench.gpu.patches import PatchProduct, with_patch_products
from vlmpack.bench.gpu.run import Lab
from vlmpack.bench.gpu.shapes import TINY


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_the_convolution_with_its_gradients(bias: bool) -> None:
    torch.manual_seed(0)
    convolution = nn.Conv3d(3, 7, (2, 5, 4), stride=(2, 5, 4), bias=bias, dtype=torch.float64)
    patches = torch.randn(11, 3, 2, 5, 4, dtype=torch.float64)

    def seen() -> list[torch.Tensor]:
        out = convolution(patches)
        return [out, *torch.autograd.grad(out.square().sum(), list(convolution.parameters()))]

    before = seen()
    assert with_patch_products(convolution) is convolution
    assert type(convolution) is PatchProduct
    torch.testing.assert_close(seen(), before)


def test_windows_that_overlap_stay_convolutions() -> None:
    assert type(with_patch_products(nn.Conv3d(3, 7, 4, stride=2))) is nn.Conv3d


@pytest.mark.parametrize("shape", TINY.models, ids=lambda shape: shape.family)
def test_no_model_of_the_suite_has_a_convolution_over_patches(shape: Any) -> None:
    kinds = {type(module) for module in random_model(shape, Cpu(), seed=0).modules()}
    assert PatchProduct in kinds
    assert nn.Conv3d not in kinds


def test_without_a_kernel_for_the_convolution_the_product_is_measured_and_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_engine(*_: Any) -> torch.Tensor:
        raise RuntimeError("GET was unable to find an engine to execute this computation")

    monkeypatch.setattr(nn.Conv3d, "forward", no_engine)
    device = Cpu()
    lab = Lab(device=device, shapes=TINY, settings=BenchSettings(seconds=0.0), models=Models(device, seed=0))
    (cell,) = [cell for cell in ceilings.cells(TINY) if cell.name == ceilings.PATCHES]
    left_out, figure = cell.run(lab)
    assert isinstance(figure, Figure)
    assert figure.name.endswith("patches, product")
    assert not isinstance(left_out, Figure)
    assert left_out.why == "refused: GET was unable to find an engine to execute this computation"
