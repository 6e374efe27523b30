"""Attention of one sample, one query at a time: slow, obvious, and the truth for tests."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen

from vlmpack.attention.patterns import Pattern

HEADS, KV_HEADS, DIM = 6, 3, 11


def random_qkv(tokens: int, *, value_dim: int = DIM, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    shapes = [(tokens, HEADS, DIM), (tokens, KV_HEADS, DIM), (tokens, KV_HEADS, value_dim)]
    return [torch.randn(shape, generator=rng, dtype=dtype).requires_grad_() for shape in shapes]


def poisoned_qkv(padding: torch.Tensor, *, fill: float = float("nan"), **shape: Any) -> list[torch.Tensor]:
    """The same of a row with padding, where every value is `fill`."""
    qkv = random_qkv(len(padding), **shape)
    with torch.no_grad():
        for x in qkv:
            x[padding] = fill
    return qkv


def attends(
    i: int, j: int, pattern: Pattern, runs: Sequence[tuple[int, int]] = (), *, beyond: bool = False, causal: bool = True
) -> bool:
    """Whether token i of a sample attends to token j, by the words of transformers: window AND (causal OR span)."""
    together = any(start <= i < stop and start <= j < stop for start, stop in runs)
    near = pattern.window is None or j > i - pattern.window
    if pattern.chunk is not None:
        near = i // pattern.chunk == j // pattern.chunk
    return (near and (not causal or j <= i or together)) or (beyond and together)


def alone(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Pattern | None = None,
    *,
    runs: Sequence[tuple[int, int]] = (),
    beyond: bool = False,
    causal: bool = True,
    scale: float = 0.3,
) -> torch.Tensor:
    """The last queries of one sample; `runs`: its tokens that attend to each other in both directions."""
    pattern = pattern or Pattern()
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    out, before = [], len(k) - len(q)
    for at in range(len(q)):
        keys = [j for j in range(len(k)) if attends(before + at, j, pattern, runs, beyond=beyond, causal=causal)]
        scores_JN = (k[keys] * q[at]).sum(-1) * scale
        if pattern.softcap is not None:
            scores_JN = pattern.softcap * (scores_JN / pattern.softcap).tanh()
        total_N = scores_JN.exp().sum(0) + (0 if pattern.sinks is None else pattern.sinks.exp())
        out.append(((scores_JN.exp() / total_N)[..., None] * v[keys]).sum(0))
    return torch.stack(out) if out else q.new_zeros(*q.shape[:2], v.shape[2])


def assert_equal(out: torch.Tensor, truth: torch.Tensor, *leaves: torch.Tensor) -> None:
    """Compare outputs and the gradients of leaves."""
    torch.testing.assert_close(out, truth, rtol=0, atol=1e-12)
    ours, expected = (torch.autograd.grad(x.sin().sum(), leaves) for x in (out, truth))
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b.nan_to_num(), rtol=0, atol=1e-12)


def install_kernels(patch: pytest.MonkeyPatch, varlen_attn: Callable[..., Any], flash: Callable[..., Any]) -> None:
    """Put functions in the place of the kernels of PyTorch and of the package flash-attn."""
    package: Any = types.ModuleType("flash_attn")
    package.flash_attn_varlen_func = flash
    patch.setitem(sys.modules, "flash_attn", package)
    patch.setattr(varlen, "varlen_attn", varlen_attn)
