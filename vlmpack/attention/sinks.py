"""Attention sinks on a kernel that has none: a score per head that takes a share of the softmax, without a value.

A kernel returns its output O and L, the log-sum-exp of each query's scores. With a sink s, L' = log(exp L + exp s) is
the log-sum-exp, and O' = exp(L - L') O the output. A backward kernel reads only P = exp(S - L') and D = rowsum(dO * O')
from them, so called with O' and L' it returns the exact gradients of queries, keys and values. The sink's own is
ds = -sum exp(s - L') D.

T query tokens, N query heads, H head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def attend_with_sinks(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, *seqlens: Any, sinks: Tensor, scale: float, window: tuple[int, int]
) -> Tensor:
    """Compute attention with sinks [N] by one call of FlashAttention, and one in the backward pass: [T, N, H].

    Args:
        q_TNH: queries, contiguous like keys and values.
        k_TKH: keys.
        v_TKH: values.
        seqlens: cu_seqlens of queries and of keys, then the longest segment of each.
        sinks: the score of each head's sink.
        scale: factor of the scores.
        window: how many tokens before and after itself a query attends to; -1: all.
    """
    sides = {"scale": scale, "window_size_left": window[0], "window_size_right": window[1]}
    out: Any = _Sinks.apply(q_TNH, k_TKH, v_TKH, sinks, seqlens, window == (-1, 0), sides)
    return out


class _Sinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, seqlens: tuple[Any, ...], causal: bool, sides: Any
    ) -> Any:
        kernel = torch.ops.aten._flash_attention_forward
        out_TNH, lse_NT, seed, offset, _ = kernel(q, k, v, *seqlens, 0.0, causal, False, **sides)
        with_sink_NT = torch.logaddexp(lse_NT, sinks.float()[:, None])
        share_TN1 = (lse_NT - with_sink_NT).exp().T[..., None]
        out_TNH = (out_TNH * share_TN1).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out_TNH, with_sink_NT, seed, offset)
        ctx.settings = seqlens, causal, sides
        return out_TNH

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        q, k, v, sinks, out_TNH, lse_NT, seed, offset = ctx.saved_tensors
        seqlens, causal, sides = ctx.settings
        grad_TNH, kernel = grad_outputs[0].contiguous(), torch.ops.aten._flash_attention_backward
        grads = kernel(grad_TNH, q, k, v, out_TNH, lse_NT, *seqlens, 0.0, causal, seed, offset, **sides)
        delta_NT = (grad_TNH.float() * out_TNH.float()).sum(-1).T
        grad_N = -((sinks.float()[:, None] - lse_NT).exp() * delta_NT).sum(1)
        return *grads, grad_N.to(sinks.dtype), None, None, None
