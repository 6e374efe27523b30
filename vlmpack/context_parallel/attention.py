"""Attention over the ranks that share a row: Ulysses, or all-gather KV if ranks do not divide the number of heads.

**Ulysses**: a rank has its own tokens with all heads, and exchanges them for all tokens with some heads. Two ranks, a
row of tokens 0 1 2 3 with heads a b:

    before     rank 0   0a 0b 1a 1b        after     rank 0   0a 1a 2a 3a
               rank 1   2a 2b 3a 3b                  rank 1   0b 1b 2b 3b

So any attention back-end can compute the whole row with its boundaries, with fewer heads.

**All-gather KV**: each rank's queries attend to the keys of all ranks. Two ranks, a row of two segments; rank 1
computes:

    row          a a a a a b b b        rank 0 has a a a a, rank 1 has a b b b
    queries              a b b b        segments of 1 and 3
    keys         a a a a a b b b        segments of 5 and 3: its queries' segments, up to its last query

R ranks, T row tokens, t = T / R tokens per rank, N query heads, K key-value heads, H head dimension, F features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import numpy as np
import torch

from vlmpack.context_parallel.collectives import Collectives
from vlmpack.context_parallel.partition import Partition
from vlmpack.layout.device import outside_graph
from vlmpack.layout.segments import Segments, ranges

ATTENTION = "attention"
"""Name under which the bytes of attention are counted."""

Attend = Callable[..., torch.Tensor]
"""An attention back-end: function of q [T, N, H], k [T, K, H], v [T, K, H], `Segments` (and `keys`); returns [T, N, H].
"""


def to_heads(part_tRF: torch.Tensor, ranks: Collectives, what: str) -> torch.Tensor:
    """Exchange heads for tokens: [t, R, F], own tokens with a part for each rank, becomes [T, F]."""
    return ranks.all_to_all(part_tRF.transpose(0, 1).flatten(0, 1), what)


def to_tokens(part_TF: torch.Tensor, ranks: Collectives, what: str) -> torch.Tensor:
    """Invert `to_heads` for one tensor: [T, F] becomes [t, R, F]."""
    got = ranks.all_to_all(part_TF, what)
    return got.unflatten(0, (ranks.size, -1)).transpose(0, 1)


def attend_by_heads(
    attend: Attend,
    q_tNH: torch.Tensor,
    k_tKH: torch.Tensor,
    v_tKH: torch.Tensor,
    partition: Partition,
    ranks: Collectives,
) -> torch.Tensor:
    """Compute attention of this rank's tokens with Ulysses: [t, N, H]. N must be a multiple of the number of ranks.

    A key-value head is sent to every rank with query heads that read it: to several ranks if ranks outnumber heads.
    """
    heads, key = q_tNH.shape[1], ("kv heads", q_tNH.shape[1], k_tKH.shape[1], ranks.size)
    wanted = partition.segments.derived(key, k_tKH.device, lambda: np.asarray(kv_heads(*key[1:]), np.int64))
    qkv = q_tNH, *(x.index_select(1, wanted) for x in (k_tKH, v_tKH))
    parts_tRF = [x.unflatten(1, (ranks.size, -1)).flatten(2) for x in qkv]
    row_TF = to_heads(torch.cat(parts_tRF, -1), ranks, ATTENTION)
    q_TNH, k_TKH, v_TKH = (
        part_TF.unflatten(-1, (-1, x.shape[-1]))
        for part_TF, x in zip(row_TF.split([part.shape[-1] for part in parts_tRF], -1), qkv, strict=True)
    )
    out_TNH = attend(q_TNH, k_TKH, v_TKH, partition.segments)
    return to_tokens(out_TNH.flatten(1), ranks, ATTENTION).flatten(1).unflatten(1, (heads, -1))


def kv_heads(num_heads: int, num_kv_heads: int, ranks: int) -> list[int]:
    """Return the key-value heads to send to each rank, rank by rank; every rank gets the same number.

    Grouped-query attention spreads a rank's n query heads evenly, in order, over its key-value heads. If that matches
    the heads that the queries read, each key-value head is sent to a rank once; otherwise once per query head.
    """
    n, group = num_heads // ranks, num_heads // num_kv_heads
    read = [[head // group for head in range(rank * n, (rank + 1) * n)] for rank in range(ranks)]
    distinct = [sorted(set(heads)) for heads in read]
    shared = [sorted(heads * (n // len(heads))) for heads in distinct]
    even = shared == read and len({len(heads) for heads in distinct}) == 1
    return [head for heads in (distinct if even else read) for head in heads]


# ---------------------------------------------------------------------- all-gather KV


@final
class GatheredKV:
    """The keys that the queries of one rank's contiguous part attend to, computed once per row."""

    def __init__(self, partition: Partition, ranks: Collectives) -> None:
        self._partition, self._ranks = partition, ranks
        lengths = np.asarray(partition.local_segments(ranks.rank).lengths)
        starts, stops = np.asarray(partition.segments.spans, np.int64)[lengths > 0].T
        self._starts, self._sizes = starts, np.minimum(stops, (ranks.rank + 1) * partition.local_total) - starts
        self.queries = Segments.from_lengths(lengths[lengths > 0].tolist())
        """Boundaries of the queries: the segments with tokens in this part; they cover the part."""
        self.keys = Segments.from_lengths(self._sizes.tolist())
        """Boundaries of the keys: each of these segments from its start, on any rank, to its last token in the part."""

    @outside_graph
    def index(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """int64: position in the row of each key."""
        name = ("gathered keys", self._partition.ranks, self._ranks.rank)
        return self._partition.segments.derived(name, device, lambda: ranges(self._starts, self._sizes))

    def attend(self, attend: Attend, q_tNH: torch.Tensor, k_tKH: torch.Tensor, v_tKH: torch.Tensor) -> torch.Tensor:
        """Compute attention of this rank's tokens: [t, N, H], with any numbers of heads."""
        kv_TF = self._ranks.all_gather(torch.cat([k_tKH.flatten(1), v_tKH.flatten(1)], 1), ATTENTION)
        kv_SF = kv_TF.index_select(0, self.index(kv_TF.device))
        k_SKH, v_SKH = (
            part.unflatten(1, x.shape[1:])
            for part, x in zip(kv_SF.split([k_tKH[0].numel(), v_tKH[0].numel()], 1), (k_tKH, v_tKH), strict=True)
        )
        return attend(q_tNH, k_SKH, v_SKH, self.queries, keys=self.keys)
