"""Draw histograms and curves: lengths, losses, fill, balance, speed and memory, epochs. And one style for all figures.

Figures are `Figure` objects of matplotlib; `pyplot` is never touched, so drawing needs no display.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, PercentFormatter, StrMethodFormatter

from vlmpack.errors import ConfigError
from vlmpack.files import atomic_file, writing
from vlmpack.plan.balance import EMPTY, Schedule
from vlmpack.plan.length_table import histogram, summary
from vlmpack.plan.plan import Plan

SAMPLES = ("#4C78A8", "#F2A65A", "#59A89C", "#D8697A", "#8E7CC3", "#9AB857", "#C98BB9", "#7FB7D6")
"""One color a sample or a curve, again from the first after the last."""
PADDING = "#E9E9EC"
INK = "#2B2D33"
FAINT = "#8A8D96"
ACCENT = "#C8442F"
CURVES = (SAMPLES[0], ACCENT, *SAMPLES[2:])
BINS = 40
STEP = 2
"""Width of a bar of a fill histogram, in per cent."""


# ---------------------------------------------------------------------- style


def save(figure: Figure, path: str | Path, *, dpi: int = 160) -> Path:
    """Write the figure as a PNG, and make its folder.

    Returns:
        The path that was written.

    Raises:
        ConfigError: the file cannot be written.
    """
    target = Path(path)
    with atomic_file(target) as temporary, writing(target):
        figure.savefig(temporary, dpi=dpi, facecolor="white", format="png")
    return target


def new_figure(width: float, height: float, title: str | None = None, **spacing: Any) -> Figure:
    """Make a figure of this size in inches; a title stands above it."""
    size = (width, height + (0.4 if title else 0))
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(**spacing))
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    return figure


def dress(axes: Axes, title: str, note: str = "", *, x: str = "", grid: bool = True) -> None:
    """Remove the box, write a bold title at the left and its numbers at the right, and draw faint lines behind all.

    Args:
        axes: whose x axis counts whole numbers.
        title: the heading.
        note: its numbers.
        x: label of the x axis.
        grid: draw the lines.
    """
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, colors=FAINT, labelsize=8)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=8)
    axes.set_title(note, loc="right", fontsize=9.5, color=FAINT, pad=8)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if x:
        axes.set_xlabel(x, fontsize=8.5, color=FAINT, loc="right")
    if grid:
        axes.grid(axis="y", color=PADDING, linewidth=0.8)
        axes.set_axisbelow(True)


def whole_y(axes: Axes) -> None:
    """Count whole numbers on the y axis."""
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def log_y(axes: Axes) -> None:
    """Make the y axis logarithmic, with few ticks."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(numticks=5))
    axes.yaxis.set_minor_locator(NullLocator())


def legend(where: Axes | Figure, **settings: Any) -> None:
    """Draw a legend without a box, on axes or below a figure."""
    settings.setdefault("loc", "best" if isinstance(where, Axes) else "outside lower left")
    where.legend(frameon=False, fontsize=8.5, labelcolor=INK, **settings)


# ---------------------------------------------------------------------- lengths and losses


def plot_lengths(
    columns: Mapping[str, np.ndarray], *, capacities: Sequence[int] = (), title: str | None = None
) -> Figure:
    """Draw one histogram a column, one below the other.

    Bins are of one round width up to the 99th percentile; the last bar, marked with a plus, is everything beyond.
    Median, 95th and 99th percentile are marked; so are capacities, in the first panel, where they fall into it.

    Args:
        columns: name -> int64 [N], not negative; at least one column, of at least one sample.
        capacities: of rows, in tokens.
        title: a heading for the whole figure.
    """
    figure = new_figure(8, 2.1 * len(columns), title)
    panels = figure.subplots(len(columns), 1, squeeze=False)[:, 0]
    for i, (axes, (name, values)) in enumerate(zip(panels, columns.items(), strict=True)):
        bins, numbers = histogram(values, most=BINS), summary(values)
        width = (bins[0].stop or 1) - bins[0].start
        edges, counts = [each.start for each in bins], [each.count for each in bins]
        axes.bar(edges, counts, width=0.92 * width, align="edge", color=SAMPLES[i % len(SAMPLES)], linewidth=0)
        stop = edges[-1] + width
        if bins[-1].stop is None:
            axes.annotate("+", (edges[-1] + width / 2, counts[-1]), ha="center", va="bottom", fontsize=9, color=FAINT)
        marks = [("median", numbers.median, ACCENT), ("p95", numbers.p95, ACCENT), ("p99", numbers.p99, ACCENT)]
        marks += [(f"row of {each:,}", each, INK) for each in (capacities if i == 0 else ()) if each < stop]
        for line, (text, at, ink) in enumerate(marks):
            axes.axvline(at, color=ink, linewidth=1)
            above = axes.get_xaxis_transform()
            axes.text(at, 1 - 0.1 * line, f" {text}", transform=above, fontsize=7.5, color=ink, ha="left", va="top")
        axes.set_xlim(edges[0], stop)
        note = f"mean {numbers.mean:,.0f}   median {numbers.median:,.0f}   p99 {numbers.p99:,.0f}   max {numbers.max:,}"
        dress(axes, name, note, x="of a sample" if axes is panels[-1] else "")
        whole_y(axes)
    return figure


