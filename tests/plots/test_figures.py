"""Histograms and curves: what is drawn is what was given."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.patches import Rectangle
from PIL import Image

from vlmpack.errors import ConfigError
from vlmpack.plan import balance_rows, plan_bins
from vlmpack.plots import StepCost, plot_balance, plot_costs, plot_epochs, plot_fill, plot_lengths, plot_losses, save

LENGTHS = np.random.default_rng(0).integers(10, 400, 300)


def heights(axes):
    return [bar.get_height() for bar in axes.patches if isinstance(bar, Rectangle)]


def test_a_histogram_counts_every_sample_once_and_marks_what_lies_beyond_with_a_plus():
    lengths = np.array([*range(100, 300), 90_000])
    total, image = plot_lengths({"tokens": lengths, "image": lengths // 2}, title="mine").axes
    for axes in (total, image):
        assert sum(heights(axes)) == 201
        assert 10 < len(heights(axes)) <= 40
    assert [axes.get_title(loc="left") for axes in (total, image)] == ["tokens", "image"]
    assert total.get_title(loc="right") == "mean 646   median 200   p99 298   max 90,000"
    assert "+" in [text.get_text() for text in total.texts]
    assert heights(plot_lengths({"tokens": np.array([7])}).axes[0]) == [1]


def test_percentiles_and_the_capacities_that_fall_into_the_picture_are_marked():
    lengths = np.arange(100, 301)
    total, image = plot_lengths({"tokens": lengths, "image": lengths}, capacities=[250, 12_000]).axes
    names, common = (
        [text.get_text().strip() for text in axes.texts if text.get_text() != "+"] for axes in (total, image)
    )
    assert names == ["median", "p95", "p99", "row of 250"]
    assert [np.asarray(line.get_xdata())[0] for line in total.lines] == [200, 290, 298, 250]
    assert common == ["median", "p95", "p99"]


def test_curves_that_agree_both_stay_visible():
    axes, differences = plot_losses({"padded": [3.0, 2.0, 1.0], "packed": [3.0, 2.0, 1.0]}).axes
    broad, thin = axes.lines
    assert broad.get_linewidth() > 2 * thin.get_linewidth()
    assert thin.get_zorder() >= broad.get_zorder()
    assert list(thin.get_xdata()) == [1, 2, 3]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["padded", "packed"]
    assert differences.get_title(loc="right") == "none: equal to the last bit"
    assert len(plot_losses({"packed": [3.0, 2.0, 1.0]}).axes) == 1


def test_how_far_curves_are_apart_is_drawn_on_a_log_axis():
    _, axes = plot_losses({"padded": [3.0, 2.0, 1.0], "packed": [3.0, 2.0 + 2e-6, 1.0 - 1e-8]}).axes
    (line,) = axes.lines
    drawn = np.asarray(line.get_ydata())
    assert np.isnan(drawn[0])  # equal to the last bit
    np.testing.assert_allclose(drawn[1:], [2e-6, 1e-8], rtol=1e-6)
    assert axes.get_yscale() == "log"
    low, high = axes.get_ylim()
    assert low <= 1e-8 < 2e-6 <= high
    assert axes.get_title(loc="right") == "at most 2.0e-06"


def test_every_row_is_in_one_bar_and_the_mean_is_marked():
    plans = {"in order": plan_bins(LENGTHS, 1000, strategy="next_fit"), "exact": plan_bins(LENGTHS, 1000)}
    for axes, (name, plan) in zip(plot_fill(plans).axes, plans.items(), strict=True):
        bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
        assert sum(heights(axes)) == len(plan)
        assert all(bar.get_x() + 2 >= axes.get_xlim()[0] for bar in bars if bar.get_height())
        assert axes.lines[0].get_xdata()[0] == pytest.approx(100 * plan.fill)
        assert axes.get_title(loc="left") == name
        expected = f"{len(plan)} rows of 1,000 tokens, on average {100 * plan.fill:.1f}% full"
        assert axes.get_title(loc="right") == expected
    with pytest.raises(ConfigError, match="needs plans"):
        plot_fill({})


def test_the_dearest_rank_of_each_step_is_the_upper_edge_and_a_last_step_with_empty_places_is_left_out():
    costs = np.random.default_rng(0).random(44)
    schedule = balance_rows(costs, ranks=4, window=1, method="as_given")
    (axes,) = plot_balance({"as given": schedule}).axes
    load = costs.reshape(11, 4)
    np.testing.assert_allclose(axes.lines[0].get_ydata(), load.max(1) / load.mean(1))
    assert axes.get_title(loc="right") == f"{schedule.imbalance - 1:.2%} of the time lost"
    (axes,) = plot_balance({"x": balance_rows(np.ones(10), ranks=4)}).axes
    assert len(axes.lines[0].get_xdata()) == 2


def test_costs_are_drawn_in_mebibytes():
    costs = [StepCost(samples=n, tokens_per_second=100.0 * n, memory=n * 2**20) for n in (1, 4)]
    speed, memory = plot_costs({"padded": costs, "packed": costs}).axes
    for axes, expected in ((speed, [100.0, 400.0]), (memory, [1.0, 4.0])):
        assert [list(line.get_ydata()) for line in axes.lines] == [expected, expected]
        assert list(axes.lines[0].get_xdata()) == [1, 4]


def test_epochs_begin_at_one_or_where_they_were_measured_and_a_panel_has_a_log_axis_on_request():
    panels = {"Loss": {"train": [3.0, 2.0]}, "Field F1": {"all": {10: 0.1, 20: 0.7}}}
    loss, f1 = plot_epochs(panels, log=("Loss",), title="mine").axes
    assert list(loss.lines[0].get_xdata()) == [1, 2]
    assert list(f1.lines[0].get_xdata()) == [10, 20]
    assert list(f1.lines[0].get_ydata()) == [0.1, 0.7]
    assert (loss.get_yscale(), f1.get_yscale()) == ("log", "linear")


def test_saving_makes_the_folder_and_a_png(tmp_path):
    path = save(plot_losses({"packed": [3.0, 2.0]}), tmp_path / "new" / "losses.png", dpi=50)
    with Image.open(path) as image:
        assert (image.format, image.width) == ("PNG", 350)


def test_the_picture_of_the_readme_is_drawn_from_receipts(tmp_path):
    script = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "draw_packed_rows.py"))
    with Image.open(script["draw_packed_rows"](tmp_path / "rows.png", samples=2)) as image:
        assert image.width > 1000


@pytest.mark.slow
def test_drawing_needs_no_display_and_leaves_pyplot_alone():
    code = (
        "import sys, vlmpack.plots; assert 'matplotlib' in sys.modules; assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
