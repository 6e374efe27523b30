"""The patch embedding of Qwen's vision towers as the matrix product that it is.

Its convolution's windows do not overlap, and each patch is one window. Versions of cuDNN take seconds for it in
bfloat16, or have no kernel at all: every way of a step would pay for it alike, and nothing could be compared.
"""

from __future__ import annotations

from typing import TypeVar, final

import torch
import torch.nn.functional as F
from torch import nn

Model = TypeVar("Model", bound=nn.Module)


@final
class PatchProduct(nn.Conv3d):
    """A convolution, with its weights, of patches that are as large as its window."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[P, C, T, H, W] to [P, D, 1, 1, 1]."""
        return F.linear(input.flatten(1), self.weight.flatten(1), self.bias)[:, :, None, None, None]


def with_patch_products(model: Model) -> Model:
    """The model, its patch embedding computed as a product; parameters and FLOPs stay as they are."""
    for module in model.modules():
        if type(module) is nn.Conv3d and module.kernel_size == module.stride:
            module.__class__ = PatchProduct
    return model
