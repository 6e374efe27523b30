"""PyTorch's own scaled dot product attention, one call for each segment: exact anywhere, the default on a CPU.

In a row of many segments, those of the same length go through one call together.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import final

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from vlmpack.attention.backend import AttentionCall
from vlmpack.layout import Segments, ranges

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""[n, L, N, H], keys and values [n, L', K, H] of n segments to [n, L, N, H]."""

MANY = 256
"""From so many segments on, those of the same length go through one call."""

AT_ONCE = 1 << 15
"""Most segments of a call: a CUDA grid has room for 65,535."""

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

        def attend(q_nLNH: torch.Tensor, k_nLKH: torch.Tensor, v_nLKH: torch.Tensor) -> torch.Tensor:
            """n segments of one length."""
            q_nNLH, k_nKLH, v_nKLH = (x.transpose(1, 2) for x in (q_nLNH, k_nLKH, v_nLKH))
            queries, seen = q_nNLH.shape[2], k_nKLH.shape[2]
            with _kernels(q_nNLH.device):
                out_nNLH = F.scaled_dot_product_attention(
                    q_nNLH,
                    k_nKLH,
                    v_nKLH,
                    attn_mask=_last_queries(queries, seen, q_nNLH.device) if causal else None,
                    dropout_p=dropout,
                    is_causal=causal and 1 < queries == seen,
                    scale=scale,
                    enable_gqa=q_nNLH.shape[1] != k_nKLH.shape[1],
                )
            return out_nNLH.transpose(1, 2)

        if len(segments.lengths) >= MANY:
            return _by_length(attend, q_TNH, k_TKH, v_TKH, segments, keys or segments)
        return _one_by_one(attend, q_TNH, k_TKH, v_TKH, segments, keys or segments)


def _one_by_one(
    attend: Attend, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, segments: Segments, keys: Segments
) -> torch.Tensor:
    """One call a segment, on views of the row."""
    sizes, real = _pieces(segments)
    key_sizes = _pieces(keys)[0]
    # One split a tensor: slicing each segment out would make the backward pass write G full-size gradients.
    rows = ((q_TNH, sizes), (k_TKH, key_sizes), (v_TKH, key_sizes))
    pieces = zip(*(x.split_with_sizes(cut) for x, cut in rows), strict=True)
    out = [
        attend(q_LNH[None], k_LKH[None], v_LKH[None]).squeeze(0)
        if is_real
        else q_LNH.new_zeros(*q_LNH.shape[:2], v_LKH.shape[2])
        for (q_LNH, k_LKH, v_LKH), is_real in zip(pieces, real, strict=True)
    ]
    return torch.cat(out)


def _by_length(
    attend: Attend, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, segments: Segments, keys: Segments
) -> torch.Tensor:
    """One call for all segments of a length, on copies: a call takes longer than the few tokens of such a segment."""
    lengths_G2 = np.asarray([segments.lengths, keys.lengths[: len(segments.lengths)]], np.int64).T
    distinct, counts = np.unique(lengths_G2[lengths_G2[:, 0] > 0], axis=0, return_counts=True)
    order = np.lexsort(lengths_G2.T[::-1])
    order = order[lengths_G2[order, 0] > 0]

    def index(of: Segments) -> torch.Tensor:
        """int64: where the tokens are, shortest segments first."""
        return of.derived(("by length", segments.lengths, keys.lengths), q_TNH.device, lambda: _tokens(of, order))

    places = index(segments)
    calls = [
        (min(AT_ONCE, count - done), queries, seen)
        for (queries, seen), count in zip(distinct.tolist(), counts.tolist(), strict=True)
        for done in range(0, count, AT_ONCE)
    ]
    sizes, key_sizes = [n * queries for n, queries, _ in calls], [n * seen for n, _, seen in calls]
    rows = ((q_TNH, places, sizes), (k_TKH, index(keys), key_sizes), (v_TKH, index(keys), key_sizes))
    pieces = zip(*(x.index_select(0, at).split_with_sizes(cut) for x, at, cut in rows), strict=True)
    out = [
        attend(*(x.unflatten(0, (n, -1)) for x in piece)).flatten(0, 1)
        for piece, (n, *_) in zip(pieces, calls, strict=True)
    ]
    return q_TNH.new_zeros(*q_TNH.shape[:2], v_TKH.shape[2]).index_copy(0, places, torch.cat(out))


def _tokens(segments: Segments, order: np.ndarray) -> np.ndarray:
    starts, stops = np.asarray(segments.spans, np.int64)[order].T
    return ranges(starts, stops - starts)


def _kernels(device: torch.device) -> AbstractContextManager[object]:
    """On a GPU all but cuDNN's, which plans anew for every length: that takes longer than the attention itself."""
    return sdpa_kernel(WITHOUT_PLANS) if device.type == "cuda" else nullcontext()


def _last_queries(queries: int, keys: int, device: torch.device) -> torch.Tensor | None:
    """Causal mask, bool [L, L'], for the last L of L' positions; None where SDPA needs none."""
    if queries in (1, keys):
        return None
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


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
