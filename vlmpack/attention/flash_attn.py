"""The variable-length kernel of the `flash-attn` package, for those who have it installed."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import final

import torch

from vlmpack.attention.backend import AttentionCall
from vlmpack.attention.flash_limits import flash_reasons, zero_padding
from vlmpack.layout import Segments


@final
class FlashAttn:
    """`flash_attn.flash_attn_varlen_func`: FlashAttention 2, with attention dropout."""

    name = "flash_attn"

    def unsupported(self, call: AttentionCall) -> list[str]:
        """The package's absence, and FlashAttention's limits."""
        reasons = flash_reasons(call)
        if (why := _missing()) is not None:
            reasons.append(why)
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
        from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportAttributeAccessIssue, reportMissingImports]

        keys = keys or segments
        out_TNH = flash_attn_varlen_func(
            q_TNH,
            k_TKH,
            v_TKH,
            segments.kernel_seqlens(q_TNH.device),
            keys.kernel_seqlens(q_TNH.device),
            segments.max_kernel_length,
            keys.max_kernel_length,
            dropout_p=dropout,
            softmax_scale=scale,
            causal=causal,
        )
        return zero_padding(out_TNH, segments)


@cache
def _missing() -> str | None:
    """Why the kernel is not there, looked up once; None: it is. Being found is not enough: FlashAttention 4 alone has
    another kernel under the name, and a build for another PyTorch cannot be loaded."""
    if find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    try:
        from flash_attn import flash_attn_varlen_func  # noqa: F401  # pyright: ignore
    except (ImportError, OSError, RuntimeError) as error:
        return f"the package flash-attn has no kernel for this PyTorch ({type(error).__name__}: {error})"
    return None
