"""One row as its layers see it: which part of it goes through the model on this rank, and what each mechanism needs.

    RowPart                how much of a row goes through the model on this rank: all of it, nothing is cut or sent
    └─ ContextParallelRow  a contiguous part of it; the other parts are on the other ranks of a context group

Layers and losses call the methods of `RowPart` and contain no code for ranks. T row tokens, t of them in the part,
D features, L targets of the row, l of the part, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, final

import torch

from vlmpack.context_parallel import (
    Attend,
    GatheredKV,
    Parallel,
    Partition,
    attend_by_heads,
    to_heads,
    to_tokens,
)
from vlmpack.errors import LayoutError
from vlmpack.layout import PackedRow, Segments

CONTEXT = "vlmpack_row"
"""The keyword under which a `RowContext` reaches every layer."""

OnTensors = Callable[..., torch.Tensor]
"""[1, T, D], and further tensors [1, T, ...], to [1, T, D']."""

OnHeads = Callable[[torch.Tensor], torch.Tensor]
"""[T, F] to [T, F']."""


class RowPart:
    """The part of a row that goes through the model on this rank: all of it, unless a subclass says otherwise."""

    ranks: int = 1
    """Number of ranks that have a part of the row."""
    rank: int = 0
    """Which of them this is."""

    def __init__(self, segments: Segments) -> None:
        self.segments = segments
        """The boundaries of the part."""
        self.real = slice(0, segments.num_tokens)
        """Which of the row's real tokens are in the part."""

    @property
    def is_whole(self) -> bool:
        """Return whether the part is the whole row."""
        return self.ranks == 1

    def cut(self, row: torch.Tensor, *, dim: int = -1) -> torch.Tensor:
        """Cut T entries of the whole row along `dim` to those of the part."""
        return row

    def gather(self, part_t: torch.Tensor) -> torch.Tensor:
        """Gather [t, ...] of each rank to [T, ...]. All continue with the identical value: the backward pass sends
        nothing."""
        return part_t

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks. All continue with the identical value: the backward pass sends nothing."""
        return x

    def attend(
        self, attend: Attend, q_tNH: torch.Tensor, k_tKH: torch.Tensor, v_tKH: torch.Tensor, segments: Segments
    ) -> torch.Tensor:
        """[t, N, H] by a back-end that takes a whole row, with these boundaries of the row."""
        return attend(q_tNH, k_tKH, v_tKH, segments)

    def by_heads(self, parts_tRF: Sequence[torch.Tensor], run: OnHeads, what: str) -> torch.Tensor:
        """Run along the whole row for some heads: [t, R, F] of several blocks of channels to [t, R F'].

        Args:
            parts_tRF: the channels that each rank computes.
            run: [T, sum of F] to [T, F'], for the heads of this rank.
            what: the name under which bytes are counted.
        """
        return run(torch.cat([part.flatten(1) for part in parts_tRF], -1))

    def on_whole_row(self, run: OnTensors, hidden_1tD: torch.Tensor, *others_1t: torch.Tensor) -> torch.Tensor:
        """Run along the whole row for all channels, [1, t, D] to [1, t, D']. Further tensors have no gradient."""
        return run(hidden_1tD, *others_1t)

    def targets(self, index_L: torch.Tensor) -> torch.Tensor:
        """int64 [l]: of places of the row (rising) those in the part, counted from its first token."""
        return index_L

    def gather_targets(self, part_l: torch.Tensor, index_l: torch.Tensor, index_L: torch.Tensor) -> torch.Tensor:
        """Values at `targets(index_L)`, [l], to those of all ranks, [L]."""
        return part_l


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
        super().__init__(self.partition.local_segments(self.rank))
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

    def targets(self, index_L: torch.Tensor) -> torch.Tensor:
        """Count targets before and in the part: a host–device sync."""
        if self.is_whole:
            return index_L
        start = self.rank * self.partition.local_total
        edges = start, start + self.partition.local_total
        first, last = torch.stack([(index_L < edge).sum() for edge in edges]).tolist()
        return index_L[first:last] - start

    def gather_targets(self, part_l: torch.Tensor, index_l: torch.Tensor, index_L: torch.Tensor) -> torch.Tensor:
        """All-gather, with zeros where the part has no target."""
        if self.is_whole:
            return part_l
        part_t = part_l.new_zeros(self.partition.local_total).index_add(0, index_l, part_l)
        return self.gather(part_t).index_select(0, index_L)

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


def part_of(row: PackedRow, parallel: Parallel | None) -> RowPart:
    """The part of a row that goes through the model on this rank.

    Raises:
        LayoutError: the row cannot be cut into as many parts of one size as there are ranks, or others have another.
    """
    return RowPart(row.segments) if parallel is None else ContextParallelRow(row, parallel)


@final
class RowContext:
    """One row, as its layers see it.

    It travels as one keyword through the model's own `**kwargs`, so gradient checkpointing, which calls a layer again
    during the backward pass, hands each layer the row that it had before, and any number of models and rows can be
    alive at a time. No dataclass: FSDP's mixed precision rebuilds those, for every layer.
    """

    def __init__(self, *, segments: Segments, part: RowPart | None = None, entries: Mapping[str, Any]) -> None:
        self.segments = segments
        """The row's boundaries."""
        self.part = part or RowPart(segments)
        """The part of it on this rank."""
        self.entries = dict(entries)
        """The entry of each mechanism (`Mechanism.prepare`), by its name."""

    def __deepcopy__(self, memo: dict[int, Any]) -> RowContext:
        """Of one call: a copy is itself."""
        return self
