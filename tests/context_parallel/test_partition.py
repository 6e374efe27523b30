"""Which rank holds which tokens: each one on one rank, none lost, and the row again from all parts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cut_rows import ALL_LAYOUTS, owners, partitions
from hypothesis import given

from vlmpack.context_parallel.partition import Layout, Partition
from vlmpack.errors import LayoutError
from vlmpack.layout import Segments, SlotRule

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "context_parallel.json").read_text())


def cut(case: dict, layout: Layout = "mirrored") -> Partition:
    segments = Segments.from_boundaries(case["stride"], total=case.get("total"))
    return Partition(segments=segments, ranks=case["cp"], layout=layout)


def causal_pairs(partition: Partition, *, padding: bool = False) -> tuple[int, ...]:
    """Query-key pairs of causal attention inside the segments that each rank's queries take part in.

    `padding`: count it as the causal tail of its segment, which kernels that take only slots compute.
    """
    segments = partition.segments
    if padding:
        segments = replace(segments, lengths=segments.slots)
    pairs = np.where(segments.padding_mask().numpy(), 0, segments.position_in_segment().numpy() + 1)
    return tuple(int(pairs[partition.index(rank).numpy()].sum()) for rank in range(partition.ranks))


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: f"cp{case['cp']}")
def test_each_rank_holds_what_the_vectors_say(case):
    partition = cut(case)
    assert [partition.index(rank).tolist() for rank in range(case["cp"])] == case["ranks"]


@pytest.mark.parametrize("case", VECTORS["must_raise"], ids=lambda case: case["why"])
def test_what_would_hold_tokens_twice_and_lose_others_is_refused(case):
    says = {6: r"segment 0: 6 tokens.*SlotRule\(multiple=4\)", 20: "segment 0: 7 tokens"}
    says[16] = r"8 tokens lie behind.*8.*tail_in_slot=True"
    says |= {10: "must start at 0.*2, 10", 12: "never decrease, but segment 1 runs from 8 to 4"}
    with pytest.raises(LayoutError, match=says[case["total"]]):
        cut(case)


@pytest.mark.parametrize("case", VECTORS["must_accept"], ids=lambda case: case["why"])
def test_repeated_boundaries_are_cut_like_the_row_without_them(case):
    plain = cut({**case, "stride": sorted(set(case["stride"]))})
    assert torch.equal(cut(case).place(), plain.place())


@pytest.mark.parametrize("case", VECTORS["causal_pairs_per_rank"], ids=lambda case: f"cp{case['cp']}")
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_causal_pairs_are_those_of_the_vectors(case, layout):
    assert list(causal_pairs(cut(case, layout))) == case[layout]


@given(partition=partitions())
def test_every_token_is_where_a_plain_loop_puts_it(partition):
    truth = owners(partition)
    assert len(truth) == partition.segments.total
    for rank in range(partition.ranks):
        assert partition.index(rank).tolist() == [at for at, owner in enumerate(truth) if owner == rank]
    parts = torch.cat([partition.index(rank) for rank in range(partition.ranks)])
    assert torch.equal(parts[partition.place()], torch.arange(partition.segments.total))


@given(partition=partitions())
def test_join_undoes_cut_along_any_dimension(partition):
    total = partition.segments.total
    for shape, token_dim in (((1, total), -1), ((3, 1, total), -1), ((1, total, 7), 1), ((total, 7), 0)):
        whole = torch.randn(shape)
        parts = [partition.cut(whole, rank, token_dim=token_dim) for rank in range(partition.ranks)]
        assert {part.shape[token_dim] for part in parts} == {total // partition.ranks}
        assert torch.equal(partition.join(parts, token_dim=token_dim), whole)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_mirrored_cut_balances_long_rows_to_one_percent(ranks):
    lengths = np.random.default_rng(0).integers(256, 4096, 40).tolist()
    segments = Segments.from_lengths(lengths, SlotRule(multiple=2 * ranks))
    mirrored = Partition(segments=segments, ranks=ranks, layout="mirrored")
    pairs = np.asarray(causal_pairs(mirrored))
    with_padding = causal_pairs(mirrored, padding=True)
    assert segments.has_padding
    assert pairs.max() / pairs.mean() <= 1.01
    assert len(set(with_padding)) == 1


@given(partition=partitions())
def test_local_segments_tell_the_same_of_a_part_as_the_row_cut(partition):
    segments = partition.segments
    for rank in range(partition.ranks):
        local = partition.local_segments(rank)
        assert torch.equal(local.padding_mask(), partition.cut(segments.padding_mask(), rank))
        assert torch.equal(local.seq_idx(), partition.cut(segments.seq_idx(), rank))
        assert local.total == partition.local_total
        assert local.num_samples == segments.num_samples
        assert partition.local_segments(rank) is local


def test_a_mirrored_cut_takes_a_tail_in_the_last_slot():
    whole = Segments.from_lengths([8, 3], SlotRule(multiple=4, pad_to=24, tail_in_slot=True))
    assert Partition(segments=whole, ranks=2, layout="mirrored").local_segments(0).slots == (4, 8)


def test_what_cannot_be_cut_or_joined_is_refused():
    partition = Partition(segments=Segments.from_lengths([3, 5]), ranks=2, layout="contiguous")
    for wrong, message in (
        (lambda: replace(partition, ranks=3), r"8 tokens cannot be cut into 3 parts.*row_multiple=3"),
        (lambda: replace(partition, ranks=0), "ranks=0"),
        (lambda: replace(partition, layout="zigzag"), "layout='zigzag'"),
        (lambda: partition.cut(torch.zeros(1, 8), 2), "rank 2 is not one of the 2 ranks"),
        (lambda: partition.cut(torch.zeros(1, 7), 0), r"the row is 8 tokens wide.*\[1, 7\]"),
        (lambda: partition.join([torch.zeros(1, 4)]), "joined from 2 parts, got 1"),
        (lambda: partition.join([torch.zeros(1, 4), torch.zeros(1, 5)]), "the part of rank 1 is 4 tokens wide"),
    ):
        with pytest.raises(LayoutError, match=message):
            wrong()
