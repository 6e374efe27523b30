"""Deal the images of a step to ranks, move their pixels there, and their features to the ranks of their tokens.

Rank 0 has a row with images of 64, 16, 16 and 32 patches, 4 patches to a token, and rank 1 a row without images:

    image        0                  1           2               3
    rank         0                  1           1               1
    pixels       stay               0 ▶ 1       0 ▶ 1           0 ▶ 1
    features     0 ... 15           16 ... 19   20 ... 23       24 ... 31       1 ▶ 0, and their gradients 0 ▶ 1

One rank computes an image, never a part of it; any ranks may hold its tokens. "Image" means image, tile or video:
whatever the tower computes separately. Pixels have entries (patches, or tiles), and so have masks and positions that go
with them. F features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np
import torch
from torch import distributed as dist

from vlmpack.context_parallel.collectives import Collectives, Transfers
from vlmpack.errors import LayoutError
from vlmpack.layout.device import to_device
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
@dataclass(frozen=True, kw_only=True)
class Entry:
    """The entries of a tensor along its first axis."""

    dtype: torch.dtype
    """Their dtype."""
    shape: tuple[int, ...]
    """The shape of one."""
    pads: bool = False
    """Whether those of a step are padded with zeros to a common shape."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Image:
    """One image, as its rank tells the others: no pixels."""

    cost: int
    """Its cost in the vision tower."""
    tokens: int
    """Number of its placeholders, which is its number of features."""
    call: int = 0
    """Index of the tower's call that computes it."""
    entries: Mapping[str, int] = field(default_factory=dict)
    """Number of its entries in each tensor that is sent: pixels, masks, positions."""
    told: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Its entries in tensors whose values the host knows: grids, sizes, counts."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class RowMedia:
    """The images of one row, as its rank tells the others: nothing of the text."""

    images: tuple[Image, ...] = ()
    """The images, in the order of the row's tensors."""
    tensors: Mapping[str, Entry] = field(default_factory=dict)
    """The tensors that are sent."""
    parts_F: np.ndarray | None = None
    """int16: index of the context rank that holds the placeholder of each feature; None: one rank holds the row."""


