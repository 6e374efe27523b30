"""plot_ratios: a dot a ratio, a line a name, a colour a run."""

from __future__ import annotations

from vlmpack.plots import Ratio, plot_ratios

RUNS = {
    "before": [
        Ratio(name="step", value=2.0, low=1.9, high=2.1, target=1.5),
        Ratio(name="pack", value=0.5, low=0.4, high=0.6),
    ],
    "after": [Ratio(name="step", value=2.5, low=2.4, high=2.6, target=1.5)],
}


def test_every_ratio_is_a_dot_on_the_line_of_its_name() -> None:
    (axes,) = plot_ratios(RUNS).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["step", "pack"]
    dots = {line.get_label(): line for line in axes.lines if line.get_marker() == "o"}
    assert list(dots["before"].get_xdata()) == [2.0, 0.5]
    assert [round(y) for y in dots["before"].get_ydata()] == [0, 1]
    assert list(dots["after"].get_xdata()) == [2.5]


def test_targets_are_marked_where_they_are() -> None:
    (axes,) = plot_ratios(RUNS).axes
    marks = [list(line.get_xdata()) for line in axes.lines if line.get_marker() == "|"]
    assert marks == [[1.5], [1.5]]


def test_one_run_needs_no_legend() -> None:
    (axes,) = plot_ratios({"run": RUNS["before"]}).axes
    assert axes.get_legend() is None
