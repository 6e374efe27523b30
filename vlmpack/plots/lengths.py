"""Histograms of lengths: how long samples are, and of what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from vlmpack.plan import Summary, histogram, summary
from vlmpack.plots.style import ACCENT, FAINT, INK, SAMPLES, bare, heading

BINS = 40
PANEL_INCHES = 2.1


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
        _draw(axes, name, values, SAMPLES[i % len(SAMPLES)], capacities if i == 0 else ())
    panels[-1].set_xlabel("of a sample", fontsize=8.5, color=FAINT, loc="right")
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    return figure


def _draw(axes: Axes, name: str, values: np.ndarray, colour: str, capacities: Sequence[int]) -> None:
    bins = histogram(values, most=BINS)
    width = (bins[0].stop or 1) - bins[0].start
    edges = [one.start for one in bins]
    axes.bar(edges, [one.count for one in bins], width=0.92 * width, align="edge", color=colour, linewidth=0)
    stop = edges[-1] + width
    if bins[-1].stop is None:
        axes.annotate("+", (edges[-1] + width / 2, bins[-1].count), ha="center", va="bottom", fontsize=9, color=FAINT)
    known = summary(values)
    lines = [("median", known.median, ACCENT), ("p95", known.p95, ACCENT), ("p99", known.p99, ACCENT)]
    lines += [(f"row of {capacity:,}", capacity, INK) for capacity in capacities if capacity < stop]
    for place, (text, at, ink) in enumerate(lines):
        _mark(axes, text, at, ink, height=1 - 0.1 * place)
    axes.set_xlim(edges[0], stop)
    _dress(axes, name, known)


def _mark(axes: Axes, text: str, at: float, ink: str, *, height: float) -> None:
    """A line with its name, each a little lower than the one before."""
    axes.axvline(at, color=ink, linewidth=1)
    above = axes.get_xaxis_transform()
    axes.text(at, height, f" {text}", transform=above, fontsize=7.5, color=ink, ha="left", va="top", clip_on=False)


def _dress(axes: Axes, name: str, known: Summary) -> None:
    bare(axes)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color="#E9E9EC", linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    heading(
        axes, name, f"mean {known.mean:,.0f}   median {known.median:,.0f}   p99 {known.p99:,.0f}   max {known.max:,}"
    )
