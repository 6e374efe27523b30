"""Fill, balance, costs and epochs: what is drawn is what was given."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.patches import Rectangle

from vlmpack.errors import ConfigError
from vlmpack.plan import balance_rows, plan_bins
from vlmpack.plots import StepCost, plot_balance, plot_costs, plot_epochs, plot_fill

LENGTHS = np.random.default_rng(0).integers(10, 400, 300)


def test_every_row_is_in_one_bar_and_the_mean_is_marked() -> None:
    plans = {"in order": plan_bins(LENGTHS, 1000, strategy="next_fit"), "exact": plan_bins(LENGTHS, 1000)}
    for axes, (name, plan) in zip(plot_fill(plans).axes, plans.items(), strict=True):
        bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
        assert sum(bar.get_height() for bar in bars) == len(plan)
        assert all(bar.get_x() + 2 >= axes.get_xlim()[0] for bar in bars if bar.get_height())
        assert axes.lines[0].get_xdata()[0] == pytest.approx(100 * plan.fill)
        assert axes.get_title(loc="left") == name
        expected = f"{len(plan)} rows of 1,000 tokens, on average {100 * plan.fill:.1f}% full"
        assert axes.get_title(loc="right") == expected


def test_a_fill_histogram_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs plans"):
        plot_fill({})


def test_the_dearest_rank_of_each_step_is_the_upper_edge() -> None:
    costs = np.random.default_rng(0).random(44)
    schedule = balance_rows(costs, ranks=4, window=1, method="as_given")
    (axes,) = plot_balance({"as given": schedule}).axes
    load = costs.reshape(11, 4)
    np.testing.assert_allclose(axes.lines[0].get_ydata(), load.max(1) / load.mean(1))
    assert axes.get_title(loc="right") == f"{schedule.imbalance - 1:.2%} of the time lost"


def test_a_last_step_with_empty_places_is_left_out() -> None:
    (axes,) = plot_balance({"x": balance_rows(np.ones(10), ranks=4)}).axes
    assert len(axes.lines[0].get_xdata()) == 2


def test_costs_are_drawn_in_mebibytes() -> None:
    costs = [StepCost(samples=n, tokens_per_second=100.0 * n, memory=n * 2**20) for n in (1, 4)]
    speed, memory = plot_costs({"padded": costs, "packed": costs}).axes
    for axes, expected in ((speed, [100.0, 400.0]), (memory, [1.0, 4.0])):
        assert [list(line.get_ydata()) for line in axes.lines] == [expected, expected]
        assert list(axes.lines[0].get_xdata()) == [1, 4]


def test_epochs_begin_at_one_or_where_they_were_measured() -> None:
    loss, f1 = plot_epochs({"Loss": {"train": [3.0, 2.0]}, "Field F1": {"all": {10: 0.1, 20: 0.7}}}, title="mine").axes
    assert list(loss.lines[0].get_xdata()) == [1, 2]
    assert list(f1.lines[0].get_xdata()) == [10, 20]
    assert list(f1.lines[0].get_ydata()) == [0.1, 0.7]


def test_a_panel_has_a_log_axis_on_request() -> None:
    loss, other = plot_epochs({"Loss": {"a": [3.0, 0.1]}, "Other": {"a": [3.0, 0.1]}}, log=("Loss",)).axes
    assert (loss.get_yscale(), other.get_yscale()) == ("log", "linear")
