"""Spread the images of a row over ranks, and send their features to the ranks that hold their tokens.

Images of 16, 64, 16 and 32 patches on 2 ranks, 4 patches to a token:

    image           0           1                                    2           3
    rank            1           0                                    1           1
    features        0 1 2 3     4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19     ...

One rank computes an image's features; any ranks may hold its tokens. P patches, F features of all images.
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
    """The images and videos of one row, each computed by one rank; "image" below means either."""

    media: tuple[Medium, ...]
    """The images, with their grids, in row order."""
    rank_of: tuple[int, ...]
    """The rank that computes each image."""
    ranks: int
    """Number of ranks."""

    @classmethod
    def spread(cls, media: Sequence[Medium], *, ranks: int) -> MediaShare:
        """Assign images to ranks, largest first, each to the rank with the fewest patches so far.

        The largest load is at most 4/3 of the optimum.

        Args:
            media: images or videos with grids, in row order.
            ranks: number of ranks.
        """
        load = [(0, rank) for rank in range(ranks)]
        rank_of = [0] * len(media)
        for item in sorted(range(len(media)), key=lambda i: -media[i].patches):
            patches, rank = load[0]
            heapreplace(load, (patches + media[item].patches, rank))
            rank_of[item] = rank
        return cls(media=tuple(media), rank_of=tuple(rank_of), ranks=ranks)

    def of_kind(self, kind: int) -> MediaShare:
        """Return the assignment of one kind of media, IMAGE or VIDEO."""
        pairs = [(medium, rank) for medium, rank in zip(self.media, self.rank_of, strict=True) if medium.kind == kind]
        return replace(self, media=tuple(medium for medium, _ in pairs), rank_of=tuple(rank for _, rank in pairs))

    # ------------------------------------------------------------------ the images of each rank

    @property
    def patches(self) -> tuple[int, ...]:
        """Number of patches of each image."""
        return tuple(medium.patches for medium in self.media)

    def num_features(self, rank: int) -> int:
        """Return the number of features that `rank` computes, one for each placeholder."""
        return sum(self.media[item].tokens for item in self.items(rank))

    def grids(self, rank: int) -> list[Grid]:
        """Return the grids of the images that `rank` computes."""
        return [grid for item in self.items(rank) if (grid := self.media[item].grid) is not None]

    @property
    def load(self) -> tuple[int, ...]:
        """Number of patches that each rank computes."""
        patches = self.patches
        return tuple(sum(patches[item] for item in self.items(rank)) for rank in range(self.ranks))

    def items(self, rank: int) -> tuple[int, ...]:
        """Return the indices of the images that `rank` computes, in increasing order."""
        return tuple(item for item, owner in enumerate(self.rank_of) if owner == rank)

    def take(self, pixels_PC: torch.Tensor, rank: int) -> torch.Tensor:
        """Select the patches that `rank` computes from the patches of all images, [P, C].

        Raises:
            LayoutError: the number of patches does not match the grids.
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
        """Select the entries of the images of `rank` from a tensor with one entry per image, such as grids."""
        return of_each.index_select(0, to_device(np.asarray(self.items(rank), np.int64), of_each.device))

    # ------------------------------------------------------------------ routes of features

    def route(self, partition: Partition, rank: int) -> MediaRoute:
        """Return what `rank` sends to each rank, and where the features that it receives belong.

        Args:
            partition: the tokens that each rank holds.
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

    # ------------------------------------------------------------------ int64 [F], one value per feature

    @cached_property
    def _item(self) -> np.ndarray:
        """Index of its image."""
        return np.repeat(np.arange(len(self.media)), [medium.tokens for medium in self.media])

    @cached_property
    def _owner(self) -> np.ndarray:
        """The rank that computes it."""
        return np.asarray(self.rank_of, np.int64)[self._item]

    @cached_property
    def _place(self) -> np.ndarray:
        """Its position in the concatenated features of all ranks."""
        place = np.empty(len(self._owner), np.int64)
        place[np.argsort(self._owner, kind="stable")] = np.arange(len(place))
        return place

    @property
    def _local(self) -> np.ndarray:
        """Its position in the features of the rank that computes it."""
        firsts = np.searchsorted(np.sort(self._owner), np.arange(self.ranks))
        return self._place - firsts[self._owner]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class MediaRoute:
    """The features that one rank sends and receives in one exchange of all ranks."""

    route: Route
    """The receiver of each feature that this rank computes, and the number of features from each rank."""
    tokens: torch.Tensor
    """int64: position in the rank's part of the row of each feature that it receives, in the order of arrival."""
    items: tuple[int, ...]
    """Indices of the images with at least one token on this rank."""
