"""The variable-length kernel that PyTorch ships (`torch.nn.attention.varlen`): the default on CUDA."""

from __future__ import annotations

from functools import cache
from inspect import signature
from typing import Any, final

import torch

from vlmpack.attention.backend import AttentionCall
from vlmpack.attention.flash_limits import flash_reasons, zero_padding
from vlmpack.layout import Segments


@final
class TorchVarlen:
    """FlashAttention as built into PyTorch; no package to install."""

    name = "torch_varlen"

    def unsupported(self, call: AttentionCall) -> list[str]:
        """FlashAttention's limits on device, dtype, head dimension and dropout."""
        reasons = flash_reasons(call)
        if call.dropout:
            reasons.append(f"attention dropout is {call.dropout}, and this kernel has none: set attention_dropout=0")
        return reasons

    def __call__(
        self,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        segments: Segments,
        *,
        causal: bool,
        scale: float,
        dropout: float = 0.0,
        keys: Segments | None = None,
    ) -> torch.Tensor:
        """See `Backend`."""
        from torch.nn.attention.varlen import varlen_attn

        keys = keys or segments
        is_grouped = q_TNH.shape[1] != k_TKH.shape[1]
        grouped: dict[str, Any] = {"enable_gqa": True} if is_grouped and _wants_to_be_asked() else {}
        out_TNH = varlen_attn(
            q_TNH.contiguous(),
            k_TKH.contiguous(),
            v_TKH.contiguous(),
            segments.kernel_seqlens(q_TNH.device),
            keys.kernel_seqlens(q_TNH.device),
            segments.max_kernel_length,
            keys.max_kernel_length,
            scale=scale,
            window_size=(-1, 0) if causal else (-1, -1),
            **grouped,
        )
        assert isinstance(out_TNH, torch.Tensor)  # a pair only when auxiliary outputs are asked for
        return zero_padding(out_TNH, segments)


@cache
def _wants_to_be_asked() -> bool:
    """torch 2.11 groups heads without being asked and knows no such argument; later ones want to be asked."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in signature(varlen_attn).parameters
