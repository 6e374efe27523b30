"""The part of a row that one rank of a context group has: a contiguous piece of it, and some of its images."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import final

import torch

from vlmpack.context_parallel.attention import Attend, GatheredKV, attend_by_heads, to_heads, to_tokens
from vlmpack.context_parallel.mesh import Parallel
from vlmpack.context_parallel.partition import Partition
from vlmpack.errors import LayoutError
from vlmpack.layout.row import PackedRow
from vlmpack.layout.segments import Segments
from vlmpack.model.row import OnHeads, OnTensors, PartTargets, RowPart


@final
class ContextParallelRow(RowPart):
    """A contiguous part of a row, and a share of its images. With one rank the part is the whole row.

    Raises:
        LayoutError: the row's width is no multiple of the ranks, or the ranks have different rows.
    """

    def __init__(self, row: PackedRow, parallel: Parallel) -> None:
        self.collectives = parallel.collectives
        """The ranks of the context group."""
        self.partition = Partition(segments=row.segments, ranks=parallel.ranks, layout="contiguous")
        """Which rank has which tokens."""
        self.ranks, self.rank = parallel.ranks, self.collectives.rank
        super().__init__(self.partition.local_segments(self.rank), computed=row.segments)
        before = sum(self.partition.local_segments(rank).num_tokens for rank in range(self.rank))
        self.real = slice(before, before + self.segments.num_tokens)
        if not self.is_whole:
            self._check_equal(row)

    def cut(self, row: torch.Tensor, *, dim: int = -1) -> torch.Tensor:
        """A view of the part."""
        return self.partition.cut(row, self.rank, token_dim=dim)

    def gather(self, part_t: torch.Tensor) -> torch.Tensor:
        """All-gather."""
        return self.collectives.all_gather_equal(part_t, "loss")

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """All-reduce."""
        return self.collectives.all_reduce(x, "routers")

    def attend(
        self, attend: Attend, q_tNH: torch.Tensor, k_tKH: torch.Tensor, v_tKH: torch.Tensor, segments: Segments
    ) -> torch.Tensor:
        """Ulysses if the ranks divide the heads, otherwise all-gather KV."""
        if self.is_whole:
            return super().attend(attend, q_tNH, k_tKH, v_tKH, segments)
        if q_tNH.shape[1] % self.ranks:
            return self._gathered_kv.attend(attend, q_tNH, k_tKH, v_tKH)
        return attend_by_heads(attend, q_tNH, k_tKH, v_tKH, self.partition, self.collectives)

    def by_heads(self, parts_tRF: Sequence[torch.Tensor], run: OnHeads, what: str) -> torch.Tensor:
        """Ulysses: an all-to-all before and one after."""
        row_TF = torch.cat(to_heads(parts_tRF, self.collectives, what), -1)
        return to_tokens(run(row_TF), self.collectives, what).flatten(1)

    def on_whole_row(self, run: OnTensors, hidden_1tD: torch.Tensor, *others_1t: torch.Tensor) -> torch.Tensor:
        """Compute the whole row on every rank, of which each continues with its part."""
        row_1TD = self.collectives.all_gather(hidden_1tD[0], "whole rows")[None]
        others_1T = [self.collectives.all_gather_equal(part[0], "whole rows")[None] for part in others_1t]
        return self.cut(run(row_1TD, *others_1T), dim=1)

    def targets(self, index_L: torch.Tensor, labels_1T: torch.Tensor) -> PartTargets:
        """Count targets before and in the part: a host–device sync."""
        if self.is_whole:
            return super().targets(index_L, labels_1T)
        start = self.rank * self.partition.local_total
        edges = start, start + self.partition.local_total
        first, last = torch.stack([(index_L < edge).sum() for edge in edges]).tolist()
        part_l = index_L[first:last]
        return PartTargets(predictions=part_l - start, ids=labels_1T[0].index_select(0, part_l), entries=index_L)

    def gather_targets(self, part_l: torch.Tensor, targets: PartTargets) -> torch.Tensor:
        """All-gather, with zeros where the part has no target."""
        if self.is_whole:
            return part_l
        part_t = part_l.new_zeros(self.partition.local_total).index_add(0, targets.predictions, part_l)
        return self.gather(part_t).index_select(0, targets.entries)

    @cached_property
    def _gathered_kv(self) -> GatheredKV:
        return GatheredKV(self.partition, self.collectives)

    def _check_equal(self, row: PackedRow) -> None:
        """Ranks with different rows would block for ever, or send each other what does not belong."""
        ids = row.input_ids
        labels = ids if row.shift_labels is None else row.shift_labels
        weights = torch.arange(1, ids.shape[1] + 1, device=ids.device)
        boundaries = hash((row.segments.lengths, row.segments.slots, row.segments.total)) % 2**62
        sums = torch.stack([ids.new_full((), boundaries), (ids * weights).sum(), (labels * weights).sum()])
        of_all = self.collectives.all_gather_equal(sums, "check").unflatten(0, (self.ranks, -1)).tolist()
        if any(other != of_all[0] for other in of_all):
            raise LayoutError(
                "the ranks of one context group were given different rows; give all of them the same batch: let the "
                "sampler count groups, not ranks (num_replicas and rank of the mesh's other dimension)"
            )
