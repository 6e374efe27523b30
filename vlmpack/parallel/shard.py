"""A row's part on one rank, and back: no processes, no messages, every rank cuts the row that it was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch

from vlmpack.layout import HostMetadata, Media, PackedRow, Segments, host_grids
from vlmpack.parallel.media import MediaShare
from vlmpack.parallel.partition import Layout, Partition


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class LocalRow:
    """The t = T / ranks tokens of a packed row that one rank holds."""

    input_ids: torch.Tensor
    """[1, t] int64."""
    partition: Partition
    """Which rank holds what; its segments are the whole row's."""
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
    """Which rank computes which image."""
    videos: MediaShare
    """Which rank computes which video."""
    metadata: HostMetadata | None = None
    """What the host knows of the whole row; `num_targets` is that of all ranks."""

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
        row: the whole row; with the grids in its metadata nothing waits for the device.
        rank: whose part.
        ranks: how many there are.
        merge: patches that the model's vision tower merges into one token along each side; 1 for a row of text.
        layout: `mirrored` balances causal attention, `contiguous` takes any boundaries.

    Raises:
        LayoutError: the row cannot be cut so; names the segment, what was seen and what to set.
    """
    partition = Partition(segments=row.segments, ranks=ranks, layout=layout)
    partition.check_rank(rank)

    def cut(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else partition.cut(tensor, rank)

    metadata, media = row.known_metadata, row.media
    image_grids = host_grids(metadata.image_grids, media.image_grid_thw, "image_grid_thw")
    images = MediaShare.spread(image_grids, ranks=ranks, merge=merge)
    video_grids = host_grids(metadata.video_grids, media.video_grid_thw, "video_grid_thw")
    videos = MediaShare.spread(video_grids, ranks=ranks, merge=merge)
    return LocalRow(
        input_ids=partition.cut(row.input_ids, rank),
        partition=partition,
        rank=rank,
        shift_labels=cut(row.shift_labels),
        position_ids=cut(row.position_ids),
        mm_token_type_ids=cut(row.mm_token_type_ids),
        extras={name: partition.cut(tensor, rank) for name, tensor in row.extras.items()},
        media=_media_of(media, images, videos, rank),
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
    """What `rank` computes; no tensors of a kind of which it computes none."""
    given, mine = media.to_hf(), {}
    for share, pixels, of_each in (
        (images, "pixel_values", ("image_grid_thw",)),
        (videos, "pixel_values_videos", ("video_grid_thw", "second_per_grid_ts")),
    ):
        if share.items(rank) and pixels in given:
            mine[pixels] = share.take(given[pixels], rank)
            mine |= {name: share.pick(given[name], rank) for name in of_each if name in given}
    return Media(**mine)
