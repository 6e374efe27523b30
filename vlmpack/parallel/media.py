"""Which rank computes which image of a row, and to whom its features go.

Images of 16, 64, 16 and 32 patches on 2 ranks, 4 patches to a token:

    image           0           1                                    2           3
    rank            1           0                                    1           1
    features        0 1 2 3     4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19     ...

An image's features are computed by one rank and put on the tokens of any. P patches, F features of all images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapreplace
from itertools import accumulate
from math import prod
from typing import final

import numpy as np
import torch

from vlmpack.errors import LayoutError
from vlmpack.layout import Grid
from vlmpack.layout.device import to_device
from vlmpack.parallel.partition import Partition, stretches


@final
@dataclass(frozen=True, kw_only=True)
class MediaShare:
    """The images (or the videos) of one row, each computed by one rank."""

    grids: tuple[Grid, ...]
    """(frames, rows, columns) in patches of each, in row order."""
    rank_of: tuple[int, ...]
    """The rank that computes each."""
    ranks: int
    """How many ranks there are."""
    merge: int = 2
    """Patches merged into one token along each side."""

    @classmethod
    def spread(cls, grids: Sequence[Grid], *, ranks: int, merge: int = 2) -> MediaShare:
        """Most patches first, each to the rank that has fewest so far: no rank has 4/3 of what it must have."""
        load = [(0, rank) for rank in range(ranks)]
        rank_of = [0] * len(grids)
        for item in sorted(range(len(grids)), key=lambda i: -prod(grids[i])):
            patches, rank = load[0]
            heapreplace(load, (patches + prod(grids[item]), rank))
            rank_of[item] = rank
        return cls(grids=tuple(grids), rank_of=tuple(rank_of), ranks=ranks, merge=merge)

    # ------------------------------------------------------------------ what is whose

    @property
    def patches(self) -> tuple[int, ...]:
        """Patches of each image."""
        return tuple(map(prod, self.grids))

    @property
    def features(self) -> tuple[int, ...]:
        """Tokens of each image."""
        return tuple(patches // self.merge**2 for patches in self.patches)

    @property
    def load(self) -> tuple[int, ...]:
        """Patches that each rank computes."""
        counts = np.bincount(self.rank_of, self.patches, minlength=self.ranks) if self.grids else np.zeros(self.ranks)
        return tuple(int(n) for n in counts)

    def items(self, rank: int) -> tuple[int, ...]:
        """The images that `rank` computes, rising."""
        return tuple(item for item, owner in enumerate(self.rank_of) if owner == rank)

    def take(self, pixels_PC: torch.Tensor, rank: int) -> torch.Tensor:
        """[P, C] patches of all images to those that `rank` computes.

        Raises:
            LayoutError: another number of patches than the grids describe.
        """
        if pixels_PC.shape[0] != sum(self.patches):
            raise LayoutError(
                f"the grids describe {sum(self.patches)} patches, the pixels are {list(pixels_PC.shape)}; "
                "pass the media of the whole row to every rank"
            )
        parts = pixels_PC.split(list(self.patches)) if self.grids else ()
        mine = [parts[item] for item in self.items(rank)]
        return torch.cat(mine) if mine else pixels_PC[:0]

    def pick(self, of_each: torch.Tensor, rank: int) -> torch.Tensor:
        """One entry for each image along the first dimension (its grid) to those of the images of `rank`."""
        return of_each.index_select(0, to_device(np.asarray(self.items(rank), np.int64), of_each.device))

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """[f, D] features as each rank computed them, in the order of ranks, to [F, D] in row order. Differentiable."""
        laid = torch.cat(list(parts))
        return laid.index_select(0, to_device(np.argsort(self._order), laid.device))

    # ------------------------------------------------------------------ where features go

    def route(self, token_types: torch.Tensor, kind: int, partition: Partition, rank: int) -> Route:
        """What `rank` sends to whom, and where what it gets belongs.

        Args:
            token_types: [1, T] of the whole row: 0 text, 1 image, 2 video. Waits for them if they lie on a device.
            kind: 1 if these are the images, 2 if they are the videos.
            partition: who holds which token.
            rank: the rank.

        Raises:
            LayoutError: another number of such tokens than the grids make.
        """
        tokens_F = np.flatnonzero(token_types[0].cpu().numpy() == kind)
        if len(tokens_F) != sum(self.features):
            raise LayoutError(
                f"the grids make {sum(self.features)} tokens, but the row has {len(tokens_F)} of type {kind}; "
                "every placeholder needs its pixels, and the other way round"
            )
        place_F = partition.place().numpy()[tokens_F]
        source_F, target_F = np.repeat(self.rank_of, self.features), place_F // partition.local_total
        mine, arriving = np.flatnonzero(source_F == rank), np.flatnonzero(target_F == rank)
        arriving = arriving[np.argsort(source_F[arriving], kind="stable")]
        return Route(
            send=torch.from_numpy(np.argsort(target_F[mine], kind="stable")),
            send_counts=_counts(target_F[mine], self.ranks),
            receive_counts=_counts(source_F[arriving], self.ranks),
            tokens=torch.from_numpy(place_F[arriving] % partition.local_total),
            items=tuple(np.unique(np.repeat(np.arange(len(self.grids)), self.features)[arriving]).tolist()),
        )

    @cached_property
    def _order(self) -> np.ndarray:
        """int64 [F]: the number in the row of each feature, as ranks compute them, one rank after the other."""
        items = sorted(range(len(self.grids)), key=lambda i: (self.rank_of[i], i))
        firsts = list(accumulate(self.features, initial=0))
        return stretches(
            np.asarray([firsts[i] for i in items], np.int64), np.asarray([self.features[i] for i in items], np.int64)
        )


@final
@dataclass(frozen=True, kw_only=True)
class Route:
    """The features that one rank sends and gets in one exchange of all ranks."""

    send: torch.Tensor
    """int64: the rank's own features in the order in which they are sent, rank after rank."""
    send_counts: tuple[int, ...]
    """How many go to each rank."""
    receive_counts: tuple[int, ...]
    """How many come from each rank."""
    tokens: torch.Tensor
    """int64: the place in the rank's part of the row of each feature that it gets, in the order in which they come."""
    items: tuple[int, ...]
    """The images whose tokens this rank holds, all of them or some."""


def _counts(ranks: np.ndarray, total: int) -> tuple[int, ...]:
    return tuple(np.bincount(ranks, minlength=total).tolist())
