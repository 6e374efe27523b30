"""Spread the images of a row over ranks, and route their features to their tokens.

Images of 16, 64, 16 and 32 patches on 2 ranks, 4 patches to a token:

    image           0           1                                    2           3
    rank            1           0                                    1           1
    features        0 1 2 3     4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19     ...

An image's features are computed by one rank and put on the tokens of any. P patches, F features of all images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapreplace
from typing import final

import numpy as np
import torch

from vlmpack.context_parallel.collectives import Route, Transfers
from vlmpack.context_parallel.partition import Partition
from vlmpack.errors import LayoutError
from vlmpack.layout.device import to_device
from vlmpack.layout.media import Grid, Medium, placeholders


@final
@dataclass(frozen=True, kw_only=True)
class MediaShare:
    """The images (or the videos) of one row, each computed by one rank."""

    media: tuple[Medium, ...]
    """Each, with its grid, in row order."""
    rank_of: tuple[int, ...]
    """The rank that computes each."""
    ranks: int
    """Number of ranks."""

    @classmethod
    def spread(cls, media: Sequence[Medium], *, ranks: int) -> MediaShare:
        """Most patches first, each to the rank that has fewest so far: at most 4/3 of the best that can be done.

        Args:
            media: images or videos with grids, in row order.
            ranks: how many ranks there are.
        """
        load = [(0, rank) for rank in range(ranks)]
        rank_of = [0] * len(media)
        for item in sorted(range(len(media)), key=lambda i: -media[i].patches):
            patches, rank = load[0]
            heapreplace(load, (patches + media[item].patches, rank))
            rank_of[item] = rank
        return cls(media=tuple(media), rank_of=tuple(rank_of), ranks=ranks)

    def of_kind(self, kind: int) -> MediaShare:
        """The share of the images, or of the videos, among these media."""
        pairs = [(medium, rank) for medium, rank in zip(self.media, self.rank_of, strict=True) if medium.kind == kind]
        return replace(self, media=tuple(medium for medium, _ in pairs), rank_of=tuple(rank for _, rank in pairs))

    # ------------------------------------------------------------------ what is whose

    @property
    def patches(self) -> tuple[int, ...]:
        """Patches of each image."""
        return tuple(medium.patches for medium in self.media)

    def num_features(self, rank: int) -> int:
        """Features that `rank` computes, one for each placeholder."""
        return sum(self.media[item].tokens for item in self.items(rank))

    def grids(self, rank: int) -> list[Grid]:
        """The grids of the images that `rank` computes."""
        return [grid for item in self.items(rank) if (grid := self.media[item].grid) is not None]

    @property
    def load(self) -> tuple[int, ...]:
        """Patches that each rank computes."""
        patches = self.patches
        return tuple(sum(patches[item] for item in self.items(rank)) for rank in range(self.ranks))

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
        parts = pixels_PC.split(list(self.patches)) if self.media else ()
        of_rank = [parts[item] for item in self.items(rank)]
        return torch.cat(of_rank) if of_rank else pixels_PC[:0]

    def pick(self, of_each: torch.Tensor, rank: int) -> torch.Tensor:
        """One entry for each image along the first dimension (its grid) to those of the images of `rank`."""
        return of_each.index_select(0, to_device(np.asarray(self.items(rank), np.int64), of_each.device))

    # ------------------------------------------------------------------ where features go

    def route(self, partition: Partition, rank: int) -> MediaRoute:
        """Return the routes of `rank`: what it sends to each rank, and where received features belong.

        Args:
            partition: who holds which token.
            rank: the rank.
        """
        tokens_F = placeholders(self.media, partition.segments)
        target_F, local_F = np.divmod(partition.place().numpy()[tokens_F], partition.local_total)
        transfers = Transfers(source=self._owner, local=self._local, target=target_F, ranks=self.ranks)
        arriving = transfers.arriving(rank)
        return MediaRoute(
            route=transfers.route(rank),
            tokens=torch.from_numpy(local_F[arriving]),
            items=tuple(np.unique(self._item[arriving]).tolist()),
        )

    # ------------------------------------------------------------------ of each of F features, int64, made once

    @cached_property
    def _item(self) -> np.ndarray:
        """The image it belongs to."""
        return np.repeat(np.arange(len(self.media)), [medium.tokens for medium in self.media])

    @cached_property
    def _owner(self) -> np.ndarray:
        """The rank that computes it."""
        return np.asarray(self.rank_of, np.int64)[self._item]

    @cached_property
    def _place(self) -> np.ndarray:
        """Its place among the features that all ranks compute, one rank after the other."""
        place = np.empty(len(self._owner), np.int64)
        place[np.argsort(self._owner, kind="stable")] = np.arange(len(place))
        return place

    @property
    def _local(self) -> np.ndarray:
        """Its place among the features of the rank that computes it."""
        firsts = np.searchsorted(np.sort(self._owner), np.arange(self.ranks))
        return self._place - firsts[self._owner]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class MediaRoute:
    """The features that one rank sends and gets in one exchange of all ranks."""

    route: Route
    """The receiver of each feature that this rank computes, and how many come from each rank."""
    tokens: torch.Tensor
    """int64: the place in the rank's part of the row of each feature that it gets, in the order in which they come."""
    items: tuple[int, ...]
    """The images whose tokens this rank holds, all of them or some."""
