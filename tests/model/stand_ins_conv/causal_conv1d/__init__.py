"""Stands in for the package causal-conv1d where there is no GPU: the same signature in plain PyTorch."""

import torch
import torch.nn.functional as F

CALLS: list[list[int]] = []
"""The shape of each call's input."""


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """x [B, C, T], weight [C, K] to [B, C, T]."""
    assert seq_idx is None and initial_states is None
    CALLS.append(list(x.shape))
    channels, width = weight.shape
    out = F.conv1d(F.pad(x, (width - 1, 0)), weight[:, None], bias, groups=channels)
    return F.silu(out) if activation in ("silu", "swish") else out
