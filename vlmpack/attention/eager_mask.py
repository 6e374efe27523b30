"""Dense attention under a block-diagonal mask: slow, plain, and the oracle for the other back-ends."""

from __future__ import annotations

from typing import final

import numpy as np
import torch

from vlmpack.attention.backend import AttentionCall
from vlmpack.layout import Segments


@final
class EagerMask:
    """softmax over a [T, T] score matrix, written out; memory and work grow with T squared."""

    name = "eager_mask"

    def unsupported(self, call: AttentionCall) -> list[str]:
        """Nothing: plain matrix products."""
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
        keys = keys or segments
        # 0 * NaN is NaN: what must not be read has to be 0 before it meets a product.
        q_NTH, k_KTH, v_KTH = (
            x.masked_fill(whose.padding_mask(x.device)[:, None, None], 0).transpose(0, 1)
            for x, whose in ((q_TNH, segments), (k_TKH, keys), (v_TKH, keys))
        )
        group = q_NTH.shape[0] // k_KTH.shape[0]
        k_NTH, v_NTH = (x.repeat_interleave(group, dim=0) for x in (k_KTH, v_KTH))
        hidden_TT = ~_may_attend(segments, keys, q_TNH.device, causal=causal)
        at_least_float32 = torch.promote_types(q_TNH.dtype, torch.float32)
        scores_NTT = (q_NTH @ k_NTH.transpose(1, 2)).to(at_least_float32) * scale
        # Rows of padding attend to nothing: their softmax is NaN, and 0 takes its place.
        weights_NTT = scores_NTT.masked_fill(hidden_TT, float("-inf")).softmax(-1).masked_fill(hidden_TT, 0)
        weights_NTT = torch.dropout(weights_NTT, dropout, train=dropout > 0)
        return (weights_NTT.to(v_NTH.dtype) @ v_NTH).transpose(0, 1)


def _may_attend(segments: Segments, keys: Segments, device: torch.device, *, causal: bool) -> torch.Tensor:
    """bool [T, T']: query (row) may read key (column)."""
    query_T, key_T = segments.seq_idx(device), keys.seq_idx(device)
    real_T1, real_1T = ~segments.padding_mask(device)[:, None], ~keys.padding_mask(device)[None, :]
    mask_TT = (query_T[:, None] == key_T[None, :]) & real_T1 & real_1T
    if not causal:
        return mask_TT
    return mask_TT & (_places_from_end(segments, device)[:, None] >= _places_from_end(keys, device)[None, :])


def _places_from_end(segments: Segments, device: torch.device) -> torch.Tensor:
    """int64 [T]: offset from the segment's end (last token: -1); arbitrary on padding."""

    def make() -> np.ndarray:
        lengths = np.asarray((*segments.lengths, 0))
        return segments.position_in_segment().numpy() - lengths[segments.seq_idx().numpy()]

    return segments.derived("places from end", device, make)
