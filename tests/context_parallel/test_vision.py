"""Images spread over ranks, and their features sent to the tokens that they stand for."""

from __future__ import annotations

from math import prod

import torch
from cut_rows import ALL_LAYOUTS, row_with_images
from hypothesis import given
from hypothesis import strategies as st

from vlmpack.context_parallel import MediaShare, Partition
from vlmpack.context_parallel.vision import MediaRoute
from vlmpack.layout import Grid, PackedRow, SlotRule
from vlmpack.layout.media import IMAGE, Medium

grids = st.builds(lambda t, h, w: (t, 2 * h, 2 * w), st.integers(1, 2), st.integers(1, 3), st.integers(1, 3))


@st.composite
def rows_and_partitions(draw: st.DrawFn) -> tuple[PackedRow, Partition]:
    """A row of samples, each with text and images, and a cut of it."""
    ranks, layout = draw(st.integers(1, 4)), draw(st.sampled_from(ALL_LAYOUTS))
    samples = draw(st.lists(st.lists(st.tuples(st.integers(0, 3), grids), max_size=3), min_size=1, max_size=4))
    images, lengths, start = {}, [], 0
    for sample in samples:
        at = start + 1
        for text, (t, h, w) in sample:
            images[at + text] = (t, h, w)
            at += text + t * h * w // 4
        lengths.append(at - start)
        start += -(-lengths[-1] // (2 * ranks)) * 2 * ranks
    row = row_with_images(lengths, SlotRule(multiple=2 * ranks), images)
    return row, Partition(segments=row.segments, ranks=ranks, layout=layout)


def routes(share: MediaShare, partition: Partition) -> list[MediaRoute]:
    return [share.route(partition, rank) for rank in range(share.ranks)]


def images_of(*grids: Grid) -> list[Medium]:
    """Images of these grids, 4 patches to a token."""
    return [Medium(kind=IMAGE, grid=grid, runs=((0, prod(grid) // 4),)) for grid in grids]


def exchanged(own: list[torch.Tensor], routes: list[MediaRoute]) -> list[torch.Tensor]:
    """What an all-to-all gives each rank, without processes."""
    sent = [tensor[route.route.send].split(route.route.send_counts) for tensor, route in zip(own, routes, strict=True)]
    return [torch.cat([from_rank[rank] for from_rank in sent]) for rank in range(len(own))]


@given(sizes=st.lists(grids, max_size=12), ranks=st.integers(1, 6))
def test_every_image_has_one_rank_and_no_rank_more_than_it_must(sizes, ranks):
    share = MediaShare.spread(images_of(*sizes), ranks=ranks)
    assert sorted(item for rank in range(ranks) for item in share.items(rank)) == list(range(len(sizes)))
    assert sum(share.load) == sum(share.patches)
    least = max(sum(share.patches) / ranks, max(share.patches, default=0))
    assert max(share.load) <= least + max(share.patches, default=0)
    assert max(share.load) - min(share.load) <= max(share.patches, default=0)


@given(drawn=rows_and_partitions())
def test_one_exchange_puts_every_feature_on_its_token(drawn):
    row, partition = drawn
    share = MediaShare.spread(row.metadata.media.images, ranks=partition.ranks)
    tower = [share.take(row.media.pixel_values, rank)[::4, 0] // 4 for rank in range(partition.ranks)]
    sides = routes(share, partition)
    parts = []
    for got, side in zip(exchanged(tower, sides), sides, strict=True):
        assert len(got) == sum(side.route.receive_counts)
        parts.append(torch.full((partition.local_total,), -1.0).index_copy(0, side.tokens, got))
    truth = torch.where(row.mm_token_type_ids[0] == 1, row.mm_token_type_ids[0].cumsum(0) - 1, -1)
    assert torch.equal(partition.join(parts), truth.float())


@given(drawn=rows_and_partitions())
def test_a_rank_needs_the_images_whose_tokens_it_holds(drawn):
    row, partition = drawn
    share = MediaShare.spread(row.metadata.media.images, ranks=partition.ranks)
    image_of = torch.repeat_interleave(
        torch.arange(len(share.media)), torch.tensor([image.tokens for image in share.media], dtype=torch.long)
    )
    of_token = torch.full((row.segments.total,), -1)
    of_token[row.mm_token_type_ids[0] == 1] = image_of
    for rank, side in enumerate(routes(share, partition)):
        here = set(partition.cut(of_token, rank).tolist()) - {-1}
        assert set(side.items) == here
