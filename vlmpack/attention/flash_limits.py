"""What the FlashAttention kernels have in common: their limits, and padding that must not leak out of them."""

from __future__ import annotations

from functools import cache

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
