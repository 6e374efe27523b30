"""States that accidents happened to: the rows that would have come, or a refusal that is ours."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from cases import slow
from mutations import check, edited, outcomes

from vlmpack.loading import PackedBatchSampler, PackedStream, RowSettings
from vlmpack.plan import plan_bins

SEED = 0
every_number = pytest.mark.parametrize("cases", [125, *slow(250)])
SETTINGS = RowSettings(capacity=64, oversize="own_row", limits={"images": 4})


def samples(name: str = "a", count: int = 120) -> list[dict]:
    lengths = [1 + at * 7 % 40 + 60 * (at % 17 == 16) for at in range(count)]
    return [{"id": f"{name}{at}", "length": length, "images": at % 3} for at, length in enumerate(lengths)]


def costs(sample: Any) -> dict[str, int]:
    return {"images": sample["images"]}


def stream(of: list[dict], **settings: Any) -> PackedStream:
    return PackedStream(of, SETTINGS, costs=costs, **settings)


def stopped(of: list[dict], rows: int) -> tuple[dict, list]:
    whole = stream(of)
    left = iter(whole)
    for _ in range(rows):
        next(left)
    return copy.deepcopy(whole.state_dict()), list(left)


@every_number
def test_edited_states_of_a_stream(cases):
    data, theirs = samples(), samples("b")

    def case(rng: random.Random) -> bool:
        rows = rng.randrange(1, 40)
        state, rest = stopped(data, rows)
        state = edited(state, rng) if rng.random() < 0.8 else stopped(theirs, rows)[0]
        again = stream(data)
        again.load_state_dict(state)
        return list(again) == rest

    check(outcomes(cases, SEED, case), cases=cases)


@every_number
def test_edited_states_of_a_sampler(cases):
    """A number that is possible is another place of the same epochs."""
    plans = [plan_bins([1 + at * step % 9 for at in range(60)], 12) for step in (7, 5)]
    whole = {epoch: PackedBatchSampler(plans[0]) for epoch in range(20)}
    for epoch, sampler in whole.items():
        sampler.set_epoch(epoch)
    rows = {epoch: list(sampler) for epoch, sampler in whole.items()}

    def case(rng: random.Random) -> bool:
        state = PackedBatchSampler(plans[rng.random() < 0.2]).state_dict()
        state = {**state, "epoch": rng.randrange(9), "rows": rng.randrange(8)}
        state = edited(state, rng) if rng.random() < 0.8 else state
        sampler = PackedBatchSampler(plans[0])
        sampler.load_state_dict(state)
        if state["epoch"] not in rows:
            return sampler.epoch == state["epoch"]
        return list(sampler) == rows[state["epoch"]][state["rows"] :]

    check(outcomes(cases, SEED + 2, case), cases=cases)
