"""Samples that share prefixes: they come out of a stream together, and are dealt as what a row computes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from vlmpack.errors import ConfigError
from vlmpack.loading import PackedBatchSampler, PackedStream, RowSettings, SharedPrefix, StreamPacker
from vlmpack.plan import CostModel, PrefixGroups, plan_bins

CAPACITY = 30
Sample = dict[str, Any]


def sample(number: int, key: str | None, shared: int, more: int, images: int = 0) -> Sample:
    return {"id": number, "key": key, "shared": shared, "length": shared + more, "images": images}


def prefix_of(sample: Mapping[str, Any]) -> SharedPrefix | None:
    if sample["key"] is None:
        return None
    return SharedPrefix(key=sample["key"], tokens=sample["shared"], costs={"images": sample["images"]})


def packer(**settings: Any) -> StreamPacker[Sample]:
    return StreamPacker(RowSettings(capacity=CAPACITY, **settings), prefix=prefix_of)


def computed(row: list[Sample]) -> int:
    """Tokens of a row, each prefix once."""
    prefixes = {sample["key"]: sample["shared"] for sample in row if sample["key"] is not None}
    return sum(s["length"] - (s["shared"] if s["key"] is not None else 0) for s in row) + sum(prefixes.values())


@st.composite
def streams(draw: Any) -> list[Sample]:
    """Groups one after the other, with samples between them that share nothing."""
    samples: list[Sample] = []
    for group in range(draw(st.integers(0, 6))):
        shared = draw(st.integers(1, 20))
        key = f"group {group}" if draw(st.booleans()) else None
        for more in draw(st.lists(st.integers(0 if key else 1, 10), min_size=1, max_size=9)):
            samples.append(sample(len(samples), key, shared, more))
    return samples


@given(samples=streams(), buffered=st.sampled_from([0, 40, 200]))
def test_each_sample_comes_out_once_and_rows_compute_no_more_than_they_may(samples, buffered):
    stream = packer(buffer_tokens=buffered)
    rows = rows_of(stream, samples) + stream.flush()
    assert sorted(each["id"] for row in rows for each in row) == list(range(len(samples)))
    assert all(0 < computed(row) <= CAPACITY for row in rows)
    assert (len(stream), stream.tokens) == (0, 0)


def rows_of(stream: StreamPacker[Sample], samples: list[Sample]) -> list[list[Sample]]:
    rows = []
    for each in samples:
        stream.add(each)
        rows += stream.rows()
    return rows


@given(
    samples=streams(),
    cut=st.integers(0, 60),
    min_fill=st.sampled_from([0.0, 0.7]),
    prefix=st.sampled_from([None, prefix_of]),
)
def test_a_stream_continues_where_it_was_left(samples, cut, min_fill, prefix):
    settings = RowSettings(capacity=15, min_fill=min_fill, buffer_tokens=40, overlength="own_row")
    whole, first, again = (StreamPacker[Sample](settings, prefix=prefix) for _ in range(3))
    before = first.pack(samples[:cut])
    for each in samples[cut : cut + 1]:
        first.add(each)
    again.load_state_dict(json.loads(json.dumps(first.state_dict())), first.buffered)
    assert again.tokens == first.tokens
    assert again.state_dict() == first.state_dict()
    after = [*again.rows(), *rows_of(again, samples[cut + 1 :]), *again.pack([]), *again.flush()]
    unbroken = [*whole.pack(samples[:cut]), *rows_of(whole, samples[cut:]), *whole.pack([]), *whole.flush()]
    assert before + after == unbroken


def test_a_group_shares_a_row_with_others_and_its_prefix_counts_once():
    samples = [sample(at, "a", 12, 4) for at in range(4)] + [sample(4, None, 0, 2), sample(5, None, 0, 9)]
    assert [[each["id"] for each in row] for row in packer().pack(samples)] == [[0, 1, 2, 3, 4], [5]]


def test_a_group_that_is_too_large_is_cut_its_longest_branches_first():
    samples = [sample(at, "a", 10, more) for at, more in enumerate([15, 3, 16, 5])]
    rows = packer().pack(samples)
    assert [[each["id"] for each in row] for row in rows] == [[0, 3], [1, 2]]
    assert [computed(row) for row in rows] == [30, 29]


def test_an_endless_group_is_handed_over_in_lots():
    stream = packer()
    for at in range(200):
        stream.add(sample(at, "a", 10, 5))
        assert stream.tokens < 10 * CAPACITY
        list(stream.rows())


def test_a_limit_counts_what_the_prefix_needs_once():
    settings = RowSettings(capacity=100, limits={"images": 2})
    stream: StreamPacker[Sample] = StreamPacker(
        settings, costs=lambda each: {"images": each["images"]}, prefix=prefix_of
    )
    rows = stream.pack([sample(at, "a", 10, 5, images=1) for at in range(3)] + [sample(3, "b", 10, 5, images=1)])
    assert [[each["id"] for each in row] for row in rows] == [[0, 1, 2, 3]]


def test_a_state_with_groups_needs_a_packer_with_groups():
    plain: StreamPacker[Sample] = StreamPacker(RowSettings(capacity=CAPACITY))
    with pytest.raises(
        ConfigError, match=r"is of RowSettings\(.*\) with prefix=, this is RowSettings\(.*\) without pre"
    ):
        plain.load_state_dict(packer().state_dict(), {})


def test_a_prefix_is_one_and_without_a_key_nothing_is_shared():
    stream: StreamPacker[Sample] = StreamPacker(RowSettings(capacity=9), prefix=lambda each: 7)  # pyright: ignore
    with pytest.raises(ConfigError, match="the prefix of sample 0"):
        stream.add(sample(0, "a", 5, 1))
    keyless = StreamPacker[Sample](RowSettings(capacity=9), prefix=lambda each: SharedPrefix(key=None, tokens=3))
    assert keyless.pack([sample(at, "a", 5, 3) for at in range(2)]) == [[sample(at, "a", 5, 3)] for at in range(2)]


class OneByOne(IterableDataset[Sample]):
    """A source that can only be iterated over."""

    def __init__(self, of: list[Sample]) -> None:
        self.of = of

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.of)


@pytest.mark.parametrize("source", [list, OneByOne])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_stream_deals_groups_out_whole_and_continues(source, ranks):
    samples = source([sample(4 * group + at, f"{group}", 8, 3 + at) for group in range(9) for at in range(4)])

    def stream(rank: int) -> PackedStream:
        return PackedStream(samples, RowSettings(capacity=CAPACITY), prefix=prefix_of, ranks=ranks, rank=rank)

    dealt = [list(stream(rank)) for rank in range(ranks)]
    assert sorted(each["id"] for rows in dealt for row in rows for each in row) == list(range(36))
    assert sorted(key for rows in dealt for key in {each["key"] for row in rows for each in row}) == list("012345678")
    assert {len({each["key"] for row in rows for each in row}) for rows in dealt} == {9 // ranks, -(-9 // ranks)}
    rows = [row for mine in dealt for row in mine]
    assert max(map(computed, rows)) <= CAPACITY
    assert np.mean([len({each["key"] for each in row}) for row in rows]) < 1.5
    for done in (1, 2, len(dealt[0])):
        begun = stream(0)
        assert list(islice(begun, done)) == dealt[0][:done]
        resumed = stream(0)
        resumed.load_state_dict(begun.state_dict())
        assert list(resumed) == dealt[0][done:]


# ---------------------------------------------------------------------- plans

GROUPS = PrefixGroups(
    of_samples=np.repeat(np.arange(12), 4),
    parents=np.full(12, -1),
    tokens=np.arange(40, 88, 4),
    patches=np.full(12, 64),
)
LENGTHS = GROUPS.tokens[GROUPS.of_samples] + np.tile([3, 5, 5, 9], 12)


def test_rows_are_balanced_by_what_they_compute():
    """Many short branches of a long prefix cost as much as one sample of all their tokens, not as whole samples."""
    lengths = np.array([101] * 20 + [120] * 3)
    groups = PrefixGroups(of_samples=np.array([0] * 20 + [-1] * 3), parents=np.array([-1]), tokens=np.array([100]))
    plan = plan_bins(lengths, 120, groups=groups)
    assert plan.tree_tokens.tolist() == [120] * 4
    sampler = PackedBatchSampler(plan, ranks=2, rank="all", accumulation=2, seed=None)
    assert sampler.schedule(0).load.tolist() == [[240.0, 240.0]]
    model = CostModel(token=0.0, token_pair=1.0)
    costs, group_costs = model.of_samples(lengths), model.of_samples(groups.tokens)
    priced = PackedBatchSampler(plan, costs=costs, group_costs=group_costs, seed=None)
    assert priced.schedule(0).costs.tolist() == [100**2 + 20 * (101**2 - 100**2), *[120**2] * 3]


def test_costs_of_samples_alone_are_refused():
    plan = plan_bins(LENGTHS, 150, groups=GROUPS)
    with pytest.raises(ConfigError, match=r"costs= was given without group_costs="):
        PackedBatchSampler(plan, costs=LENGTHS)
    with pytest.raises(ConfigError, match=r"group_costs= was given without costs="):
        PackedBatchSampler(plan, group_costs=GROUPS.tokens)
    with pytest.raises(ConfigError, match="2 group_costs for 12 groups"):
        PackedBatchSampler(plan, costs=LENGTHS, group_costs=GROUPS.tokens[:2])
    with pytest.raises(ConfigError, match="group_costs= is for a plan with groups"):
        PackedBatchSampler(plan_bins(LENGTHS, 150), group_costs=GROUPS.tokens)
