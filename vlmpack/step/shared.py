"""A row that ranks share: each has a stretch of it. The same questions as in `whole`, and other answers."""

from __future__ import annotations

import functools
from typing import final

import torch
from torch import nn

from vlmpack.errors import LayoutError
from vlmpack.families import DeltaHeads
from vlmpack.layout import PackedRow, Segments
from vlmpack.parallel import (
    Attend,
    Parallel,
    Partition,
    attend_by_heads,
    attend_by_keys,
    to_heads,
    to_tokens,
)
from vlmpack.step.media import shared_media
from vlmpack.step.whole import MediaCall, MediaInputs, OnRow, OnTensors, Whole


@final
class Shared:
    """The ranks of a context group have the row together: each a stretch of it, and its share of the images."""

    def __init__(self, row: PackedRow, parallel: Parallel) -> None:
        self._exchange = parallel.exchange
        self._partition = Partition(segments=row.segments, ranks=parallel.ranks, layout="contiguous")
        self._start = self._exchange.rank * self._partition.local_total
        self.segments = self._partition.local_segments(self._exchange.rank)
        before = sum(self._partition.local_segments(rank).num_tokens for rank in range(self._exchange.rank))
        self.real = slice(before, before + self.segments.num_tokens)
        self.has_all = parallel.ranks == 1
        if not self.has_all:
            self._check_same(row)

    def own(self, row: torch.Tensor, *, dim: int = -1) -> torch.Tensor:
        """See `Whole`."""
        return self._partition.cut(row, self._exchange.rank, token_dim=dim)

    def media(self, call: MediaCall) -> MediaInputs:
        """See `Whole`: features in place of pixels."""
        return shared_media(call, self._partition, self._exchange)

    def attention(
        self, attend: Attend, q_tNH: torch.Tensor, k_tKH: torch.Tensor, v_tKH: torch.Tensor, segments: Segments
    ) -> torch.Tensor:
        """See `Whole`. By heads, if they can be shared out; otherwise by keys."""
        if self.has_all:
            return attend(q_tNH, k_tKH, v_tKH, segments)
        by = attend_by_keys if q_tNH.shape[1] % self._exchange.size else attend_by_heads
        return by(attend, q_tNH, k_tKH, v_tKH, self._partition, self._exchange)

    def delta(self, on_row: OnRow, layer: nn.Module, hidden_1tD: torch.Tensor) -> torch.Tensor:
        """See `Whole`. By heads, if they can be shared out; otherwise each rank computes the whole row."""
        if self.has_all:
            return on_row(layer, hidden_1tD)
        heads = DeltaHeads(layer, self._exchange.size)
        if not heads.is_possible:
            return self.by_row(functools.partial(on_row, layer), hidden_1tD)
        row_TF = torch.cat(to_heads(heads.project(hidden_1tD[0]), self._exchange, "gated delta"), -1)
        computed_TF = on_row(heads.stand_in(self._exchange.rank), row_TF[None])[0]
        return layer.get_submodule("out_proj")(to_tokens(computed_TF, self._exchange, "gated delta").flatten(1)[None])

    def by_row(self, on_row: OnTensors, hidden_1tD: torch.Tensor, *beside_1t: torch.Tensor) -> torch.Tensor:
        """See `Whole`. Every rank computes the whole row and goes on with its own part."""
        row_1TD = self._exchange.gather(hidden_1tD[0], "whole rows")[None]
        beside_1T = [self._exchange.gather_same(own[0], "whole rows")[None] for own in beside_1t]
        return self.own(on_row(row_1TD, *beside_1T), dim=1)

    def sum(self, own: torch.Tensor) -> torch.Tensor:
        """See `Whole`."""
        return self._exchange.sum_same(own, "routers")

    def same(self, own_t: torch.Tensor) -> torch.Tensor:
        """See `Whole`."""
        return self._exchange.gather_same(own_t, "loss")

    def targets(self, index_L: torch.Tensor) -> torch.Tensor:
        """See `Whole`. Waits for the device."""
        if self.has_all:
            return index_L
        edges = self._start, self._start + self._partition.local_total
        first, last = torch.stack([(index_L < edge).sum() for edge in edges]).tolist()
        return index_L[first:last] - self._start

    def all_targets(self, own_l: torch.Tensor, own_index_l: torch.Tensor, index_L: torch.Tensor) -> torch.Tensor:
        """See `Whole`."""
        if self.has_all:
            return own_l
        own_t = own_l.new_zeros(self._partition.local_total).index_add(0, own_index_l, own_l)
        return self.same(own_t).index_select(0, index_L)

    def _check_same(self, row: PackedRow) -> None:
        """Ranks with different rows would wait for what never comes, or send each other what does not belong."""
        ids = row.input_ids
        labels = ids if row.shift_labels is None else row.shift_labels
        weights = torch.arange(1, ids.shape[1] + 1, device=ids.device)
        boundaries = hash((row.segments.lengths, row.segments.slots, row.segments.total)) % 2**62
        own = torch.stack([ids.new_full((), boundaries), (ids * weights).sum(), (labels * weights).sum()])
        of_all = self._exchange.gather_same(own, "check").unflatten(0, (self._exchange.size, -1)).tolist()
        if any(other != of_all[0] for other in of_all):
            raise LayoutError(
                "the ranks of one context group were given different rows; give all of them the same batch: let the "
                "sampler count groups, not ranks (num_replicas and rank of the mesh's other dimension)"
            )


Share = Whole | Shared


def share_of(row: PackedRow, parallel: Parallel | None) -> Share:
    """What this rank has of a row.

    Raises:
        LayoutError: the row cannot be cut into as many parts of one size as there are ranks, or others have another.
    """
    return Whole(row.segments) if parallel is None else Shared(row, parallel)