def plot_losses(curves: Mapping[str, Sequence[float]], *, title: str = "Training loss") -> Figure:
    """Draw one loss curve a name, and below them how far each is from the first.

    The first is broad and pale and the others are thin, so that curves which agree all stay visible. Their differences
    have a log axis: equality that looks perfect above shows its size there. Steps that are equal to the last bit have
    no point.

    Args:
        curves: name -> loss of each optimizer step, in nats a token.
        title: the heading.
    """
    several = len(curves) > 1
    figure = new_figure(7, 5.0 if several else 3.4)
    panels = figure.subplots(1 + several, 1, height_ratios=(1.6, 1)[: 1 + several], sharex=True, squeeze=False)[:, 0]
    for i, (name, losses) in enumerate(curves.items()):
        broad = i == 0 and several
        (line,) = panels[0].plot(range(1, len(losses) + 1), losses, label=name, color=CURVES[i % len(CURVES)])
        line.set(linewidth=6 if broad else 1.6, alpha=0.35 if broad else 1.0)
    dress(panels[0], title, "nats a token", x="" if several else "step")
    legend(panels[0])
    if several:
        _draw_differences(panels[1], curves)
    return figure


def _draw_differences(axes: Axes, curves: Mapping[str, Sequence[float]]) -> None:
    (first, reference), *others = curves.items()
    largest = 0.0
    for i, (_, losses) in enumerate(others, start=1):
        steps = min(len(losses), len(reference))
        values = np.abs(np.asarray(losses[:steps], float) - np.asarray(reference[:steps], float))
        largest = max(largest, float(values.max(initial=0)))
        drawn = np.where(values > 0, values, np.nan)
        axes.plot(range(1, steps + 1), drawn, color=CURVES[i % len(CURVES)], linewidth=1.2, marker="o", markersize=2.5)
    if largest > 0:  # whole decades, three at least
        log_y(axes)
        decade, lowest = np.ceil(np.log10(largest)), np.floor(np.log10(max(axes.dataLim.minposy, largest * 1e-9)))
        axes.set_ylim(10.0 ** min(lowest, decade - 3), 10.0**decade)
    note = f"at most {largest:.1e}" if largest else "none: equal to the last bit"
    dress(axes, f"Difference from “{first}”", note, x="step")


# ---------------------------------------------------------------------- plans


