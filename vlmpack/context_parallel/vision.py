"""Deal the images of a step to ranks, move their pixels there, and their features to the ranks of their tokens.

Rank 0 has a row with images of 64, 16, 16 and 32 patches, 4 patches to a token, and rank 1 a row without images:

    image        0                  1           2               3
    rank         0                  1           1               1
    pixels       stay               0 ▶ 1       0 ▶ 1           0 ▶ 1
    features     0 ... 15           16 ... 19   20 ... 23       24 ... 31       1 ▶ 0, and their gradients 0 ▶ 1

One rank computes an image, never a part of it; any ranks may hold its tokens. "Image" means image or video. P entries
of pixels (patches, or tiles), F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np
import torch
from torch import distributed as dist

from vlmpack.context_parallel.collectives import Collectives, Transfers
from vlmpack.errors import LayoutError
from vlmpack.layout.device import to_device
from vlmpack.layout.media import Grid
from vlmpack.layout.segments import ranges

_CLOSE = 1.01
"""Ranks are balanced if the longest one computes this many times the mean."""


def deal(costs: Sequence[int], holders: Sequence[Sequence[int]], ranks: int) -> list[int]:
    """Choose the rank that computes each image.

    First, largest first, each image stays on a rank that holds its pixels, as long as that rank has no more than the
    mean. Then the others, largest first, each go to the rank with the least. Last, the rank with the most gives an
    image away, or exchanges it for a smaller one, while that makes the longer of the two ranks shorter.

    Args:
        costs: cost of each image: whole numbers, so that every machine chooses alike.
        holders: the ranks that hold the pixels of each image.
        ranks: number of ranks.

    Returns:
        The rank of each image. No rank has more than the mean and one image.
    """
    cost_N, load_R = np.asarray(costs, np.int64), np.zeros(ranks, np.int64)
    rank_N, total = np.full(len(cost_N), -1), int(cost_N.sum())
    largest_first = np.argsort(-cost_N, kind="stable").tolist()

    def give(item: int, rank: int) -> None:
        rank_N[item] = rank
        load_R[rank] += cost_N[item]

    for item in largest_first:
        rank = min(holders[item], key=load_R.__getitem__)
        if (load_R[rank] + cost_N[item]) * ranks <= total:
            give(item, rank)
    for item in largest_first:
        if rank_N[item] < 0:
            give(item, int(load_R.argmin()))
    while load_R.max() * ranks > _CLOSE * total:
        longest = int(load_R.argmax())
        given, taken = np.flatnonzero(rank_N == longest), np.flatnonzero(rank_N != longest)
        takers = np.append(rank_N[taken], np.delete(np.arange(ranks), longest))  # for an image, or for nothing
        less = cost_N[given, None] - np.append(cost_N[taken], np.zeros(ranks - 1, np.int64))
        longer = np.maximum(load_R[longest] - less, load_R[takers] + less)
        at, to = np.unravel_index(longer.argmin(), longer.shape)
        if longer[at, to] >= load_R[longest]:
            break
        rank_N[given[at]] = takers[to]
        if to < len(taken):
            rank_N[taken[to]] = longest
        load_R[longest] -= less[at, to]
        load_R[takers[to]] += less[at, to]
    return rank_N.tolist()


# ---------------------------------------------------------------------- the images of a step


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class RowMedia:
    """The images of one row, as its rank tells the others: no pixels, and nothing of the text."""

    costs: tuple[int, ...] = ()
    """Cost of each image in the vision tower, in the order of the row's pixels."""
    entries: tuple[int, ...] = ()
    """Number of entries of each image along the first axis of the pixels: patches, or tiles."""
    tokens: tuple[int, ...] = ()
    """Number of placeholders of each image, which is its number of features."""
    grids: tuple[Grid, ...] = ()
    """Grid of each image; (): the family's images have none."""
    parts_F: np.ndarray | None = None
    """int16: index of the context rank that holds the placeholder of each feature; None: one rank holds the row."""
    pixels: tuple[torch.dtype, tuple[int, ...]] | None = None
    """dtype and shape of an entry; None: there are no images."""


