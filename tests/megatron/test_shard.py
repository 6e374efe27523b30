"""A packed row cut over ranks: every token, target and image on one rank, and all of it back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cut_rows import ALL_LAYOUTS, row_with_images
from waiting import waits_are_errors

from vlmpack.context_parallel.partition import Layout
from vlmpack.errors import LayoutError
from vlmpack.layout import IGNORE, Media, PackedRow, Segments, SlotRule, share
from vlmpack.layout.row import without_successor
from vlmpack.megatron import LocalRow, shard, to_megatron, unshard

RANKS = 2
IMAGES = {3: (1, 4, 8), 20: (1, 4, 4), 26: (1, 2, 4)}


@pytest.fixture
def row() -> PackedRow:
    return row_with_images([18, 11], SlotRule(multiple=2 * RANKS), IMAGES)


def parts_of(row: PackedRow, layout: Layout) -> list[LocalRow]:
    return [shard(row, rank, RANKS, merge=2, layout=layout) for rank in range(RANKS)]


def tensors(row: PackedRow | LocalRow) -> dict[str, torch.Tensor]:
    """Every tensor along the row, by name."""
    named = {name: value for name, value in vars(row).items() if isinstance(value, torch.Tensor)}
    return {**named, **row.extras, "moe_padding_mask": row.moe_padding_mask}


def moved(row: PackedRow, device: str) -> PackedRow:
    """The same row on another device."""
    return replace(
        row,
        **{name: value.to(device) for name, value in vars(row).items() if isinstance(value, torch.Tensor)},
        media=Media(**{name: tensor.to(device) for name, tensor in row.media.to_hf().items()}),
        extras={name: tensor.to(device) for name, tensor in row.extras.items()},
    )


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_unshard_gives_every_tensor_back(row, layout):
    parts = [tensors(part) for part in parts_of(row, layout)]
    assert len(tensors(row)) == 7
    for name, whole in tensors(row).items():
        assert torch.equal(unshard([part[name] for part in parts], row.segments, layout=layout), whole)


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_a_part_knows_where_its_tokens_live(row, layout):
    for part in parts_of(row, layout):
        assert torch.equal(part.input_ids[0], part.index)  # ids of this row are their places in it
        assert part.segments is row.segments
        assert torch.equal(part.local_segments.padding_mask(), part.moe_padding_mask[0])
        assert part.metadata is row.metadata


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_labels_are_shifted_before_they_are_cut(row, layout):
    labels = torch.arange(row.segments.total)[None].masked_fill(row.moe_padding_mask, IGNORE)
    shifted = PackedRow.from_hf({**row.step_inputs(), "shift_labels": None, "labels": labels}).shift_labels
    parts = parts_of(replace(row, shift_labels=shifted), layout)
    ends = set(without_successor(row.segments, 1).tolist())
    followers_elsewhere = 0
    for part in parts:
        assert part.shift_labels is not None
        held = part.index.tolist()
        assert part.shift_labels[0].tolist() == [IGNORE if at in ends else at + 1 for at in held]
        followers_elsewhere += sum(at not in ends and at + 1 not in held for at in held)
    assert followers_elsewhere  # shifted after the cut, these would have had a wrong target, or none


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_every_image_is_computed_by_one_rank(row, layout):
    parts = parts_of(row, layout)
    assert parts[0].images == parts[1].images
    assert parts[0].images.load == (32, 24)
    for rank, part in enumerate(parts):
        grids = part.media.image_grid_thw
        assert grids is not None
        assert part.media.pixel_values is not None
        assert [tuple(grid) for grid in grids.tolist()] == [list(IMAGES.values())[i] for i in part.images.items(rank)]
        assert part.media.pixel_values.shape == (part.images.load[rank], 3)
    patches = torch.cat([part.media.pixel_values[:, 0] for part in parts if part.media.pixel_values is not None])
    assert sorted(patches.tolist()) == list(range(56))


def test_a_rank_without_an_image_has_no_media():
    row = row_with_images([16], SlotRule(multiple=4), {2: (1, 4, 4)})
    first, second = parts_of(row, "mirrored")
    assert set(first.media.to_hf()) == {"pixel_values", "image_grid_thw"}
    assert second.media.to_hf() == {}


def test_videos_bring_their_seconds():
    row = row_with_images([16], SlotRule(multiple=4), {})
    grids = torch.tensor([[1, 2, 2], [2, 4, 4], [1, 4, 4]])
    media = Media(
        pixel_values_videos=torch.arange(52.0)[:, None],
        video_grid_thw=grids,
        second_per_grid_ts=torch.tensor([0.5, 1.0, 2.0]),
    )
    row = replace(row, media=media, metadata=None)
    first, second = (part.media for part in parts_of(row, "contiguous"))
    assert first.second_per_grid_ts is not None
    assert second.second_per_grid_ts is not None
    assert first.second_per_grid_ts.tolist() == [1.0]
    assert second.second_per_grid_ts.tolist() == [0.5, 2.0]
    assert second.pixel_values_videos is not None
    assert second.pixel_values_videos[:, 0].tolist() == [*range(4), *range(36, 52)]


def test_a_row_of_text_needs_nothing_but_ids():
    segments = Segments.from_lengths([5, 7])
    row = PackedRow(input_ids=torch.arange(12)[None], segments=segments)
    part = shard(row, 1, 3, merge=1, layout="contiguous")
    assert part.input_ids.tolist() == [[4, 5, 6, 7]]
    assert (part.shift_labels, part.position_ids, part.mm_token_type_ids) == (None, None, None)
    assert part.images.grids == part.videos.grids == ()


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_nothing_waits_for_a_device(row, layout):
    on_meta = moved(row, "meta")  # tensors without values: whoever reads one fails
    part = shard(on_meta, 0, RANKS, merge=2, layout=layout)
    assert part.input_ids.device.type == part.index.device.type == part.moe_padding_mask.device.type == "meta"
    assert part.media.pixel_values is not None
    assert part.media.pixel_values.shape == (32, 3)
    with pytest.raises(NotImplementedError):
        part.input_ids.tolist()


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_nothing_waits_for_a_gpu(row, layout):
    on_gpu = moved(row, "cuda")
    with waits_are_errors():
        parts = [tensors(part) for part in parts_of(on_gpu, layout)]
        whole = {name: unshard([part[name] for part in parts], row.segments, layout=layout) for name in parts[0]}
    for name, tensor in tensors(row).items():
        assert torch.equal(whole[name].cpu(), tensor)


def test_a_row_that_cannot_be_cut_says_which_segment(row):
    odd = row_with_images([8, 6], SlotRule(), {})
    with pytest.raises(LayoutError, match=r"segment 1: 6 tokens of row .* 2 \* ranks = 4"):
        shard(odd, 0, 2, merge=2)
    with pytest.raises(LayoutError, match="rank 2 is not one of"):
        shard(row, 2, 2, merge=2)
    with pytest.raises(LayoutError, match="the grids describe 56 patches, the pixels are"):
        shard(replace(row, media=replace(row.media, pixel_values=torch.zeros(55, 3))), 0, 2, merge=2)


def test_a_row_whose_grids_are_not_those_of_its_metadata_is_refused(row):
    others = row.media.image_grid_thw.flip(0)
    with pytest.raises(LayoutError, match="image_grid_thw is not what the host metadata"):
        shard(replace(row, media=replace(row.media, image_grid_thw=others)), 0, RANKS, merge=2)


def test_a_row_whose_samples_share_prefixes_is_refused() -> None:
    ids = torch.arange(4).repeat(2)[None]
    row = share(PackedRow(input_ids=ids, segments=Segments.from_lengths([4, 4])), min_shared=1)
    assert row.tree is not None
    for cut in (lambda: shard(row, 0, RANKS, merge=1), lambda: to_megatron(row)):
        with pytest.raises(LayoutError, match=r"share prefixes, and .* by itself: give it unshare"):
            cut()
