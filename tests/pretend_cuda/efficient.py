"""The memory-efficient kernel called with boundaries, as its source has it (mem_eff_attention/kernel_forward.h).

Its log-sum-exp is [G, N, L'], where L' is the longest sequence rounded up to 32, and infinite behind a sequence. The
formulas of the backward pass are PyTorch's. Legend: see `flash`; G sequences.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from pretend_cuda.flash import check_boundaries, gradients, heads, host, require, scores, sequences, unwritten

NO_MASK, FROM_FIRST, FROM_LAST = 0, 1, 2
calls = 0
"""Forward passes of the kernel in this process."""


def register() -> None:
    """Make these the kernels of the device."""
    for name, kernel in (("forward", _forward), ("backward", _backward)):
        torch.library.impl(f"aten::_efficient_attention_{name}", "CUDA", kernel)  # pyright: ignore[reportArgumentType]


def _forward(
    query_1TNH: torch.Tensor,
    key_1UNH: torch.Tensor,
    value_1UNH: torch.Tensor,
    bias: None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    mask: int,
    compute_log_sumexp: bool = False,
    *,
    scale: float | None = None,
    **more: Any,
) -> tuple[Any, ...]:
    global calls
    calls += 1
    assert not dropout
    assert mask != FROM_FIRST, "the emulated kernel aligns the last query with the last key"
    assert all(value is None for value in more.values()), f"the emulated kernel has none of {more}"
    _check(query_1TNH, key_1UNH, value_1UNH, cu_seqlens_q, cu_seqlens_k, max_q, max_k)
    (T, N, _), width = query_1TNH.shape[1:], value_1UNH.shape[3]
    out_1TNH = unwritten(1, T, N, width, dtype=query_1TNH.dtype)
    padded = math.ceil(max_q / 32) * 32 if compute_log_sumexp else 0
    lse_GNL = unwritten(len(cu_seqlens_q) - 1, N, padded, dtype=torch.float32)
    for at, (queries, keys) in enumerate(sequences(cu_seqlens_q, cu_seqlens_k)):
        q, k, v = (heads(x[0, s], N) for x, s in ((query_1TNH, queries), (key_1UNH, keys), (value_1UNH, keys)))
        scores_NLK = scores(q, k, _window(mask), scale)
        host(out_1TNH)[0, queries] = (scores_NLK.softmax(-1) @ v).transpose(0, 1).to(out_1TNH.dtype)
        if compute_log_sumexp:
            host(lse_GNL)[at, :, : q.shape[1]] = scores_NLK.logsumexp(-1)
            host(lse_GNL)[at, :, q.shape[1] : math.ceil(q.shape[1] / 32) * 32] = torch.inf
    seed, offset = (torch.zeros((), dtype=torch.long) for _ in range(2))
    return out_1TNH, lse_GNL, seed, offset, max_q, max_k


def _backward(
    grad_1TNH: torch.Tensor,
    query_1TNH: torch.Tensor,
    key_1UNH: torch.Tensor,
    value_1UNH: torch.Tensor,
    bias: None,
    out_1TNH: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_q: int,
    max_k: int,
    lse_GNL: torch.Tensor,
    dropout: float,
    seed: torch.Tensor,
    offset: torch.Tensor,
    mask: int,
    bias_requires_grad: bool,
    *,
    scale: float | None = None,
    **more: Any,
) -> tuple[Any, ...]:
    _check(query_1TNH, key_1UNH, value_1UNH, cu_seqlens_q, cu_seqlens_k, max_q, max_k)
    require(lse_GNL.shape[2] >= max_q, "logsumexp was not computed")
    qkv = query_1TNH[0], key_1UNH[0], value_1UNH[0]
    lse_NT = torch.empty(query_1TNH.shape[2], query_1TNH.shape[1])
    for at, (queries, _) in enumerate(sequences(cu_seqlens_q, cu_seqlens_k)):
        lse_NT[:, queries] = host(lse_GNL)[at, :, : queries.stop - queries.start]
    found = gradients(
        grad_1TNH[0], *qkv, out_1TNH[0], lse_NT, cu_seqlens_q, cu_seqlens_k, window=_window(mask), scale=scale
    )
    return *(x[None] for x in found), torch.empty(0, device="cuda")


def _window(mask: int) -> tuple[int, int]:
    return -1, 0 if mask == FROM_LAST else -1


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *boundaries: Any) -> None:
    """Refuse what the kernel refuses: other head counts, types, and rows that are not aligned to 16 bytes."""
    qkv = (query, key, value)
    require(all(x.dim() == 4 and len(x) == 1 for x in qkv), "with cu_seqlens, the batch size must be 1")
    require(len({x.shape[2] for x in qkv}) == 1, "query, key and value must have the same number of heads")
    require(len({x.dtype for x in qkv}) == 1, "query, key and value must have the same dtype")
    require(query.dtype in (torch.float32, torch.float16, torch.bfloat16), "dtype must be float or half")
    require(all(x.stride(-1) == 1 for x in qkv), "the last dimension must be contiguous")
    alignment = 16 // query.element_size()
    aligned = all(x.stride(1) % alignment == 0 and x.stride(2) % alignment == 0 for x in qkv)
    require(aligned, "query is not correctly aligned (strideM)")
    check_boundaries(query[0], key[0], *boundaries)