def plot_fill(plans: Mapping[str, Plan], *, title: str | None = None) -> Figure:
    """Draw how full the rows of plans are: a histogram a plan, on one axis, its mean marked.

    Args:
        plans: name -> plan.
        title: a heading for the whole figure.

    Raises:
        ConfigError: there is no plan, or one without rows.
    """
    if not plans or not all(len(plan) for plan in plans.values()):
        raise ConfigError("a fill histogram needs plans, each with a row at least")
    figure = new_figure(8, 1.55 * len(plans) + 0.4, title)
    panels = figure.subplots(len(plans), 1, sharex=True, squeeze=False)[:, 0]
    edges = np.arange(0, 100 + STEP, STEP)
    least = 100.0
    for at, (axes, (name, plan)) in enumerate(zip(panels, plans.items(), strict=True)):
        fills = 100 * np.asarray([plan.lengths[ids].sum() for ids in plan]) / plan.capacity
        least = min(least, float(fills.min()))
        counts, _ = np.histogram(np.minimum(fills, 100), edges)
        axes.bar(edges[:-1], counts, width=0.92 * STEP, align="edge", color=SAMPLES[at % len(SAMPLES)], linewidth=0)
        axes.axvline(fills.mean(), color=ACCENT, linewidth=1)
        note = f"{len(plan):,} rows of {plan.capacity:,} tokens, on average {fills.mean():.1f}% full"
        dress(axes, name, note, x="of a row are real tokens" if axes is panels[-1] else "")
        whole_y(axes)
        axes.xaxis.set_major_formatter(PercentFormatter())
    panels[0].set_xlim(max(0, least // 10 * 10 - 10), 100.5)
    return figure


def plot_balance(schedules: Mapping[str, Schedule], *, title: str | None = None) -> Figure:
    """Draw what data parallel ranks compute in each step, from the cheapest to the dearest, over the step's mean.

    The upper edge is the rank on which all others block. A last step with empty places is left out.

    Args:
        schedules: name -> rows dealt to ranks, by `balance_rows`.
        title: a heading for the whole figure.
    """
    figure = new_figure(9, 2.8, title)
    panels = figure.subplots(1, len(schedules), sharey=True, squeeze=False)[0]
    for at, (axes, (name, schedule)) in enumerate(zip(panels, schedules.items(), strict=True)):
        load = schedule.load[(schedule.rows != EMPTY).all((1, 2))]
        load = load / load.mean(1, keepdims=True)
        steps, color = range(1, len(load) + 1), SAMPLES[at % len(SAMPLES)]
        axes.fill_between(steps, load.min(1), load.max(1), color=color, alpha=0.3, linewidth=0, step="mid")
        axes.step(steps, load.max(1), color=ACCENT, linewidth=1.2, where="mid")
        dress(axes, name, f"{schedule.imbalance - 1:.2%} of the time lost", x="step")
    panels[0].set_ylabel("cost of a rank, mean 1", fontsize=8.5, color=FAINT)
    return figure


# ---------------------------------------------------------------------- runs


@final
@dataclass(frozen=True, kw_only=True)
class StepCost:
    """One measured step of a micro-batch."""

    samples: int
    """Of the micro-batch."""
    tokens_per_second: float
    """Real tokens; padding counts for nothing."""
    memory: int
    """Largest memory, in bytes."""


def plot_costs(runs: Mapping[str, Sequence[StepCost]], *, title: str | None = None) -> Figure:
    """Draw speed and memory against the samples of a micro-batch, a color a run.

    Args:
        runs: name -> measured steps, such as those of padded batches and of packed rows.
        title: a heading for the whole figure.
    """
    speed = {name: {cost.samples: cost.tokens_per_second for cost in costs} for name, costs in runs.items()}
    memory = {name: {cost.samples: cost.memory / 2**20 for cost in costs} for name, costs in runs.items()}
    figure = new_figure(9, 3.1, title)
    left, right = figure.subplots(1, 2)
    _draw_curves(left, speed, "Speed", "real tokens a second", x="samples of a micro-batch", colors=(FAINT, *SAMPLES))
    _draw_curves(right, memory, "Memory", "MiB", x="samples of a micro-batch", colors=(FAINT, *SAMPLES))
    for axes in (left, right):
        whole_y(axes)
    return figure


Curve = Sequence[float] | Mapping[int, float]
"""Values of all epochs from the first one, or epoch -> value."""


def plot_epochs(
    panels: Mapping[str, Mapping[str, Curve]], *, log: Collection[str] = (), title: str | None = None
) -> Figure:
    """Draw measures over epochs, a panel each beside the others.

    Args:
        panels: name of a panel -> name of a curve -> its values.
        log: names of panels that have a log axis.
        title: a heading for the whole figure.
    """
    figure = new_figure(1.0 + 3.6 * len(panels), 2.9, title)
    for axes, (name, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        _draw_curves(axes, curves, name, x="epoch", log=name in log)
    return figure


def _draw_curves(
    axes: Axes, curves: Mapping[str, Curve], title: str, note: str = "", *, x: str, log: bool = False,
    colors: Sequence[str] = SAMPLES,
) -> None:  # fmt: skip
    for at, (name, values) in enumerate(curves.items()):
        points = values if isinstance(values, Mapping) else dict(enumerate(values, start=1))
        marker = "o" if len(points) < 20 else None
        line = {"color": colors[at % len(colors)], "linewidth": 1.8, "marker": marker, "markersize": 3}
        axes.plot(list(points), list(points.values()), label=name, **line)
    if log:
        log_y(axes)
    else:
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    dress(axes, title, note, x=x)
    legend(axes, ncols=1 if len(curves) < 5 else 2)
