"""Images spread over ranks, and their features sent to the tokens that they stand for."""

from __future__ import annotations

import pytest
import torch
from cut_rows import ALL_LAYOUTS, row_with_images
from hypothesis import given
from hypothesis import strategies as st

from vlmpack.context_parallel import MediaShare, Partition
from vlmpack.context_parallel.vision import MediaRoute
from vlmpack.errors import LayoutError
from vlmpack.layout import PackedRow, SlotRule

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


def routes(share: MediaShare, row: PackedRow, partition: Partition) -> list[MediaRoute]:
    assert row.mm_token_type_ids is not None
    return [share.route(row.mm_token_type_ids, 1, partition, rank) for rank in range(share.ranks)]


def exchanged(own: list[torch.Tensor], routes: list[MediaRoute]) -> list[torch.Tensor]:
    """What an all-to-all gives each rank, without processes."""
    sent = [tensor[route.route.send].split(route.route.send_counts) for tensor, route in zip(own, routes, strict=True)]
    return [torch.cat([from_rank[rank] for from_rank in sent]) for rank in range(len(own))]


@given(sizes=st.lists(grids, max_size=12), ranks=st.integers(1, 6))
def test_every_image_has_one_rank_and_no_rank_more_than_it_must(sizes, ranks):
    share = MediaShare.spread(sizes, ranks=ranks, merge=2)
    assert sorted(item for rank in range(ranks) for item in share.items(rank)) == list(range(len(sizes)))
    assert sum(share.load) == sum(share.patches)
    least = max(sum(share.patches) / ranks, max(share.patches, default=0))
    assert max(share.load) <= least + max(share.patches, default=0)
    assert max(share.load) - min(share.load) <= max(share.patches, default=0)


def test_the_drawing_in_the_docstring():
    share = MediaShare.spread([(1, 4, 4), (1, 8, 8), (1, 4, 4), (1, 4, 8)], ranks=2, merge=2)
    assert share.rank_of == (1, 0, 1, 1)
    assert share.features == (4, 16, 4, 8)
    assert share.load == (64, 64)


@given(drawn=rows_and_partitions())
def test_every_rank_takes_the_pixels_of_its_images_in_row_order(drawn):
    row, _ = drawn
    for ranks in (1, 2, 3):
        share = MediaShare.spread(row.metadata.image_grids, ranks=ranks, merge=2)
        computed = [share.take(row.media.pixel_values, rank)[::4] for rank in range(ranks)]
        feature = torch.repeat_interleave(torch.tensor(share.features, dtype=torch.long))  # the image of each
        order = torch.cat([torch.nonzero(torch.isin(feature, torch.tensor(share.items(r)))) for r in range(ranks)])
        assert torch.equal(torch.cat(computed), row.media.pixel_values[::4][order[:, 0]])


@given(drawn=rows_and_partitions())
def test_one_exchange_puts_every_feature_on_its_token(drawn):
    row, partition = drawn
    share = MediaShare.spread(row.metadata.image_grids, ranks=partition.ranks, merge=2)
    tower = [share.take(row.media.pixel_values, rank)[::4, 0] // 4 for rank in range(partition.ranks)]
    sides = routes(share, row, partition)
    parts = []
    for got, side in zip(exchanged(tower, sides), sides, strict=True):
        assert len(got) == sum(side.route.receive_counts)
        parts.append(torch.full((partition.local_total,), -1.0).index_copy(0, side.tokens, got))
    truth = torch.where(row.mm_token_type_ids[0] == 1, row.mm_token_type_ids[0].cumsum(0) - 1, -1)
    assert torch.equal(partition.join(parts), truth.float())


@given(drawn=rows_and_partitions())
def test_a_rank_needs_the_images_whose_tokens_it_holds(drawn):
    row, partition = drawn
    share = MediaShare.spread(row.metadata.image_grids, ranks=partition.ranks, merge=2)
    image_of = torch.repeat_interleave(torch.arange(len(share.grids)), torch.tensor(share.features, dtype=torch.long))
    of_token = torch.full((row.segments.total,), -1)
    of_token[row.mm_token_type_ids[0] == 1] = image_of
    for rank, side in enumerate(routes(share, row, partition)):
        here = set(partition.cut(of_token, rank).tolist()) - {-1}
        assert set(side.items) == here


def test_placeholders_without_pixels_are_refused():
    row = row_with_images([16], SlotRule(multiple=4), {2: (1, 4, 4)})
    partition = Partition(segments=row.segments, ranks=2, layout="mirrored")
    share = MediaShare.spread([(1, 4, 8)], ranks=2, merge=2)
    with pytest.raises(LayoutError, match="the grids make 8 tokens, but the row has 4 of type 1"):
        routes(share, row, partition)


def test_a_grid_that_does_not_merge_names_its_image():
    with pytest.raises(LayoutError, match="image 1: a grid of 4 x 5 patches does not merge 2 x 2"):
        MediaShare.spread([(1, 4, 4), (1, 4, 5)], ranks=2, merge=2)
