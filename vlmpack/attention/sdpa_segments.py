"""PyTorch's own scaled dot product attention, one call for each segment: exact anywhere, the default on a CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from vlmpack.attention.backend import AttentionCall
from vlmpack.layout import Segments

WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@final
class SdpaSegments:
    """One `scaled_dot_product_attention` a segment; padding is neither read nor computed."""

    name = "sdpa_segments"

    def unsupported(self, call: AttentionCall) -> list[str]:
        """Nothing: it serves every device and dtype that PyTorch has."""
        return []

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
        sizes, real = _pieces(segments)
        key_sizes = sizes if keys is None else _pieces(keys)[0]
        # One split a tensor: slicing each segment out would make the backward pass write G full-size gradients.
        rows = ((q_TNH, sizes), (k_TKH, key_sizes), (v_TKH, key_sizes))
        pieces = zip(*(x.transpose(0, 1).split_with_sizes(cut, dim=1) for x, cut in rows), strict=True)
        grouped = q_TNH.shape[1] != k_TKH.shape[1]
        out = []
        for (q_NLH, k_KLH, v_KLH), is_real in zip(pieces, real, strict=True):
            if not is_real:
                out.append(q_NLH.new_zeros(q_NLH.shape[1], q_NLH.shape[0], v_KLH.shape[2]))
                continue
            with _kernels(q_NLH.device):
                o_1NLH = F.scaled_dot_product_attention(
                    q_NLH[None],
                    k_KLH[None],
                    v_KLH[None],
                    attn_mask=_last_queries(q_NLH, k_KLH) if causal else None,
                    dropout_p=dropout,
                    is_causal=causal and 1 < q_NLH.shape[1] == k_KLH.shape[1],
                    scale=scale,
                    enable_gqa=grouped,
                )
            out.append(o_1NLH.squeeze(0).transpose(0, 1))
        return torch.cat(out)


def _kernels(device: torch.device) -> AbstractContextManager[object]:
    """On a GPU all but cuDNN's, which plans anew for every length: that takes longer than the attention itself."""
    return sdpa_kernel(WITHOUT_PLANS) if device.type == "cuda" else nullcontext()


def _last_queries(q_NLH: torch.Tensor, k_KLH: torch.Tensor) -> torch.Tensor | None:
    """Causal mask, bool [L, L'], for the last L of L' positions; None where SDPA needs none."""
    queries, keys = q_NLH.shape[1], k_KLH.shape[1]
    if queries in (1, keys):
        return None
    return torch.ones(queries, keys, dtype=torch.bool, device=q_NLH.device).tril(keys - queries)


def _pieces(segments: Segments) -> tuple[list[int], list[bool]]:
    """(sizes, whether real): the row cut into runs of real tokens and runs of padding, empty ones left out."""
    sizes, real, at = [], [], 0
    for start, stop in (*segments.spans, (segments.total, segments.total)):
        for size, is_real in ((start - at, False), (stop - start, True)):
            if size:
                sizes.append(size)
                real.append(is_real)
        at = stop
    return sizes, real