@final
class StepMedia:
    """The images of all rows of a step, numbered row by row, and the ranks that compute them.

    Raises:
        LayoutError: the tensors of two rows differ in dtype or in the shape of an entry, or only one row has them.
    """

    def __init__(self, rows: Sequence[RowMedia], holders_DC: np.ndarray) -> None:
        """`holders_DC`: int64, the rank that holds each of C parts of each of D rows; all C ranks have its pixels."""
        self.rows, self.holders_DC, self.ranks = tuple(rows), holders_DC, holders_DC.size
        self.images = [image for row in rows for image in row.images]
        """The images."""
        self.row_of = np.repeat(np.arange(len(rows)), [len(row.images) for row in rows])
        """int64 [N]: the row of each image."""
        holders = [self.holders_DC[row].tolist() for row in self.row_of]
        self.rank_of = np.asarray(deal([image.cost for image in self.images], holders, self.ranks), int)
        """int64 [N]: the rank that computes each image."""
        self._calls = np.asarray([image.call for image in self.images], int)
        self._tokens = np.asarray([image.tokens for image in self.images], int)
        self.tensors = {name: self._entry(name) for row in rows for name in row.tensors}
        """The tensors that are sent."""
        for name in {name: None for image in self.images for name in (*image.entries, *image.told)}:
            has = np.asarray([name in image.entries or name in image.told for image in self.images])
            if not name.startswith("pixel_values") and np.isin(self._calls[~has], self._calls[has]).any():
                raise LayoutError(f"{_TOGETHER} have {name}, and some have none; {_ONE_PROCESSOR}")

    def _entry(self, name: str) -> Entry:
        """Return the dtype and shape of a tensor's entries in all rows."""
        first, *others = [row.tensors[name] for row in self.rows if name in row.tensors]
        for other in others:
            if other.dtype != first.dtype or not (first.pads or other.shape == first.shape):
                raise LayoutError(
                    f"{_TOGETHER} have {name} of {first.dtype} {list(first.shape)} and of {other.dtype} "
                    f"{list(other.shape)}; {_ONE_PROCESSOR}"
                )
        return replace(first, shape=tuple(np.max([entry.shape for entry in (first, *others)], 0).astype(int).tolist()))

    def items(self, rank: int, call: int = 0) -> list[int]:
        """Return the images that `rank` computes in a call, in increasing order."""
        return np.flatnonzero((self.rank_of == rank) & (self._calls == call)).tolist()

    def told(self, items: Sequence[int]) -> dict[str, list[Any]]:
        """Return the entries of these images in the tensors whose values the host knows."""
        names = {name: None for item in items for name in self.images[item].told}
        return {name: [entry for item in items for entry in self.images[item].told[name]] for name in names}

    def tokens(self, items: Sequence[int]) -> int:
        """Return the number of features of these images."""
        return int(self._tokens[items].sum())

    def send(self, name: str) -> Transfers:
        """Return how entries of a tensor go from their rows to the ranks that compute them.

        Where several ranks hold a row's pixels, the one with the context index of the receiver sends them.
        """
        part_R = np.empty(self.ranks, np.int64)
        part_R[self.holders_DC] = np.arange(self.holders_DC.shape[1])
        counts_N = np.asarray([image.entries.get(name, 0) for image in self.images], int)
        source_N = self.holders_DC[self.row_of, part_R[self.rank_of]]
        sizes_D = np.bincount(self.row_of, counts_N, len(self.rows)).astype(int)
        local_P = ranges(np.zeros_like(sizes_D), sizes_D)
        return Transfers(
            source=source_N.repeat(counts_N), local=local_P, target=self.rank_of.repeat(counts_N), ranks=self.ranks
        )

    def send_features(self, call: int = 0) -> Transfers:
        """Return where each feature of a call is computed, and which rank needs it for its placeholder."""
        sizes = [sum(image.tokens for image in row.images) for row in self.rows]
        parts = [np.zeros(n, int) if x.parts_F is None else x.parts_F for n, x in zip(sizes, self.rows, strict=True)]
        of_call = self._calls.repeat(self._tokens) == call
        source_F, row_F = (of_N.repeat(self._tokens)[of_call] for of_N in (self.rank_of, self.row_of))
        target_F = self.holders_DC[row_F, np.concatenate(parts)[of_call]]
        local_F = np.empty(len(source_F), np.int64)
        for rank in range(self.ranks):
            is_own = source_F == rank
            local_F[is_own] = np.arange(is_own.sum())
        return Transfers(source=source_F, local=local_F, target=target_F, ranks=self.ranks)


_TOGETHER = "of the rows of a step whose images ranks compute together, some"
_ONE_PROCESSOR = "let one processor make them all"


@final
class VisionRanks:
    """The ranks that divide the images of a step among them; they may hold different rows."""

    def __init__(self, collectives: Collectives, holders_DC: np.ndarray, host: Collectives | None = None) -> None:
        self.collectives, self.rank = collectives, collectives.rank
        """The ranks, for tensors, and the index of this one."""
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
        moves = bool((transfers.source != transfers.target).any())
        if moves or len(route.send) < len(x):
            x = x.index_select(0, to_device(route.send.numpy(), x.device))
        if not moves:
            return x
        arrived = self.collectives.all_to_all(x, what, route.send_counts, route.receive_counts)
        order = np.argsort(transfers.arriving(self.rank), kind="stable")
        is_sorted = (order[1:] > order[:-1]).all()
        return arrived if is_sorted else arrived.index_select(0, to_device(order, arrived.device))

    @property
    def sent(self) -> dict[str, int]:
        """Bytes that this rank sent to others, by purpose."""
        return {**self.collectives.sent, **({} if self.host is None else self.host.sent)}
