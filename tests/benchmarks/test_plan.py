"""The planner's case: its length sets are what they say, and it measures what it promises. Never how fast."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.cases.plan import LENGTH_SETS, multi_constraint_plan, stream
from benchmarks.command import CASES, PlanShapes
from benchmarks.figures import BenchSettings, Figure, Skipped

TINY = PlanShapes(many=400, few=100, against_trl=100, stream=300, waiting=16, ranks=2)


@pytest.mark.full
def test_every_length_set_is_held_to_the_same_targets(hide_package):
    hide_package("trl")
    *figures, trl = CASES["plan"].run(BenchSettings(seconds=0.0), TINY)
    assert all(isinstance(figure, Figure) and figure.case == "plan" and figure.target for figure in figures)
    assert len({figure.name for figure in figures}) == len(figures) == 7 * len(LENGTH_SETS) + 1
    of_cord = {figure.name: figure.target.limit for figure in figures if figure.name.startswith("CORD")}
    assert list(of_cord.values()) == [0.4, 1.1, 1.0, 0.1, 200, 20e-6, 1.0]
    assert trl == Skipped(case="plan", name="plan / TRL's bfd, 100 lengths", why=trl.why)
    assert trl.why.startswith("TRL cannot be imported")


@pytest.mark.parametrize(
    ("name", "low", "mean", "p99", "high"),
    [("CORD", 400, 1076, 2500, 2500), ("LVIS", 1, 1150, 11_000, 12_000), ("uniform", 16, 2056, 4055, 4096)],
)
def test_length_sets_have_the_shape_that_they_are_named_for(name, low, mean, p99, high):
    lengths = LENGTH_SETS[name].lengths(100_000)
    assert low <= lengths.min()
    assert lengths.max() <= min(high, LENGTH_SETS[name].capacity)
    assert lengths.mean() == pytest.approx(mean, rel=0.02)
    assert np.percentile(lengths, 99) == pytest.approx(p99, rel=0.05)
    assert np.array_equal(lengths, LENGTH_SETS[name].lengths(100_000))


def test_a_stream_with_more_waiting_samples_is_fuller():
    lengths = LENGTH_SETS["CORD"].lengths(1000)
    assert stream(lengths, 4096, 64)[0] < stream(lengths, 4096, 4)[0]


def test_the_three_limits_do_bind_alike():
    plan = multi_constraint_plan(2000, seed=1)
    needed = [plan.lengths.sum() / plan.capacity, *(b.costs.sum() / b.limit for b in plan.budgets)]
    assert max(needed) < 1.06 * min(needed)
