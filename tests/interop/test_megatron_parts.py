"""A row cut over ranks: each token, target and image on one of them, all of it back, and rolled in parts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cut_rows import ALL_LAYOUTS, partitions, row_with_images
from hypothesis import given
from hypothesis import strategies as st

from vlmpack.context_parallel.partition import Layout, Partition
from vlmpack.errors import LayoutError
from vlmpack.interop.megatron import Halo, LocalRow, shard, to_megatron, unshard
from vlmpack.layout import Media, PackedRow, Segments, SlotRule, roll_left, share
from vlmpack.layout.batch import IGNORE
from vlmpack.layout.row import without_successor

RANKS = 2
IMAGES = {3: (1, 4, 8), 20: (1, 4, 4), 26: (1, 2, 4)}


@pytest.fixture
def row() -> PackedRow:
    return row_with_images([18, 11], SlotRule(multiple=2 * RANKS), IMAGES)


def parts_of(row: PackedRow, layout: Layout) -> list[LocalRow]:
    return [shard(row, rank, RANKS, layout=layout) for rank in range(RANKS)]


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
def test_nothing_waits_for_a_device(row, layout):
    on_meta = moved(row, "meta")  # tensors without values: whoever reads one fails
    part = shard(on_meta, 0, RANKS, layout=layout)
    assert part.input_ids.device.type == part.index.device.type == part.moe_padding_mask.device.type == "meta"
    with pytest.raises(NotImplementedError):
        part.input_ids.tolist()


def test_a_row_that_cannot_be_cut_says_which_segment(row):
    odd = row_with_images([8, 6], SlotRule(), {})
    with pytest.raises(LayoutError, match=r"segment 1: 6 tokens of row .* 2 \* ranks = 4"):
        shard(odd, 0, 2)
    with pytest.raises(LayoutError, match="rank 2 is not one of"):
        shard(row, 2, 2)


def test_a_row_whose_samples_share_prefixes_is_refused() -> None:
    ids = torch.arange(4).repeat(2)[None]
    row = share(PackedRow(input_ids=ids, segments=Segments.from_lengths([4, 4])), min_shared=1)
    assert row.tree is not None
    for cut in (lambda: shard(row, 0, RANKS), lambda: to_megatron(row)):
        with pytest.raises(LayoutError, match=r"share prefixes, and .* by itself: give it unshare"):
            cut()


# ---------------------------------------------------------------------- rolled in parts

ROLLS = json.loads((Path(__file__).parents[1] / "vectors" / "roll.json").read_text())["cases"]
[ON_RANKS] = [case for case in ROLLS if "cp" in case]


def exchanged(parts: list[torch.Tensor], halo: Halo, *, token_dim: int = -1) -> list[torch.Tensor]:
    """What an all-to-all gives each rank, without processes."""
    routes = [halo.route(rank) for rank in range(len(parts))]
    sent = [
        part.index_select(token_dim, route.send).split(route.send_counts, token_dim)
        for part, route in zip(parts, routes, strict=True)
    ]
    return [torch.cat([from_rank[rank] for from_rank in sent], token_dim) for rank in range(len(parts))]


def rolled_in_parts(row: torch.Tensor, halo: Halo, *, depth: int, fill: float, token_dim: int = -1) -> torch.Tensor:
    partition = halo.partition
    parts = [partition.cut(row, rank, token_dim=token_dim) for rank in range(partition.ranks)]
    halos = exchanged(parts, halo, token_dim=token_dim)
    rolled = [
        halo.roll_left(part, came, rank, depth=depth, fill=fill, token_dim=token_dim)
        for rank, (part, came) in enumerate(zip(parts, halos, strict=True))
    ]
    return partition.join(rolled, token_dim=token_dim)


def test_each_rank_rolls_to_what_the_vector_says():
    case = ON_RANKS
    partition = Partition(segments=Segments.from_boundaries(case["stride"]), ranks=case["cp"], layout="mirrored")
    halo = Halo(partition=partition, depth=1)
    parts = [torch.tensor(part) for part in case["ranks_in"]]
    for rank, came in enumerate(exchanged(parts, halo)):
        assert halo.roll_left(parts[rank], came, rank, fill=0).tolist() == case["ranks_out"][rank]


@given(partition=partitions(), most=st.integers(1, 9), data=st.data())
def test_parts_roll_to_what_the_whole_row_rolls_to(partition, most, data):
    depth = data.draw(st.integers(1, most))
    halo = Halo(partition=partition, depth=most)
    ids = torch.randint(1, 1000, (1, partition.segments.total))
    assert torch.equal(
        rolled_in_parts(ids, halo, depth=depth, fill=-100), roll_left(ids, partition.segments, depth=depth, fill=-100)
    )
    hidden = torch.randn(1, partition.segments.total, 3, requires_grad=True)
    weight = torch.randn(hidden.shape)
    in_parts = rolled_in_parts(hidden, halo, depth=depth, fill=0, token_dim=1)
    whole = roll_left(hidden, partition.segments, depth=depth, fill=0, token_dim=1)
    assert torch.equal(in_parts, whole)
    ours, theirs = (torch.autograd.grad((rolled * weight).sum(), hidden)[0] for rolled in (in_parts, whole))
    assert torch.equal(ours, theirs)


def test_a_halo_serves_only_what_it_was_made_for():
    partition = Partition(segments=Segments.from_lengths([8]), ranks=2, layout="contiguous")
    halo = Halo(partition=partition, depth=2)
    part = torch.zeros(1, 4)
    with pytest.raises(LayoutError, match="rolls by 1 to 2 tokens, got depth=3"):
        halo.roll_left(part, torch.zeros(1, 2), 0, depth=3, fill=0)
    with pytest.raises(LayoutError, match="rank 0 rolls its 4 tokens with 2 that come to it, got 4 and 1"):
        halo.roll_left(part, torch.zeros(1, 1), 0, fill=0)
    with pytest.raises(LayoutError, match="got depth=0"):
        Halo(partition=partition, depth=0)
