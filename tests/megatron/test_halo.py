"""A row rolled in parts: what comes from other ranks in one exchange, and the same result as on one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from context_parallel.naive import naive_halo
from cut_rows import owners, partitions
from hypothesis import example, given
from hypothesis import strategies as st

from vlmpack.context_parallel.partition import Layout, Partition
from vlmpack.errors import LayoutError
from vlmpack.layout import IGNORE, Segments, SlotRule, roll_left
from vlmpack.layout.row import DepthTargets
from vlmpack.megatron import Halo

CASES = json.loads((Path(__file__).parents[1] / "vectors" / "roll.json").read_text())["cases"]


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


@pytest.mark.parametrize("case", [case for case in CASES if "cp" in case], ids=lambda case: case["name"])
def test_each_rank_rolls_to_what_the_vectors_say(case):
    partition = Partition(segments=Segments.from_boundaries(case["stride"]), ranks=case["cp"], layout="mirrored")
    halo = Halo(partition=partition, depth=1)
    parts = [torch.tensor(part) for part in case["ranks_in"]]
    for rank, came in enumerate(exchanged(parts, halo)):
        assert halo.roll_left(parts[rank], came, rank, fill=0).tolist() == case["ranks_out"][rank]


def test_there_is_such_a_vector():
    assert sum("cp" in case for case in CASES) == 1


FOUR_RANKS = {
    0: ([1, 2, 15, 16, 101, 102, 115, 116], [2, 3, 16, 0, 102, 103, 116, 0]),
    1: ([3, 4, 13, 14, 103, 104, 113, 114], [4, 5, 14, 15, 104, 105, 114, 115]),
    2: ([5, 6, 11, 12, 105, 106, 111, 112], [6, 7, 12, 13, 106, 107, 112, 113]),
    3: ([7, 8, 9, 10, 107, 108, 109, 110], [8, 9, 10, 11, 108, 109, 110, 111]),
}


def test_four_ranks_roll_two_samples_of_sixteen():
    partition = Partition(segments=Segments.from_lengths([16, 16]), ranks=4, layout="mirrored")
    halo = Halo(partition=partition, depth=1)
    row = torch.tensor([*range(1, 17), *range(101, 117)])
    parts = [partition.cut(row, rank) for rank in range(4)]
    for rank, came in enumerate(exchanged(parts, halo)):
        rolled = halo.roll_left(parts[rank], came, rank, fill=0)
        assert (parts[rank].tolist(), rolled.tolist()) == FOUR_RANKS[rank]


def test_gaps_and_contiguous_parts():
    segments = Segments.from_boundaries([0, 7, 18], [0, 8, 20])
    row = torch.tensor([*range(1, 8), 0, *range(11, 22), 0])
    expected: dict[Layout, list[list[int]]] = {
        "mirrored": [[2, 3, 0, 0, 12, 13, 14, 21, 0, 0], [4, 5, 6, 7, *range(15, 21)]],
        "contiguous": [[2, 3, 4, 5, 6, 7, 0, 0, 12, 13], [*range(14, 22), 0, 0]],
    }
    for layout, ranks in expected.items():
        partition = Partition(segments=segments, ranks=2, layout=layout)
        whole = rolled_in_parts(row, Halo(partition=partition, depth=1), depth=1, fill=0)
        assert [partition.cut(whole, rank).tolist() for rank in range(2)] == ranks


@given(partition=partitions(), most=st.integers(1, 9), data=st.data())
def test_parts_roll_to_what_the_whole_row_rolls_to(partition, most, data):
    depth = data.draw(st.integers(1, most))
    halo = Halo(partition=partition, depth=most)
    ids = torch.randint(1, 1000, (1, partition.segments.total))
    assert torch.equal(
        rolled_in_parts(ids, halo, depth=depth, fill=-100), roll_left(ids, partition.segments, depth=depth, fill=-100)
    )
    hidden = torch.randn(1, partition.segments.total, 3)
    assert torch.equal(
        rolled_in_parts(hidden, halo, depth=depth, fill=0, token_dim=1),
        roll_left(hidden, partition.segments, depth=depth, fill=0, token_dim=1),
    )


@given(partition=partitions(), depth=st.integers(1, 9))
@example(partition=Partition(segments=Segments.from_lengths([4]), ranks=2, layout="mirrored"), depth=6)
def test_a_rank_gets_what_it_needs_and_nothing_else(partition, depth):
    segments = partition.segments
    halo = Halo(partition=partition, depth=depth)
    if not segments.total:
        assert halo.places(0).tolist() == []
        return
    truth = naive_halo(segments.lengths, segments.slots, owners(partition), depth=depth)
    own = [partition.index(rank) for rank in range(partition.ranks)]
    for rank, came in enumerate(exchanged(own, halo)):
        assert halo.places(rank).tolist() == came.tolist()
        assert len(came) == len(set(came.tolist())) == sum(halo.route(rank).receive_counts)
        assert set(came.tolist()) == truth[rank]


def test_the_drawing_in_the_docstring():
    halo = Halo(partition=Partition(segments=Segments.from_lengths([8, 4]), ranks=2, layout="mirrored"), depth=1)
    letters = "abcdefghijkl"
    assert ["".join(letters[at] for at in halo.places(rank)) for rank in range(2)] == ["cj", "gl"]


def test_a_contiguous_part_needs_no_more_than_the_depth():
    partition = Partition(segments=Segments.from_lengths([100] * 6), ranks=4, layout="contiguous")
    halo = Halo(partition=partition, depth=3)
    assert [sum(halo.route(rank).receive_counts) for rank in range(4)] == [
        3,
        0,
        3,
        0,
    ]  # 2 of 3 cuts lie inside a segment


def test_gradients_go_back_to_the_rank_that_sent_the_token():
    partition = Partition(segments=Segments.from_lengths([8, 12]), ranks=2, layout="mirrored")
    row = torch.randn(1, 20, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(1, 20, 3, dtype=torch.float64)
    halo = Halo(partition=partition, depth=2)
    (in_parts,) = torch.autograd.grad((rolled_in_parts(row, halo, depth=2, fill=0, token_dim=1) * weight).sum(), row)
    whole = roll_left(row, partition.segments, depth=2, fill=0, token_dim=1)
    (at_once,) = torch.autograd.grad((whole * weight).sum(), row)
    assert torch.equal(in_parts, at_once)
    assert at_once.count_nonzero()


@given(partition=partitions(), depths=st.integers(1, 4))
def test_losses_of_parts_add_up_to_those_of_the_row(partition, depths):
    labels = torch.randint(-1, 5, (1, partition.segments.total))
    shift_labels = roll_left(labels.masked_fill(labels < 0, IGNORE), partition.segments, fill=IGNORE)
    whole = DepthTargets.of(shift_labels, partition.segments, depths=depths)
    token_losses = torch.rand(depths, 1, partition.segments.total, dtype=torch.float64)
    parts = [
        DepthTargets(targets=partition.cut(whole.targets, rank), counts=whole.counts) for rank in range(partition.ranks)
    ]
    losses = torch.stack([part.losses(partition.cut(token_losses, rank)) for rank, part in enumerate(parts)])
    torch.testing.assert_close(losses.sum(0), whole.losses(token_losses))
    assert torch.equal(torch.stack([(part.targets != IGNORE).sum((1, 2)) for part in parts]).sum(0), whole.counts)


def test_cutting_rolling_and_joining_compile():
    partition = Partition(segments=Segments.from_lengths([7, 11], SlotRule(multiple=4)), ranks=2, layout="mirrored")
    halo = Halo(partition=partition, depth=2)

    def both(row, came):
        part = partition.cut(row, 0)
        rolled = halo.roll_left(part, came, 0, depth=2, fill=0)
        return rolled, partition.join([part, rolled])

    row = torch.arange(20)[None]
    came = row[:, halo.places(0)]
    for ours, theirs in zip(torch.compile(both, backend="eager")(row, came), both(row, came), strict=True):
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


def test_without_the_halo_a_token_is_lost():
    partition = Partition(segments=Segments.from_lengths([8]), ranks=2, layout="contiguous")
    row = torch.arange(1, 9)
    alone = torch.cat([roll_left(partition.cut(row, rank), partition.local_segments(rank), fill=0) for rank in (0, 1)])
    together = rolled_in_parts(row, Halo(partition=partition, depth=1), depth=1, fill=0)
    assert (alone != together).nonzero()[:, 0].tolist() == [3]
