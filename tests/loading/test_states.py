"""States are taken as they were made, for the samples that they were made of, or refused by what is wrong with them."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from cases import slow
from mutations import check, edited, outcomes
from torch.utils.data import IterableDataset

from vlmpack.data.digest import content_digest
from vlmpack.errors import ConfigError, SampleError
from vlmpack.loading import PackedBatchSampler, PackedStream, RowSettings, StreamPacker
from vlmpack.plan import plan_bins

SETTINGS = RowSettings(capacity=64, overlength="own_row")
LENGTHS = [1 + at * 7 % 40 + 60 * (at % 17 == 16) for at in range(200)]


def samples(name: str = "a", count: int = 200) -> list[dict]:
    return [{"id": f"{name}{at}", "length": LENGTHS[at]} for at in range(count)]


class OneByOne(IterableDataset):
    """A source that can only be iterated over."""

    def __init__(self, of: list[dict]) -> None:
        self.of = of

    def __iter__(self) -> Any:
        return iter(self.of)


def stopped(source: Any, rows: int = 20) -> tuple[dict, list]:
    """The state of a stream after so many rows, and the rows that are left."""
    stream = PackedStream(source, SETTINGS)
    left = iter(stream)
    for _ in range(rows):
        next(left)
    return copy.deepcopy(stream.state_dict()), list(left)


def continued(source: Any, state: Any) -> list:
    stream = PackedStream(source, SETTINGS)
    stream.load_state_dict(state)
    return list(stream)


# ---------------------------------------------------------------------- another data set


@pytest.mark.parametrize("source", [list, OneByOne])
@pytest.mark.parametrize(
    ("other", "told"),
    [
        (samples("b"), r"its sample \d+ is not the same as before; give the data set"),
        (samples()[:40], r"it has 40 samples, and before it had 200|it ends after 40 samples, and \d+ were read"),
        ([*samples()[1:], samples()[0]], r"its sample \d+ is not the same"),
    ],
)
def test_a_state_does_not_continue_in_another_data_set(source, other, told):
    state, rest = stopped(source(samples()))
    assert continued(source(samples()), state) == rest
    with pytest.raises(ConfigError, match=told):
        continued(source(other), state)


# ---------------------------------------------------------------------- edited states


def test_a_packer_that_refuses_a_state_is_as_it_was():
    packer = StreamPacker(SETTINGS)
    packer.add(samples()[0])
    before = packer.state_dict()
    with pytest.raises(ConfigError, match="not the state of a StreamPacker"):
        packer.load_state_dict({**before, "counts": [-1, 0, 0]}, packer.buffered)
    with pytest.raises(ConfigError, match="its sample 0 is not the same as before"):
        packer.load_state_dict(before, {0: samples()[1]})
    assert packer.state_dict() == before


@pytest.mark.parametrize("state", [None, [], {}, {"epoch": 0, "rows": 0}, {"epoch": 0, "rows": 0, "of": "", "more": 1}])
def test_what_is_no_state_is_refused(state):
    for what in (PackedBatchSampler(plan_bins([5], 10)), StreamPacker(SETTINGS), PackedStream(samples(), SETTINGS)):
        more = [{}] if isinstance(what, StreamPacker) else []
        with pytest.raises(ConfigError, match=rf"state.*{type(what).__name__}"):
            what.load_state_dict(state, *more)


CASES = pytest.mark.parametrize("cases", [125, *slow(250)])
"""Accidents of `mutations`: the rows that would have come, or a refusal that is ours."""


@CASES
def test_edited_states_of_a_stream(cases):
    def case(rng: random.Random) -> bool:
        state, rest = stopped(samples(count=120), rows := rng.randrange(1, 40))
        state = edited(state, rng) if rng.random() < 0.8 else stopped(samples("b", count=120), rows)[0]
        return continued(samples(count=120), state) == rest

    check(outcomes(cases, 0, case), cases=cases)


# ---------------------------------------------------------------------- digests


def test_a_digest_is_of_content_in_any_order_of_names():
    values = [None, True, 1, 1.0, "1", b"1", [1], {"1": 1}, {1}, np.int64(1), np.array([1]), np.array([1], np.int32)]
    values += [torch.tensor([1]), torch.tensor([1], dtype=torch.int32), torch.ones(1, dtype=torch.bfloat16), [[1]]]
    values += [SampleError("no", reason="a"), SampleError("no", reason="b"), object()]
    values += [{1: 1, "a": 1}, {1: 2, "a": 1}, {(1, 2): 1}, {"1": 1, "a": 1}]
    assert len({content_digest(value) for value in values}) == len(values)
    assert content_digest({"a": 1, "b": (2, 3)}) == content_digest({"b": [2, 3], "a": 1})
