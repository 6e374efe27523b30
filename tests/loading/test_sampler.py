"""PackedBatchSampler: every rank as many rows, every sample once an epoch, and an exact continuation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan.naive import checked
from torchdata.stateful_dataloader import StatefulDataLoader

from vlmpack.errors import ConfigError
from vlmpack.loading import PackedBatchSampler
from vlmpack.plan import Budget, plan_bins

LENGTHS = np.random.default_rng(2).integers(1, 50, 101).tolist()
CAPACITY = 100


def sampler(**settings) -> PackedBatchSampler:
    """Over an odd number of rows."""
    plan = plan_bins(LENGTHS, CAPACITY)
    assert len(plan) % 2 == 1
    return PackedBatchSampler(plan, **settings)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=24, max_size=60),
    ranks=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    seed=st.none() | st.integers(0, 3),
)
def test_ranks_have_as_many_rows_and_between_them_every_sample_once(lengths, ranks, accumulation, seed):
    plan = plan_bins(lengths, 60)
    settings = {"ranks": ranks, "accumulation": accumulation, "seed": seed}
    if -len(plan) % (ranks * accumulation) + len(plan) > len(lengths):
        with pytest.raises(ConfigError, match="cannot fill"):
            PackedBatchSampler(plan, **settings)
        return
    rows = [[*PackedBatchSampler(plan, rank=rank, **settings)] for rank in range(ranks)]
    assert len({len(mine) for mine in rows}) == 1
    assert len(rows[0]) % accumulation == 0
    assert sorted(sample for mine in rows for row in mine for sample in row) == list(range(len(lengths)))
    assert max(sum(lengths[sample] for sample in row) for mine in rows for row in mine) <= 60


def test_empty_rows_fill_the_last_step_when_asked():
    rows = [[*sampler(ranks=2, rank=rank, remainder="empty")] for rank in range(2)]
    assert len(rows[0]) == len(rows[1])
    assert [*rows[0], *rows[1]].count([]) == 1
    assert sorted(sample for mine in rows for row in mine for sample in row) == list(range(len(LENGTHS)))


def test_dropped_rows_are_others_every_epoch():
    one = sampler(ranks=2, rank="all", remainder="drop")
    missing = [set(range(len(LENGTHS))) - {sample for row in one for sample in row} for _ in range(3)]
    assert all(missing)
    assert missing[0] != missing[1]


def test_every_epoch_meets_other_samples_in_other_rows_and_none_gets_longer():
    one = sampler()
    epochs = [[*one] for _ in range(3)]
    assert one.epoch == 3
    assert {len(epoch) for epoch in epochs} == {len(one)}
    rows = [{tuple(sorted(row)) for row in epoch} for epoch in epochs]
    assert rows[0] != rows[1] != rows[2]
    loads = [sorted(sum(LENGTHS[sample] for sample in row) for row in epoch) for epoch in epochs]
    assert loads[0] == loads[1] == loads[2]
    assert all(sorted(sample for row in epoch for sample in row) == list(range(len(LENGTHS))) for epoch in epochs)


def test_samples_change_places_only_with_those_of_the_same_length_and_budget():
    images = np.arange(len(LENGTHS)) % 3
    plan = plan_bins(LENGTHS, CAPACITY, budgets=[Budget(name="images", costs=images, limit=6)])
    one = PackedBatchSampler(plan)
    for epoch in range(3):
        checked(one.epoch_plan(epoch))


def test_a_seed_gives_the_same_epochs_and_no_seed_the_order_of_the_plan():
    first, again, other = sampler(seed=1), sampler(seed=1), sampler(seed=2)
    assert [[*first], [*first]] == [[*again], [*again]]
    assert [*sampler(seed=1)] != [*other]
    plan = plan_bins(LENGTHS, CAPACITY)
    still = PackedBatchSampler(plan, seed=None)
    assert [*still] == [*still]
    assert sorted(map(tuple, still)) == sorted(plan.bins)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 on torch 2.13
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_data_loader_continues_in_the_middle_of_an_epoch(workers):
    dataset = list(range(len(LENGTHS)))

    def make():
        return StatefulDataLoader(dataset, batch_sampler=sampler(), collate_fn=list, num_workers=workers)

    rows = list(make())
    half = make()
    left = iter(half)
    for _ in range(9):
        next(left)
    resumed = make()
    resumed.load_state_dict(half.state_dict())
    assert list(resumed) == rows[9:]
    assert len(rows) > 20


@pytest.mark.parametrize("remainder", ["split", "empty", "drop"])
@pytest.mark.parametrize("later", [(1, 4), (2, 2), (4, 1)])
@pytest.mark.parametrize("before", [(1, 4), (2, 2), (4, 1)])
@pytest.mark.parametrize("done", [0, 2])
def test_a_state_continues_on_any_ranks_with_the_same_rows_in_each_step(done, before, later, remainder):
    """Ranks times accumulation is 4: of this epoch, stopped after some steps, and of the next one.

    There are more steps than the 8 that exchange rows with an accumulation of 4; with one of 1, 32 would.
    """
    plan = plan_bins(3 * LENGTHS, CAPACITY)

    def of_ranks(ranks, accumulation):
        settings = {"ranks": ranks, "accumulation": accumulation, "remainder": remainder, "seed": 3}
        return [PackedBatchSampler(plan, rank=rank, **settings) for rank in range(ranks)]

    def steps(samplers, accumulation):
        rows = [[tuple(row) for row in each] for each in samplers]
        starts = range(0, len(rows[0]), accumulation)
        return [sorted(row for rank in rows for row in rank[at : at + accumulation]) for at in starts]

    epochs, resumed = of_ranks(*before), of_ranks(*later)
    whole = [*steps(epochs, before[1]), *steps(epochs, before[1])]
    state = {**of_ranks(*before)[0].state_dict(), "rows": done * before[1]}
    for each in resumed:
        each.load_state_dict(state)
        each.set_epoch(0)  # as a trainer does at the start of the epoch that it resumes
    assert [*steps(resumed, later[1]), *steps(resumed, later[1])] == whole[done:]
    assert {len(each) for each in resumed} == {len(whole) // 2 * later[1]}


def test_the_state_of_other_rows_or_of_other_shuffles_is_refused():
    state = sampler(accumulation=4).state_dict()
    for other, told in [
        ({"seed": 1}, "seed 0, but these are of seed 1: .* plan and distribute rows as before"),
        ({"remainder": "drop"}, "rows of remainder 'split', but these are of remainder 'drop'"),
        ({"costs": np.ones(len(LENGTHS))}, r"costs '\w+', but these are of costs '\w+'"),
        (
            {"ranks": 2, "rank": 0, "accumulation": 1},
            "rows a step 4, .* times accumulation .* has to be 4, as before: on 2 ranks, an accumulation of 2$",
        ),
    ]:
        with pytest.raises(ConfigError, match=told):
            sampler(**{"accumulation": 4, **other}).load_state_dict(state)
    with pytest.raises(ConfigError, match="from the middle of a step, after 3 of its 4 rows"):
        sampler(ranks=4, rank=0).load_state_dict({**state, "rows": 7})
    with pytest.raises(ConfigError, match="plan and distribute rows as before"):
        PackedBatchSampler(plan_bins(LENGTHS, CAPACITY + 1), accumulation=4).load_state_dict(state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": 2, "rank": 2}, "rank must lie between 0 and 1, got 2"),
        ({"ranks": 2, "rank": 0.5}, r"rank must lie between 0 and 1, got 0\.5"),
        ({"ranks": 2}, "ranks=2, but rank= was left out: every process would train on the same rows"),
        ({"ranks": 0}, "ranks must be a whole number from 1 to 2147483647, got 0"),
        ({"accumulation": 1.5}, r"accumulation must be a whole number from 1 to 2147483647, got 1\.5"),
        ({"seed": -1}, "the seed must be a whole number of at least 0"),
        ({"costs": np.full(101, np.nan)}, "costs must be one finite number"),
        ({"remainder": "repeat"}, "remainder must be one of split, empty, drop, got 'repeat'"),
        ({"costs": np.ones(3)}, "3 costs for 101 samples"),
        (
            {"ranks": 500, "rank": 0, "remainder": "drop"},
            r"\d+ rows make no step of 500 ranks with accumulation 1 and remainder 'drop'",
        ),
        ({"ranks": 500, "rank": 0}, "101 samples cannot fill 500 rows, the next multiple of 500"),
    ],
)
def test_what_cannot_be_dealt_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        sampler(**settings)
