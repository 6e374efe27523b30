"""Draw histograms of lengths, loss curves and benchmark ratios; and what all figures share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from vlmpack.files import atomic_file, writing
from vlmpack.plan.length_table import Summary, histogram, summary

SAMPLES = ("#4C78A8", "#F2A65A", "#59A89C", "#D8697A", "#8E7CC3", "#9AB857", "#C98BB9", "#7FB7D6")
"""One colour a sample, again from the first after the last."""
PADDING = GRID = "#E9E9EC"
INK = "#2B2D33"
FAINT = "#8A8D96"
ACCENT = "#C8442F"
CURVES = (SAMPLES[0], ACCENT, *SAMPLES[2:])
BINS = 40
PANEL_INCHES, LINE_INCHES = 2.1, 0.28


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


def bare(axes: Axes) -> None:
    """Remove the box around the axes, and the ticks."""
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, colors=FAINT, labelsize=8)


def heading(axes: Axes, title: str, note: str = "") -> None:
    """Write a bold title at the left, and its numbers at the right."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=8)
    axes.set_title(note, loc="right", fontsize=9.5, color=FAINT, pad=8)


# ---------------------------------------------------------------------- lengths


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
    size = (8, PANEL_INCHES * len(columns) + (0.4 if title else 0))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(columns), 1, squeeze=False)[:, 0]
    for i, (axes, (name, values)) in enumerate(zip(panels, columns.items(), strict=True)):
        _draw_histogram(axes, name, values, SAMPLES[i % len(SAMPLES)], capacities if i == 0 else ())
    panels[-1].set_xlabel("of a sample", fontsize=8.5, color=FAINT, loc="right")
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    return figure


def _draw_histogram(axes: Axes, name: str, values: np.ndarray, colour: str, capacities: Sequence[int]) -> None:
    bins = histogram(values, most=BINS)
    width = (bins[0].stop or 1) - bins[0].start
    edges = [each.start for each in bins]
    axes.bar(edges, [each.count for each in bins], width=0.92 * width, align="edge", color=colour, linewidth=0)
    stop = edges[-1] + width
    if bins[-1].stop is None:
        axes.annotate("+", (edges[-1] + width / 2, bins[-1].count), ha="center", va="bottom", fontsize=9, color=FAINT)
    numbers = summary(values)
    lines = [("median", numbers.median, ACCENT), ("p95", numbers.p95, ACCENT), ("p99", numbers.p99, ACCENT)]
    lines += [(f"row of {capacity:,}", capacity, INK) for capacity in capacities if capacity < stop]
    for place, (text, at, ink) in enumerate(lines):
        _mark(axes, text, at, ink, height=1 - 0.1 * place)
    axes.set_xlim(edges[0], stop)
    _label(axes, name, numbers)


def _mark(axes: Axes, text: str, at: float, ink: str, *, height: float) -> None:
    """Draw a line with its name at a height of the panel, 0 to 1."""
    axes.axvline(at, color=ink, linewidth=1)
    above = axes.get_xaxis_transform()
    axes.text(at, height, f" {text}", transform=above, fontsize=7.5, color=ink, ha="left", va="top", clip_on=False)


def _label(axes: Axes, name: str, numbers: Summary) -> None:
    plain(axes)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    heading(
        axes,
        name,
        f"mean {numbers.mean:,.0f}   median {numbers.median:,.0f}   p99 {numbers.p99:,.0f}   max {numbers.max:,}",
    )


# ---------------------------------------------------------------------- losses


def plot_losses(curves: Mapping[str, Sequence[float]], *, title: str = "Training loss") -> Figure:
    """Draw one loss curve a name, and below them how far each is from the first.

    The first is broad and pale and the others are thin, so that curves which agree all stay visible. Their differences
    have a log axis: equality that looks perfect above shows its size there. Steps that are equal to the last bit have
    no point.

    Args:
        curves: name -> loss of each optimiser step, in nats a token.
        title: the heading.
    """
    several = len(curves) > 1
    figure = Figure(figsize=(7, 5.0 if several else 3.4), layout="constrained")
    panels = figure.subplots(1 + several, 1, height_ratios=(1.6, 1)[: 1 + several], sharex=True, squeeze=False)[:, 0]
    for i, (name, losses) in enumerate(curves.items()):
        broad = i == 0 and several
        (line,) = panels[0].plot(range(1, len(losses) + 1), losses, label=name, color=CURVES[i % len(CURVES)])
        line.set(linewidth=6 if broad else 1.6, alpha=0.35 if broad else 1.0)
    plain(panels[0])
    panels[0].legend(frameon=False, fontsize=9, labelcolor=INK)
    heading(panels[0], title, "nats a token")
    if several:
        _draw_differences(panels[1], curves)
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[-1].set_xlabel("step", fontsize=8.5, color=FAINT, loc="right")
    return figure


