"""The variable-length kernel that PyTorch ships (`torch.nn.attention.varlen`): the default on CUDA."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from inspect import signature
from typing import Any, final

import torch

from vlmpack.attention.backend import AttentionCall
from vlmpack.layout import Segments

MAX_HEAD_DIM = 256
AMPERE = (8, 0)


def flash_reasons(call: AttentionCall) -> list[str]:
    """Why FlashAttention 2 cannot serve `call`."""
    reasons = []
    if call.device != "cuda":
        reasons.append(f"it runs on CUDA only, the tensors are on {call.device}")
    elif (capability := _capability()) < AMPERE:
        reasons.append(f"it needs compute capability 8.0 (Ampere), this GPU has {'.'.join(map(str, capability))}")
    if call.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"it takes float16 and bfloat16 only, the tensors are {call.dtype}")
    if call.head_dim % 8 or call.head_dim > MAX_HEAD_DIM:
        reasons.append(f"the head dimension must be a multiple of 8 up to {MAX_HEAD_DIM}, it is {call.head_dim}")
    if call.num_heads % call.num_kv_heads:
        reasons.append(f"{call.num_heads} query heads cannot share {call.num_kv_heads} key-value heads evenly")
    return reasons


@cache
def _capability() -> tuple[int, int]:
    """Of the current GPU; that of Ampere where nobody can tell (no GPU, or AMD's, which count otherwise)."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return AMPERE
    return torch.cuda.get_device_capability()


def zero_padding(out_TNH: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Rows of padding attended to their own kind inside the kernel; 0 takes the place of what came out."""
    if not segments.has_gaps:
        return out_TNH
    return out_TNH.masked_fill(segments.padding_mask(out_TNH.device)[:, None, None], 0)


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
