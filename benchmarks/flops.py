"""FLOPs of a step, counted as they run, and the fastest matrix product of the machine that it is held to.

A multiply-add is two FLOPs; element-wise operations count as none. PyTorch's `FlopCounterMode` is completed where it
miscounts:

- the fused attention of a CPU, by the two formulas that it has for that of CUDA: like its own they count every pair of
  query and key, whether causal or not;
- grouped products (experts) and triangular solves (gated delta layers), which it passes over;
- the backward pass of a grouped convolution (gated delta layers), which it counts as one of all channels with all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

Shape = Sequence[int]


def count_flops(function: Callable[[], object]) -> int:
    """FLOPs of all that `function` runs, forward and backward."""
    aten = torch.ops.aten
    missing = {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
        aten._grouped_mm: _grouped_product,
        aten.linalg_solve_triangular: _triangular_solve,
        aten.convolution_backward: _convolution_backward,
    }
    with FlopCounterMode(display=False, custom_mapping=missing) as counter:
        function()
    return counter.get_total_flops()


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, _of_all_heads(key, query), _of_all_heads(value, query))


def _attention_backward(gradient: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(gradient, query, _of_all_heads(key, query), _of_all_heads(value, query))


def _of_all_heads(shape: Shape, query: Shape) -> Shape:
    """The shape [B, N, S, H] of keys or values, once a query head: torch 2.11 counts no heads that share them."""
    return (shape[0], query[1], *shape[2:])


def _grouped_product(left: Shape, right: Shape, *_: Any, **__: Any) -> int:
    """Rows, columns or summands of a two-dimensional factor belong to one group each; three-dimensional ones are a
    group a matrix."""
    groups = left[0] if len(left) == len(right) == 3 else 1
    return 2 * groups * left[-2] * left[-1] * right[-1]


def _triangular_solve(system: Shape, right_sides: Shape, *_: Any, left: bool = True, **__: Any) -> int:
    """Half of what a product with the whole square would cost."""
    return prod(right_sides) * system[-1]


def _convolution_backward(
    gradient: Shape, values: Shape, weight: Shape, *rest: Any, out_shape: Sequence[Shape | None], **__: Any
) -> int:
    """Each of the gradients of values and weight costs what the forward pass does. `weight` is [out, in / groups, ...].

    The last argument lists which of the gradients of values, weight and bias are computed.
    """
    transposed, wanted = rest[4], rest[-1]
    places = values if transposed else gradient
    return 2 * places[0] * prod(places[2:]) * prod(weight) * sum(wanted[:2])


def matrix_product(model: Any, *, tokens: int, hidden: int) -> tuple[Callable[[], object], int]:
    """(a product [T, D] by [D, 3 D] in the model's type on its device, its FLOPs): as fast as the machine multiplies.

    Time it in the rounds of a step, so that a slow minute lowers both.
    """
    like = next(model.parameters())
    left = torch.randn(tokens, hidden, dtype=like.dtype, device=like.device)
    right = torch.randn(hidden, 3 * hidden, dtype=like.dtype, device=like.device)
    return lambda: left @ right, 2 * left.numel() * right.shape[1]
