"""Tokens of other ranks that a roll to the left reads: one exchange serves every segment and every depth.

Slots of 8 and 4 tokens, mirrored on 2 ranks, depth 1:

    row      a b c d e f g h   i j k l
    rank 0   a b         g h   i     l    needs c, which follows b, and j, which follows i
    rank 1       c d e f         j k      needs g and l

K depths, h tokens of the halo, t tokens of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import final

import numpy as np
import torch

from vlmpack.errors import LayoutError
from vlmpack.layout import outside_graph, stops_of_tokens
from vlmpack.parallel.partition import Partition
from vlmpack.parallel.route import Route, Transfers


@final
@dataclass(frozen=True, kw_only=True)
class Halo:
    """What each rank needs to roll its part of a row by 1, ..., K tokens."""

    partition: Partition
    """Who holds which token."""
    depth: int
    """K, the most tokens that a part is rolled by."""

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise LayoutError(f"a halo serves rolls by 1 token and more, got depth={self.depth}")

    def route(self, rank: int) -> Route:
        """What `rank` sends of its part to whom, and how many tokens come from each rank: at most K a stretch of it."""
        self.partition.check_rank(rank)
        return self._transfers.route(rank)

    def places(self, rank: int) -> torch.Tensor:
        """int64 [h]: the place in the row of each token that comes to `rank`, in the order in which they come."""
        self.partition.check_rank(rank)
        return torch.from_numpy(self._places(rank))

    def roll_left(
        self,
        part: torch.Tensor,
        halo: torch.Tensor,
        rank: int,
        *,
        depth: int = 1,
        fill: float,
        token_dim: int = -1,
    ) -> torch.Tensor:
        """The part of `rank` of what `vlmpack.layout.roll_left` makes of the whole row. Differentiable.

        Args:
            part: what `rank` holds, t tokens along `token_dim`.
            halo: what came to it by its `route`, h tokens along `token_dim`.
            rank: whose part.
            depth: tokens to move by, 1 to K.
            fill: what the last `depth` tokens of a segment and padding get.
            token_dim: the dimension of tokens.

        Raises:
            LayoutError: a depth that this halo does not serve, or tensors of another width.
        """
        if not 1 <= depth <= self.depth:
            raise LayoutError(f"this halo serves rolls by 1 to {self.depth} tokens, got depth={depth}")
        seen, needed = (part.shape[token_dim], halo.shape[token_dim]), (self.partition.local_total, self._size(rank))
        if seen != needed:
            raise LayoutError(
                f"rank {rank} rolls its {needed[0]} tokens with {needed[1]} that come to it, got {seen[0]} and "
                f"{seen[1]} at dimension {token_dim}"
            )
        source = self._derived(self._source, rank, depth, part.device)
        ends = self._derived(self._ends, rank, depth, part.device)
        return torch.cat([part, halo], token_dim).index_select(token_dim, source).index_fill_(token_dim, ends, fill)

    # ------------------------------------------------------------------ made once for a row

    @cached_property
    def _wanted(self) -> tuple[np.ndarray, np.ndarray]:
        """(rank, place) of every token that a rank needs and does not hold, each int64 [N], both rising.

        Such a token lies fewer than K places behind the start of a stretch of the row that another rank holds.
        """
        total, stops = self.partition.segments.total, stops_of_tokens(self.partition.segments)
        depth = min(self.depth, total)
        owner = self.partition.place().numpy() // self.partition.local_total
        starts = np.flatnonzero(owner[1:] != owner[:-1]) + 1
        tokens = (starts[:, None] + np.arange(depth)).ravel()
        tokens = tokens[tokens < total, None]
        before = tokens - np.arange(1, depth + 1)
        apart = (before >= 0) & (owner[before] != owner[tokens]) & (tokens < stops[before])
        wanted = np.zeros(self.partition.ranks * total, bool)
        wanted[(owner[before] * total + tokens)[apart]] = True
        return np.divmod(np.flatnonzero(wanted), total)

    @cached_property
    def _transfers(self) -> Transfers:
        target, tokens = self._wanted
        source, local = np.divmod(self.partition.place().numpy()[tokens], self.partition.local_total)
        return Transfers(source=source, local=local, target=target, ranks=self.partition.ranks)

    @outside_graph
    def _size(self, rank: int) -> int:
        self.partition.check_rank(rank)
        return len(self._places(rank))

    def _places(self, rank: int) -> np.ndarray:
        return self._wanted[1][self._transfers.arriving(rank)]

    @outside_graph
    def _derived(
        self, make: Callable[[int, int], np.ndarray], rank: int, depth: int, device: torch.device
    ) -> torch.Tensor:
        partition = self.partition
        key = ("halo", make.__name__, partition.layout, partition.ranks, self.depth, rank, depth)
        return partition.segments.derived(key, device, partial(make, rank, depth))

    def _ends(self, rank: int, depth: int) -> np.ndarray:
        """int64: where in the part of `rank` no token of the same segment comes `depth` places later in the row."""
        index = self.partition.index(rank).numpy()
        return np.flatnonzero(index + depth >= stops_of_tokens(self.partition.segments)[index])

    def _source(self, rank: int, depth: int) -> np.ndarray:
        """int64 [t]: the place, in the part with its halo behind it, of the token that follows each; 0 at ends."""
        index, halo = self.partition.index(rank).numpy(), self._places(rank)
        place = np.zeros(self.partition.segments.total + depth, np.int64)
        place[index], place[halo] = np.arange(len(index)), len(index) + np.arange(len(halo))
        return place[index + depth]
