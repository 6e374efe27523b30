"""FlashAttention's varlen kernel, which PyTorch's `varlen_attn` calls: its layout, its conventions, what it refuses.

Legend: T rows of queries, U rows of keys, N heads, M heads of keys, H head dim, L queries and K keys of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

NAN = float("nan")
calls = 0
"""Forward passes of the kernel in this process."""


def register() -> None:
    """Make these the kernels of the device; formulas of the backward pass are PyTorch's."""
    for name, kernel in (("forward", _forward), ("backward", _backward)):
        torch.library.impl(f"aten::_flash_attention_{name}", "CUDA", kernel)  # pyright: ignore[reportArgumentType]


def host(x: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor on the device, without a wait."""
    return torch.ops.pretend_cuda.host_view(x.detach())


def unwritten(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the device, NaN everywhere."""
    return torch.empty(shape, dtype=dtype, device="cuda")


def _forward(
    query_TNH: torch.Tensor,
    key_UMH: torch.Tensor,
    value_UMH: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **more: Any,
) -> tuple[torch.Tensor, ...]:
    global calls
    calls += 1
    assert not dropout, "the emulated kernel has no dropout"
    assert all(value is None for value in more.values()), f"the emulated kernel has none of {more}"
    _check(query_TNH, key_UMH, value_UMH, cu_seqlens_q, cu_seqlens_k, max_q, max_k)
    T, N, H = query_TNH.shape
    out_TNH = unwritten(T, N, H, dtype=query_TNH.dtype)
    lse_NT = unwritten(N, T, dtype=torch.float32)
    window = _window(causal, window_size_left, window_size_right)
    for queries, keys in sequences(cu_seqlens_q, cu_seqlens_k):
        q_NLH, k_NKH, v_NKH = (heads(x[s], N) for x, s in ((query_TNH, queries), (key_UMH, keys), (value_UMH, keys)))
        scores_NLK = scores(q_NLH, k_NKH, window, scale)
        host(lse_NT)[:, queries] = scores_NLK.logsumexp(-1)
        probabilities_NLK = scores_NLK.softmax(-1).nan_to_num(0.0)  # a query without keys gets 0
        host(out_TNH)[queries] = (probabilities_NLK @ v_NKH).transpose(0, 1).to(out_TNH.dtype)
    seed, offset = (unwritten(n, dtype=torch.uint64) for n in (2, 0))
    return out_TNH, lse_NT, seed, offset, unwritten(0, dtype=out_TNH.dtype)


def _backward(
    grad_out_TNH: torch.Tensor,
    query_TNH: torch.Tensor,
    key_UMH: torch.Tensor,
    value_UMH: torch.Tensor,
    out_TNH: torch.Tensor,
    lse_NT: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    seed: torch.Tensor,
    offset: torch.Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[torch.Tensor, ...]:
    _check(query_TNH, key_UMH, value_UMH, cu_seqlens_q, cu_seqlens_k, max_q, max_k)
    if grad_out_TNH.dtype != query_TNH.dtype:
        raise RuntimeError("query and dout must have the same dtype")
    window = _window(causal, window_size_left, window_size_right)
    return gradients(
        grad_out_TNH,
        query_TNH,
        key_UMH,
        value_UMH,
        out_TNH,
        host(lse_NT),
        cu_seqlens_q,
        cu_seqlens_k,
        window=window,
        scale=scale,
    )


def gradients(
    grad_out_TNH: torch.Tensor,
    query_TNH: torch.Tensor,
    key_UMH: torch.Tensor,
    value_UMH: torch.Tensor,
    out_TNH: torch.Tensor,
    lse_NT: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    window: tuple[int, int],
    scale: float | None,
) -> tuple[torch.Tensor, ...]:
    """With P = exp(S - lse) and D = rowsum(dO * O): dV = P^T dO, dS = P * (dO V^T - D), dQ = dS K, dK = dS^T Q."""
    N, H, M = *query_TNH.shape[1:], key_UMH.shape[1]
    factor = H**-0.5 if scale is None else scale
    dq_TNH, dk_UMH, dv_UMH = (unwritten(*x.shape, dtype=x.dtype) for x in (query_TNH, key_UMH, value_UMH))
    for queries, keys in sequences(cu_seqlens_q, cu_seqlens_k):
        q_NLH, do_NLH, o_NLH = (heads(x[queries], N) for x in (query_TNH, grad_out_TNH, out_TNH))
        k_NKH, v_NKH = (heads(x[keys], N) for x in (key_UMH, value_UMH))
        lse_NL1 = lse_NT[:, queries, None]
        p_NLK = (scores(q_NLH, k_NKH, window, scale) - lse_NL1).exp().nan_to_num(0.0)
        d_NL1 = (do_NLH * o_NLH).sum(-1, keepdim=True)
        ds_NLK = p_NLK * (do_NLH @ v_NKH.mT - d_NL1) * factor
        host(dq_TNH)[queries] = (ds_NLK @ k_NKH).transpose(0, 1).to(dq_TNH.dtype)
        for gradient_UMH, of_heads_NKH in ((dk_UMH, ds_NLK.mT @ q_NLH), (dv_UMH, p_NLK.mT @ do_NLH)):
            summed_MKH = of_heads_NKH.unflatten(0, (M, N // M)).sum(1)
            host(gradient_UMH)[keys] = summed_MKH.transpose(0, 1).to(gradient_UMH.dtype)
    return dq_TNH, dk_UMH, dv_UMH


def sequences(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows of queries and of keys of each sequence."""
    q, k = (host(x).tolist() for x in (cu_seqlens_q, cu_seqlens_k))
    for i in range(len(q) - 1):
        yield slice(q[i], q[i + 1]), slice(k[i], k[i + 1])


def heads(x_LMH: torch.Tensor, heads: int) -> torch.Tensor:
    """float32 [N, L, H]: heads of keys and values repeated."""
    return host(x_LMH).float().transpose(0, 1).repeat_interleave(heads // x_LMH.shape[1], 0)


def _window(causal: bool, left: int | None, right: int | None) -> tuple[int, int]:
    """How many keys before and behind its own a query attends to; -1: all."""
    return -1 if left is None else left, 0 if causal else -1 if right is None else right


def scores(q_NLH: torch.Tensor, k_NKH: torch.Tensor, window: tuple[int, int], scale: float | None) -> torch.Tensor:
    """Of the last query and the last key aligned."""
    L, K, (left, right) = q_NLH.shape[1], k_NKH.shape[1], window
    behind_LK = torch.arange(K) - (torch.arange(L)[:, None] + K - L)
    hidden_LK = torch.zeros(L, K, dtype=torch.bool)
    if left >= 0:
        hidden_LK |= behind_LK < -left
    if right >= 0:
        hidden_LK |= behind_LK > right
    scores_NLK = q_NLH @ k_NKH.mT * (q_NLH.shape[-1] ** -0.5 if scale is None else scale)
    return scores_NLK.masked_fill(hidden_LK, -torch.inf)


def _check(
    query_TNH: torch.Tensor,
    key_UMH: torch.Tensor,
    value_UMH: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_q: int,
    max_k: int,
) -> None:
    """Refuse what the kernel refuses."""
    qkv = (query_TNH, key_UMH, value_UMH)
    require(all(x.dtype in (torch.float16, torch.bfloat16) for x in qkv), "FlashAttention only support fp16 and bf16")
    require(all(x.stride(-1) == 1 for x in qkv), "Input tensor must have contiguous last dimension")
    heads, head_dims = [x.shape[1] for x in qkv], {x.shape[2] for x in qkv}
    require(len(head_dims) == 1 and max(head_dims) <= 256, "FlashAttention supports head dimensions at most 256")
    require(max(head_dims) % 8 == 0, "head_size must be a multiple of 8")
    require(key_UMH.shape == value_UMH.shape, "k and v must have the same shape")
    require(heads[0] % heads[1] == 0, "Number of heads in key/value must divide number of heads in query")
    check_boundaries(query_TNH, key_UMH, cu_seqlens_q, cu_seqlens_k, max_q, max_k)


def require(condition: bool, otherwise: str) -> None:
    """Raise as a kernel does."""
    if not condition:
        raise RuntimeError(otherwise)


def check_boundaries(
    query_TNH: torch.Tensor,
    key_UMH: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_q: int,
    max_k: int,
) -> None:
    """Refuse boundaries that the kernel refuses, and those with which it computes garbage without a word."""
    for x, cu_seqlens, longest in ((query_TNH, cu_seqlens_q, max_q), (key_UMH, cu_seqlens_k, max_k)):
        require(cu_seqlens.is_cuda, "cu_seqlens must be on CUDA")
        require(cu_seqlens.dtype == torch.int32, "cu_seqlens must have dtype int32")
        require(cu_seqlens.is_contiguous(), "cu_seqlens must be contiguous")
        lengths = host(cu_seqlens).diff()
        require(int(lengths.min()) >= 0, "cu_seqlens decrease: the kernel would read other memory")
        require(int(lengths.max()) <= longest, f"max_seqlen is {longest}: the kernel would leave out the longest")
        require(int(cu_seqlens_end(cu_seqlens)) <= len(x), "cu_seqlens end behind the tensor")


def cu_seqlens_end(cu_seqlens: torch.Tensor) -> int:
    """The last boundary."""
    return int(host(cu_seqlens)[-1])
