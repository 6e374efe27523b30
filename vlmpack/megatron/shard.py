"""Cut a row into the parts of ranks, join them again, and roll a part with the tokens of others that it reads.

No processes, no messages: every rank cuts its part out of the whole row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import final

import numpy as np
import torch

from vlmpack.context_parallel.collectives import Route, Transfers
from vlmpack.context_parallel.partition import Partition
from vlmpack.context_parallel.vision import MediaShare
from vlmpack.errors import LayoutError
from vlmpack.layout.batch import HostMetadata, Media
from vlmpack.layout.device import outside_graph
from vlmpack.layout.row import PackedRow, stops_of_tokens
from vlmpack.layout.segments import Layout, Segments
from vlmpack.layout.sharing import check_unshared


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class LocalRow:
    """The t = T / ranks tokens of a packed row that one rank holds."""

    input_ids: torch.Tensor
    """[1, t] int64."""
    partition: Partition
    """The rank that holds each part; its segments are the whole row's."""
    rank: int
    """Whose part this is."""
    shift_labels: torch.Tensor | None = None
    """[1, t] int64: the target of each token, shifted before the row was cut; -100: none."""
    position_ids: torch.Tensor | None = None
    """[k, 1, t] or [1, t], as the row had them."""
    mm_token_type_ids: torch.Tensor | None = None
    """[1, t]: 0 text, 1 image, 2 video."""
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Further [1, t] or [k, 1, t] tensors."""
    media: Media = field(default_factory=Media)
    """Pixels and grids that this rank computes, whosever tokens they stand for."""
    images: MediaShare
    """The rank that computes each image."""
    videos: MediaShare
    """The rank that computes each video."""
    metadata: HostMetadata | None = None
    """Metadata of the whole row on the host; `num_targets` is that of all ranks."""

    @property
    def segments(self) -> Segments:
        """The whole row's boundaries."""
        return self.partition.segments

    @property
    def local_segments(self) -> Segments:
        """The boundaries of this part; positions are not counted in it."""
        return self.partition.local_segments(self.rank)

    @property
    def index(self) -> torch.Tensor:
        """int64 [t]: the place in the row of each token."""
        return self.partition.index(self.rank, self.input_ids.device)

    @property
    def moe_padding_mask(self) -> torch.Tensor:
        """[1, t] bool: True where the row holds padding."""
        return self.partition.cut(self.segments.padding_mask(self.input_ids.device)[None], self.rank)


def shard(row: PackedRow, rank: int, ranks: int, *, merge: int, layout: Layout = "mirrored") -> LocalRow:
    """The part of `row` that `rank` of `ranks` holds.

    Every rank is given the same whole row and cuts its own part out of it. Labels are shifted already, so a part's
    last target is a token of another part. Images are spread over ranks by their patches, wherever their tokens are.

    Args:
        row: the whole row; with grids and seconds in its metadata there is no host–device sync.
        rank: whose part.
        ranks: how many there are.
        merge: patches that the model's vision tower merges into one token along each side; 1 for a row of text.
        layout: `mirrored` balances causal attention, `contiguous` takes any boundaries.

    Raises:
        LayoutError: the row cannot be cut so; names the segment, what was seen and what to set.
    """
    check_unshared(row, "a rank that holds a part of it")
    partition = Partition(segments=row.segments, ranks=ranks, layout=layout)
    partition.check_rank(rank)

    def cut(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else partition.cut(tensor, rank)

    metadata = row.host_metadata()
    images = MediaShare.spread(metadata.image_grids, ranks=ranks, merge=merge)
    videos = MediaShare.spread(metadata.video_grids, ranks=ranks, merge=merge)
    return LocalRow(
        input_ids=partition.cut(row.input_ids, rank),
        partition=partition,
        rank=rank,
        shift_labels=cut(row.shift_labels),
        position_ids=cut(row.position_ids),
        mm_token_type_ids=cut(row.mm_token_type_ids),
        extras={name: partition.cut(tensor, rank) for name, tensor in row.extras.items()},
        media=_media_of(row.media, images, videos, rank),
        images=images,
        videos=videos,
        metadata=row.metadata,
    )


def unshard(
    parts: Sequence[torch.Tensor], segments: Segments, *, layout: Layout = "mirrored", token_dim: int = -1
) -> torch.Tensor:
    """The inverse of `shard` for one tensor: what each rank holds of it, in the order of ranks, to the row's own.

    Args:
        parts: a [..., t, ...] of each rank.
        segments: the whole row's boundaries.
        layout: as it was cut.
        token_dim: the dimension of length t, and of length T in what is given back.

    Raises:
        LayoutError: parts that are not those of this row.
    """
    return Partition(segments=segments, ranks=len(parts), layout=layout).join(parts, token_dim=token_dim)


# ---------------------------------------------------------------------- media


def _media_of(media: Media, images: MediaShare, videos: MediaShare, rank: int) -> Media:
    """Return the media that `rank` computes; no tensors of a kind of which it computes none."""
    tensors, of_rank = media.to_hf(), {}
    for share, pixels, of_each in (
        (images, "pixel_values", ("image_grid_thw",)),
        (videos, "pixel_values_videos", ("video_grid_thw", "second_per_grid_ts")),
    ):
        if share.items(rank) and pixels in tensors:
            of_rank[pixels] = share.take(tensors[pixels], rank)
            of_rank |= {name: share.pick(tensors[name], rank) for name in of_each if name in tensors}
    return Media(**of_rank)


@final
@dataclass(frozen=True, kw_only=True)
class Halo:
    """The tokens that each rank needs to roll its part of a row by 1, ..., K tokens."""

    partition: Partition
    """The tokens that each rank holds."""
    depth: int
    """K, the most tokens that a part is rolled by."""

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise LayoutError(f"a halo serves rolls by 1 token and more, got depth={self.depth}")

    def route(self, rank: int) -> Route:
        """Return the tokens that `rank` sends to each rank, and how many it receives: at most K a stretch."""
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
        widths, needed = (part.shape[token_dim], halo.shape[token_dim]), (self.partition.local_total, self._size(rank))
        if widths != needed:
            raise LayoutError(
                f"rank {rank} rolls its {needed[0]} tokens with {needed[1]} that come to it, got {widths[0]} and "
                f"{widths[1]} at dimension {token_dim}"
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