@final
class StepMedia:
    """The images of all rows of a step, numbered row by row, and the ranks that compute them.

    Raises:
        LayoutError: the pixels of two rows differ in dtype or in the shape of an entry.
    """

    def __init__(self, rows: Sequence[RowMedia], holders_DC: np.ndarray) -> None:
        """`holders_DC`: int64, the rank that holds each of C parts of each of D rows; all C ranks have its pixels."""
        self.rows, self.holders_DC, self.ranks = tuple(rows), holders_DC, holders_DC.size
        self.row_of = np.repeat(np.arange(len(rows)), [len(row.costs) for row in rows])
        """int64 [N]: the row of each image."""
        costs = [cost for row in rows for cost in row.costs]
        self.rank_of = np.asarray(deal(costs, [self.holders_DC[row].tolist() for row in self.row_of], self.ranks), int)
        """int64 [N]: the rank that computes each image."""
        kinds = [row.pixels for row in rows if row.pixels is not None]
        self.pixels = kinds[0] if kinds else None
        """dtype and shape of an entry of the pixels; None: the step has no images."""
        if odd := next((kind for kind in kinds if kind != kinds[0]), None):
            raise LayoutError(
                f"the rows of a step whose images ranks compute together have pixels of {kinds[0][0]} "
                f"{list(kinds[0][1])} and of {odd[0]} {list(odd[1])}; let one processor make them all"
            )

    def items(self, rank: int) -> list[int]:
        """Return the images that `rank` computes, in increasing order."""
        return np.flatnonzero(self.rank_of == rank).tolist()

    def grids(self, rank: int) -> list[Grid]:
        """Return the grids of the images that `rank` computes."""
        grids = [grid for row in self.rows for grid in row.grids]
        return [grids[item] for item in self.items(rank)] if grids else []

    @cached_property
    def send_pixels(self) -> Transfers:
        """Return how entries of pixels go from their rows to the ranks that compute them.

        Where several ranks hold a row's pixels, the one with the context index of the receiver sends them.
        """
        part_R = np.empty(self.ranks, np.int64)
        part_R[self.holders_DC] = np.arange(self.holders_DC.shape[1])
        counts_N, source_N = self._of_images("entries"), self.holders_DC[self.row_of, part_R[self.rank_of]]
        source_P, target_P = source_N.repeat(counts_N), self.rank_of.repeat(counts_N)
        sizes_D = [sum(row.entries) for row in self.rows]
        local_P = ranges(np.zeros(len(sizes_D), np.int64), np.asarray(sizes_D, np.int64))
        return Transfers(source=source_P, local=local_P, target=target_P, ranks=self.ranks)

    @cached_property
    def send_features(self) -> Transfers:
        """Return where each feature is computed and which rank needs it for its placeholder."""
        counts_N = self._of_images("tokens")
        source_F, row_F = self.rank_of.repeat(counts_N), self.row_of.repeat(counts_N)
        local_F = np.empty(len(source_F), np.int64)
        for rank in range(self.ranks):
            is_own = source_F == rank
            local_F[is_own] = np.arange(is_own.sum())
        parts = [np.zeros(sum(row.tokens), np.int64) if row.parts_F is None else row.parts_F for row in self.rows]
        target_F = self.holders_DC[row_F, np.concatenate(parts)]
        return Transfers(source=source_F, local=local_F, target=target_F, ranks=self.ranks)

    def _of_images(self, name: str) -> np.ndarray:
        return np.asarray([count for row in self.rows for count in getattr(row, name)], np.int64)


@final
class VisionRanks:
    """The ranks that divide the images of a step among them; they may hold different rows."""

    def __init__(self, collectives: Collectives, holders_DC: np.ndarray, host: Collectives | None = None) -> None:
        self.collectives = collectives
        """The ranks, for tensors."""
        self.holders_DC = holders_DC
        """int64: the rank that holds each of C parts of each of D rows."""
        self.host = host
        """The ranks, for what the host tells; None: they share one row, so that nothing is told."""

    @classmethod
    def of_row(cls, context: Collectives) -> VisionRanks:
        """Return the ranks of one row."""
        return cls(context, np.arange(context.size)[None])

    @classmethod
    def of_step(cls, ranks_GDC: torch.Tensor) -> VisionRanks:
        """Return the ranks of all rows of a step. All ranks of the job call it, and make groups together.

        Args:
            ranks_GDC: int64, the job's rank that holds each of C parts of each of D rows, in each of G groups that have
                the same rows (tensor parallel ranks).
        """
        groups = [sorted(ranks.tolist()) for ranks in ranks_GDC.flatten(1)]
        (own,) = (at for at, members in enumerate(groups) if dist.get_rank() in members)
        made: Any = [dist.new_subgroups_by_enumeration(groups, backend=backend)[0] for backend in (None, "gloo")]
        tensors, host = map(Collectives, made)
        return cls(tensors, np.searchsorted(groups[own], ranks_GDC[own].numpy()), host)

    @property
    def rank(self) -> int:
        """Index of this rank."""
        return self.collectives.rank

    def step(self, own: RowMedia) -> StepMedia:
        """Return the images of the step; waits until all ranks have told theirs."""
        if self.host is None:
            return StepMedia([own], self.holders_DC)
        is_first = self.rank in self.holders_DC[:, 0]  # the other ranks of a row would say the same
        told = self.host.all_gather_objects(own if is_first else None, "sizes")
        return StepMedia([told[rank] for rank in self.holders_DC[:, 0]], self.holders_DC)

    def send(self, transfers: Transfers, x: torch.Tensor, what: str) -> torch.Tensor:
        """Exchange entries and return what arrives, in the order of the transfers; sends nothing if none moves."""
        route = transfers.route(self.rank)
        if (transfers.source == transfers.target).all():
            return x if len(route.send) == len(x) else x.index_select(0, route.sent_from(x.device))
        arrived = self.collectives.along(route, x, what)
        order = np.argsort(transfers.arriving(self.rank), kind="stable")
        is_sorted = (order[1:] > order[:-1]).all()
        return arrived if is_sorted else arrived.index_select(0, to_device(order, arrived.device))

    @property
    def sent(self) -> dict[str, int]:
        """Bytes that this rank sent to others, by purpose."""
        return {**self.collectives.sent, **({} if self.host is None else self.host.sent)}
