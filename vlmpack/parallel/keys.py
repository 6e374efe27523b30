"""Each rank's queries against the keys of all: attention over a shared row where heads cannot be shared out evenly.

Two ranks, a row of two segments; what rank 1 computes:

    row          a a a a a b b b        rank 0 has a a a a, rank 1 has a b b b
    queries              a b b b        segments of 1 and 3
    keys         a a a a a b b b        segments of 5 and 3: those of its queries, as far as its last one

R ranks, T row tokens, t = T / R tokens of a rank, N query heads, K key-value heads, H head dimension.
"""

from __future__ import annotations

import torch

from vlmpack.parallel.exchange import Exchange
from vlmpack.parallel.heads import ATTENTION, Attend
from vlmpack.parallel.partition import Partition


def attend_by_keys(
    attend: Attend,
    q_tNH: torch.Tensor,
    k_tKH: torch.Tensor,
    v_tKH: torch.Tensor,
    partition: Partition,
    ranks: Exchange,
) -> torch.Tensor:
    """[t, N, H] of the own tokens, any numbers of heads. The partition has to be contiguous."""
    kv_TF = ranks.gather(torch.cat([k_tKH.flatten(1), v_tKH.flatten(1)], 1), ATTENTION)
    own = partition.local_segments(ranks.rank)
    if not own.num_tokens:  # padding alone; others wait for the gradient of what they gathered
        return q_tNH.new_zeros(*q_tNH.shape[:2], v_tKH.shape[2]) + q_tNH[:0].sum() + kv_TF[:0].sum()
    queries, keys = partition.views(ranks.rank)
    seen_SF = kv_TF.index_select(0, partition.keys_index(ranks.rank, kv_TF.device))
    k_SKH, v_SKH = (
        part.unflatten(1, x.shape[1:])
        for part, x in zip(seen_SF.split([k_tKH[0].numel(), v_tKH[0].numel()], 1), (k_tKH, v_tKH), strict=True)
    )
    real = own.real_index(q_tNH.device)
    out_rNH = attend(q_tNH.index_select(0, real), k_SKH, v_SKH, queries, keys=keys)
    return out_rNH.new_zeros(len(q_tNH), *out_rNH.shape[1:]).index_copy(0, real, out_rNH)
