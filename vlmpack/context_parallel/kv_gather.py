"""All-gather KV: each rank's queries attend to the keys of all ranks, where heads do not divide evenly by ranks.

Two ranks, a row of two segments; what rank 1 computes:

    row          a a a a a b b b        rank 0 has a a a a, rank 1 has a b b b
    queries              a b b b        segments of 1 and 3
    keys         a a a a a b b b        segments of 5 and 3: those of its queries, as far as its last one

R ranks, T row tokens, t = T / R tokens of a rank, N query heads, K key-value heads, H head dimension.
"""

from __future__ import annotations

from functools import cached_property
from typing import final

import numpy as np
import torch

from vlmpack.context_parallel.collectives import Collectives
from vlmpack.context_parallel.partition import Partition
from vlmpack.context_parallel.ulysses import ATTENTION, Attend
from vlmpack.layout import Segments, outside_graph, ranges


@final
class GatheredKV:
    """The keys that the queries of one rank's contiguous part attend to, computed once a row."""

    def __init__(self, partition: Partition, ranks: Collectives) -> None:
        self._partition = partition
        self._ranks = ranks

    @cached_property
    def queries(self) -> Segments:
        """The segments of the part that have tokens in it."""
        return Segments.from_lengths([length for length in self._local.lengths if length])

    @cached_property
    def keys(self) -> Segments:
        """Of each of these segments its real tokens from its start, on any rank, to its last one in the part."""
        starts, stops = self._spans
        return Segments.from_lengths((stops - starts).tolist())

    @outside_graph
    def index(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """int64: the place in the row of each of the keys."""
        name = ("gathered keys", self._partition.ranks, self._ranks.rank)
        return self._partition.segments.derived(name, device, self._index)

    def attend(self, attend: Attend, q_tNH: torch.Tensor, k_tKH: torch.Tensor, v_tKH: torch.Tensor) -> torch.Tensor:
        """[t, N, H] of this rank's tokens, any numbers of heads."""
        kv_TF = self._ranks.all_gather(torch.cat([k_tKH.flatten(1), v_tKH.flatten(1)], 1), ATTENTION)
        if not self._local.num_tokens:  # padding alone; others block on the gradient of what they gathered
            return q_tNH.new_zeros(*q_tNH.shape[:2], v_tKH.shape[2]) + q_tNH[:0].sum() + kv_TF[:0].sum()
        kv_SF = kv_TF.index_select(0, self.index(kv_TF.device))
        k_SKH, v_SKH = (
            part.unflatten(1, x.shape[1:])
            for part, x in zip(kv_SF.split([k_tKH[0].numel(), v_tKH[0].numel()], 1), (k_tKH, v_tKH), strict=True)
        )
        real = self._local.real_index(q_tNH.device)
        out_rNH = attend(q_tNH.index_select(0, real), k_SKH, v_SKH, self.queries, keys=self.keys)
        return out_rNH.new_zeros(len(q_tNH), *out_rNH.shape[1:]).index_copy(0, real, out_rNH)

    @property
    def _local(self) -> Segments:
        return self._partition.local_segments(self._ranks.rank)

    @cached_property
    def _spans(self) -> tuple[np.ndarray, np.ndarray]:
        """(start, stop) in the row of the keys of each segment that has tokens in the part, each int64."""
        starts, stops = np.asarray(self._partition.segments.spans, np.int64).T
        held = np.asarray(self._local.lengths) > 0
        return starts[held], np.minimum(stops[held], (self._ranks.rank + 1) * self._partition.local_total)

    def _index(self) -> np.ndarray:
        starts, stops = self._spans
        return ranges(starts, stops - starts)
