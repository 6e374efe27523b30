"""Count the FLOPs of a step while it runs, and build a matrix product to measure the machine's speed with.

A multiply-add is two FLOPs; element-wise operations count as zero. PyTorch's `FlopCounterMode` is corrected for:

- fused attention on a CPU, which gets PyTorch's formulas for CUDA. These count every query-key pair, causal or not;
- grouped matrix products (experts) and triangular solves (gated delta layers), which PyTorch does not count;
- the backward pass of a grouped convolution (gated delta layers), which PyTorch counts as if it were not grouped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

Shape = Sequence[int]


def count_flops(function: Callable[[], object]) -> int:
    """Count the FLOPs of everything that `function` runs, forward and backward."""
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
    """Return the shape [B, N, S, H] of keys or values, repeated for each query head.

    The formulas of torch 2.11 do not support query heads that share keys and values.
    """
    return (shape[0], query[1], *shape[2:])


def _grouped_product(left: Shape, right: Shape, *_: Any, **__: Any) -> int:
    """Two 3-D factors hold one matrix per group. In a 2-D factor, each row, column or summand belongs to one group."""
    groups = left[0] if len(left) == len(right) == 3 else 1
    return 2 * groups * left[-2] * left[-1] * right[-1]


def _triangular_solve(system: Shape, right_sides: Shape, *_: Any, left: bool = True, **__: Any) -> int:
    """Half the cost of a product with the full square matrix."""
    return prod(right_sides) * system[-1]


def _convolution_backward(
    gradient: Shape, values: Shape, weight: Shape, *rest: Any, out_shape: Sequence[Shape | None], **__: Any
) -> int:
    """The gradient of the values and that of the weight cost as much as the forward pass each.

    `weight` is [out, in / groups, ...]. The last argument says which gradients of values, weight and bias are computed.
    """
    transposed, wanted = rest[4], rest[-1]
    places = values if transposed else gradient
    return 2 * places[0] * prod(places[2:]) * prod(weight) * sum(wanted[:2])


def matrix_product(model: Any, *, tokens: int, hidden: int) -> tuple[Callable[[], object], int]:
    """Return (a product of [T, D] and [D, 3 D] in the model's dtype on its device, its FLOPs).

    Its speed is the reference for a step's utilization. Time it in the same rounds as the step, so that a slow minute
    of the machine affects both.
    """
    like = next(model.parameters())
    left = torch.randn(tokens, hidden, dtype=like.dtype, device=like.device)
    right = torch.randn(hidden, 3 * hidden, dtype=like.dtype, device=like.device)
    return lambda: left @ right, 2 * left.numel() * right.shape[1]
