"""Which tokens of a row each rank holds.

Padded lengths 8 and 4 on 2 ranks; mirrored, each slot is split into 2 * ranks chunks:

    row          0 1 2 3 4 5 6 7   8 9 10 11
    mirrored     0 0 1 1 1 1 0 0   0 1 1  0      rank r holds chunks r and 2 * ranks - 1 - r of every slot
    contiguous   0 0 0 0 0 0 1 1   1 1 1  1      rank r holds the r-th part of the row, wherever segments end

T row tokens, t = T / ranks tokens per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final, get_args

import numpy as np
import torch

from vlmpack.errors import LayoutError
from vlmpack.layout.device import outside_graph
from vlmpack.layout.segments import Layout, Segments, ranges


@final
@dataclass(frozen=True, kw_only=True)
class Partition:
    """A row split over ranks; every rank holds the same number of tokens, in the order of the row.

    Raises:
        LayoutError: the row cannot be split this way. Names the segment, what was seen and what to set.
    """

    segments: Segments
    """The whole row's boundaries."""
    ranks: int
    """Number of ranks that share the row."""
    layout: Layout
    """`mirrored` gives every rank the same number of causal query-key pairs; `contiguous` works with any boundaries."""

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.layout not in get_args(Layout):
            raise LayoutError(
                f"a row is cut over at least 1 rank, mirrored or contiguous; got ranks={self.ranks} and "
                f"layout={self.layout!r}"
            )
        if self.ranks > 1 and self.layout == "mirrored":
            _check_mirrored(self.segments, self.ranks)
        if self.segments.total % self.ranks:
            raise LayoutError(
                f"a row of {self.segments.total} tokens cannot be cut into {self.ranks} parts of one size; pack it "
                f"with SlotRule(row_multiple={self.ranks})"
            )

    # ------------------------------------------------------------------ index maps

    @property
    def local_total(self) -> int:
        """Number t of tokens per rank."""
        return self.segments.total // self.ranks

    def check_rank(self, rank: int) -> None:
        """Raise a `LayoutError` unless `rank` is one of the ranks."""
        if not 0 <= rank < self.ranks:
            raise LayoutError(f"rank {rank} is not one of the {self.ranks} ranks 0 to {self.ranks - 1}")

    def index(self, rank: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """int64 [t]: positions in the row of the tokens of `rank`, in increasing order."""
        self.check_rank(rank)
        return self._derived(("index", rank), device, lambda: self._index(rank))

    def place(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """int64 [T]: position of each row token in the concatenated parts of all ranks.

        `place // t` is the rank that holds the token, `place % t` its position in that rank's part.
        """
        return self._derived("place", device, self._place)

    def local_segments(self, rank: int) -> Segments:
        """Return the boundaries of a rank's part: all G segments, each with the number of its tokens on this rank.

        A segment without tokens on this rank has length 0. `position_in_segment` counts tokens of the part, not of the
        sample; for token positions, split the row's own.
        """
        self.check_rank(rank)
        return self._local_segments[rank]

    # ------------------------------------------------------------------ split and join

    def cut(self, tensor: torch.Tensor, rank: int, *, token_dim: int = -1) -> torch.Tensor:
        """Return the part of `rank`: T tokens along `token_dim` become t. Differentiable; contiguous parts are views.

        Raises:
            LayoutError: the tensor is not a row of these segments, or there is no such rank.
        """
        self.check_rank(rank)
        self._check_width(tensor, token_dim, self.segments.total, "the row")
        if self._in_order:
            return tensor.narrow(token_dim, rank * self.local_total, self.local_total)
        index = self.index(rank, tensor.device)  # separate statement: a compiled graph breaks here
        return _select(tensor, index, token_dim)

    def join(self, parts: Sequence[torch.Tensor], *, token_dim: int = -1) -> torch.Tensor:
        """Join the parts of all ranks, in the order of ranks, into the row: the inverse of `cut`. Differentiable.

        Raises:
            LayoutError: the number of parts is not the number of ranks, or a part has another width.
        """
        if len(parts) != self.ranks:
            raise LayoutError(f"a row on {self.ranks} ranks is joined from {self.ranks} parts, got {len(parts)}")
        for rank, part in enumerate(parts):
            self._check_width(part, token_dim, self.local_total, f"the part of rank {rank}")
        laid = torch.cat(list(parts), token_dim)
        if self._in_order:
            return laid
        place = self.place(laid.device)
        return _select(laid, place, token_dim)

    def _check_width(self, tensor: torch.Tensor, token_dim: int, expected: int, what: str) -> None:
        if tensor.shape[token_dim] != expected:
            raise LayoutError(
                f"{what} is {expected} tokens wide by its boundaries, the tensor {list(tensor.shape)} has "
                f"{tensor.shape[token_dim]} at dimension {token_dim}"
            )

    # ------------------------------------------------------------------ computed once per row

    @property
    def _in_order(self) -> bool:
        return self.layout == "contiguous" or self.ranks == 1

    @outside_graph
    def _derived(self, what: Hashable, device: torch.device | str, make: Callable[[], np.ndarray]) -> torch.Tensor:
        return self.segments.derived((what, self.layout, self.ranks), device, make)

    def _index(self, rank: int) -> np.ndarray:
        if self._in_order:
            return np.arange(rank * self.local_total, (rank + 1) * self.local_total)
        starts_G = np.asarray(self.segments.stride[:-1], np.int64)
        chunks_G = np.asarray(self.segments.slots, np.int64) // (2 * self.ranks)
        mirrors_G2 = starts_G[:, None] + chunks_G[:, None] * [rank, 2 * self.ranks - 1 - rank]
        return ranges(mirrors_G2.ravel(), np.repeat(chunks_G, 2))

    def _place(self) -> np.ndarray:
        place = np.empty(self.segments.total, np.int64)
        place[np.concatenate([self._index(rank) for rank in range(self.ranks)])] = np.arange(self.segments.total)
        return place

    @cached_property
    def _local_segments(self) -> list[Segments]:
        whole, found = self.segments, []
        stops = [stop for _, stop in whole.spans]
        for rank in range(self.ranks):
            starts, ends = (np.searchsorted(self._index(rank), edges) for edges in (whole.stride, stops))
            lengths, slots = (ends - starts[:-1]).tolist(), np.diff(starts).tolist()
            found.append(replace(whole, lengths=tuple(lengths), slots=tuple(slots), total=self.local_total))
        return found


def _select(tensor: torch.Tensor, index: torch.Tensor, token_dim: int) -> torch.Tensor:
    """Index select; along the last dimension, `gather` is 15 times as fast on the host for several rows of numbers."""
    if token_dim in (-1, tensor.ndim - 1):
        return tensor.gather(-1, index.expand(*tensor.shape[:-1], -1))
    return tensor.index_select(token_dim, index)


def _check_mirrored(segments: Segments, ranks: int) -> None:
    for i, slot in enumerate(segments.slots):
        if slot % (2 * ranks):
            raise LayoutError(
                f"segment {i}: {slot} tokens of row are not a multiple of 2 * ranks = {2 * ranks}, and a mirrored cut "
                f"would hold tokens twice and lose others; pack with SlotRule(multiple={2 * ranks}), or cut "
                "contiguously"
            )
    tail = segments.total - segments.stride[-1]
    if tail:
        raise LayoutError(
            f"{tail} tokens lie behind the last boundary {segments.stride[-1]}, in no segment, and a mirrored cut "
            "would lose them; put them into the last slot (SlotRule(tail_in_slot=True)), or cut contiguously"
        )
