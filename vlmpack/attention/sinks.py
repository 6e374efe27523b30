"""Attention sinks on a kernel that has none: a score per head that takes a share of the softmax, without a value.

A kernel returns its output O and L, the log-sum-exp of each query's scores. With a sink s, L' = log(exp L + exp s) is
the log-sum-exp, and O' = exp(L - L') O the output. A backward kernel reads only P = exp(S - L') and D = rowsum(dO * O')
from them, so called with O' and L' it returns the exact gradients of queries, keys and values. The sink's own is
ds = -sum exp(s - L') D.

T query tokens, N query heads, H head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Forward = Callable[..., tuple[Tensor, Tensor, tuple[Tensor, ...]]]
"""Function of queries, keys and values; returns output [T, N, H], log-sum-exp float32 [N, T], and what the backward
kernel needs besides."""
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""Function of the gradient of the output, queries, keys, values, output, log-sum-exp, and the rest of `Forward`;
returns the gradients of queries, keys and values."""


def attend_with_sinks(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, *, sinks: Tensor, forward: Forward, backward: Backward
) -> Tensor:
    """Compute attention with sinks [N] by one call of a kernel, and one in the backward pass: [T, N, H]."""
    out: Any = _Sinks.apply(q_TNH, k_TKH, v_TKH, sinks, forward, backward)
    return out


class _Sinks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, forward: Forward, backward: Backward) -> Any:
        out_TNH, lse_NT, more = forward(q, k, v)
        with_sink_NT = torch.logaddexp(lse_NT, sinks.float()[:, None])
        share_TN1 = (lse_NT - with_sink_NT).exp().T[..., None]
        out_TNH = (out_TNH * share_TN1).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out_TNH, with_sink_NT, *more)
        ctx.backward_kernel = backward
        return out_TNH

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        q, k, v, sinks, out_TNH, lse_NT, *more = ctx.saved_tensors
        grad_TNH = grad_outputs[0].contiguous()
        grads = ctx.backward_kernel(grad_TNH, q, k, v, out_TNH, lse_NT, *more)
        delta_NT = (grad_TNH.float() * out_TNH.float()).sum(-1).T
        grad_N = -((sinks.float()[:, None] - lse_NT).exp() * delta_NT).sum(1)
        return *grads, grad_N.to(sinks.dtype), None, None
