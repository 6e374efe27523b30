"""Rows that can be cut."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import strategies as st

from vlmpack.context_parallel.partition import Layout, Partition
from vlmpack.layout import HostMetadata, Media, PackedRow, Segments, SlotRule
from vlmpack.layout.media import IMAGE, Expected, Grid, Medium, place

ALL_LAYOUTS: tuple[Layout, ...] = ("mirrored", "contiguous")


@st.composite
def partitions(draw: st.DrawFn, max_length: int = 40) -> Partition:
    """Rows with gaps, a tail, empty and repeated segments, cut in both ways over 1 to 5 ranks."""
    ranks, layout = draw(st.integers(1, 5)), draw(st.sampled_from(ALL_LAYOUTS))
    lengths = draw(st.lists(st.integers(0, max_length), min_size=1, max_size=7))
    if layout == "mirrored":
        rule = SlotRule(multiple=2 * ranks, max_segments=draw(st.sampled_from([None, 9])))
    else:
        rule = SlotRule(multiple=draw(st.integers(1, 5)), row_multiple=ranks * draw(st.integers(1, 7)))
    return Partition(segments=Segments.from_lengths(lengths, rule), ranks=ranks, layout=layout)


def owners(partition: Partition) -> list[int]:
    """The rank of each token of the row, by plain loops."""
    ranks, total = partition.ranks, partition.segments.total
    if partition.layout == "contiguous":
        return [at * ranks // total for at in range(total)]
    chunks = [at * 2 * ranks // slot for slot in partition.segments.slots for at in range(slot)]
    return [min(chunk, 2 * ranks - 1 - chunk) for chunk in chunks]


def row_with_images(lengths: list[int], rule: SlotRule, images: dict[int, Grid]) -> PackedRow:
    """A row with an image, 4 patches to a token, from each of these places on; every value names its place."""
    segments = Segments.from_lengths(lengths, rule)
    places = torch.arange(segments.total)[None]
    types = torch.zeros_like(places)
    for start, (t, h, w) in images.items():
        types[0, start : start + t * h * w // 4] = 1
    grids = tuple(images.values())
    expected = [Expected(medium=Medium(kind=IMAGE, grid=grid), tokens=(prod(grid) // 4,)) for grid in grids]
    table = place(expected, types[0].numpy(), segments, counted=[IMAGE])
    patches = torch.arange(sum(t * h * w for t, h, w in grids), dtype=torch.float32)
    return PackedRow(
        input_ids=places,
        segments=segments,
        shift_labels=places + 1000,
        position_ids=torch.stack([places + 10000 * axis for axis in range(4)]),
        mm_token_type_ids=types,
        extras={"advantages": places / 7, "of_three": torch.stack([places, -places, places * 2])},
        media=Media(pixel_values=patches[:, None].expand(-1, 3), image_grid_thw=torch.tensor(grids).view(-1, 3)),
        metadata=HostMetadata(lengths=tuple(lengths), media=table),
    )