def plain(axes: Axes) -> None:
    """Remove the box around the axes, and draw faint lines of equal height behind all else."""
    bare(axes)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _draw_differences(axes: Axes, curves: Mapping[str, Sequence[float]]) -> None:
    (first, reference), *others = curves.items()
    largest = 0.0
    for i, (_, losses) in enumerate(others, start=1):
        steps = min(len(losses), len(reference))
        values = np.abs(np.asarray(losses[:steps], float) - np.asarray(reference[:steps], float))
        largest = max(largest, float(values.max(initial=0)))
        drawn = np.where(values > 0, values, np.nan)
        axes.plot(range(1, steps + 1), drawn, color=CURVES[i % len(CURVES)], linewidth=1.2, marker="o", markersize=2.5)
    plain(axes)
    if largest > 0:
        _log_axis(axes, top=largest)
    note = f"at most {largest:.1e}" if largest else "none: equal to the last bit"
    heading(axes, f"Difference from “{first}”", note)


def _log_axis(axes: Axes, *, top: float) -> None:
    """Give the axis whole decades, three at least."""
    axes.set_yscale("log")
    decade = int(np.ceil(np.log10(top)))
    lowest = int(np.floor(np.log10(max(axes.dataLim.minposy, top * 1e-9))))
    axes.set_ylim(10.0 ** min(lowest, decade - 3), 10.0**decade)
    axes.yaxis.set_major_locator(LogLocator(numticks=5))
    axes.yaxis.set_minor_locator(NullLocator())


# ---------------------------------------------------------------------- ratios


@final
@dataclass(frozen=True, kw_only=True)
class Ratio:
    """One ratio of one run."""

    name: str
    """Label; ratios of several runs with one name share a line."""
    value: float
    """The median."""
    low: float
    """The lower quartile."""
    high: float
    """The upper quartile."""
    target: float | None = None
    """Limit that it has to reach; None: there is none."""


def plot_ratios(runs: Mapping[str, Sequence[Ratio]], *, title: str = "Ratios") -> Figure:
    """Draw a dot with its quartiles for every ratio, a colour a run, and its target as a bar across the line.

    Args:
        runs: the name of a run -> its ratios, above 0.
        title: the heading.
    """
    names = list(dict.fromkeys(ratio.name for ratios in runs.values() for ratio in ratios))
    figure = Figure(figsize=(8, 1.3 + LINE_INCHES * len(names)), layout="constrained")
    axes = figure.subplots()
    place = {name: at for at, name in enumerate(names)}
    for at, (run, ratios) in enumerate(runs.items()):
        _draw_run(
            axes, ratios, place, colour=SAMPLES[at % len(SAMPLES)], shift=0.18 * (at - (len(runs) - 1) / 2), name=run
        )
    axes.axvline(1, color=PADDING, linewidth=2, zorder=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g} x")
    bare(axes)
    axes.grid(axis="x", color=PADDING, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_yticks(range(len(names)), names, fontsize=8, color=INK)
    axes.set_ylim(len(names) - 0.5, -0.5)
    if len(runs) > 1:
        axes.legend(frameon=False, fontsize=8.5, labelcolor=INK, loc="best")
    heading(axes, title, "median and quartiles; | target")
    return figure


def _draw_run(
    axes: Axes, ratios: Sequence[Ratio], place: Mapping[str, int], *, colour: str, shift: float, name: str
) -> None:
    heights = [place[ratio.name] + shift for ratio in ratios]
    axes.hlines(heights, [r.low for r in ratios], [r.high for r in ratios], color=colour, linewidth=3, alpha=0.4)
    axes.plot([r.value for r in ratios], heights, "o", color=colour, markersize=5, label=name)
    targets = [(ratio.target, place[ratio.name]) for ratio in ratios if ratio.target is not None]
    axes.plot([at for at, _ in targets], [line for _, line in targets], "|", color=FAINT, markersize=13)
