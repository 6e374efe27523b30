"""Benchmark ratios as dots: how far each is from 1, where its target lies, and how it differs between runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vlmpack.plots.style import FAINT, INK, PADDING, SAMPLES, bare, heading

LINE_INCHES = 0.28


@final
@dataclass(frozen=True, kw_only=True)
class Ratio:
    """One ratio of one run."""

    name: str
    """What it is; ratios of several runs with one name share a line."""
    value: float
    """The median."""
    low: float
    """The lower quartile."""
    high: float
    """The upper quartile."""
    target: float | None = None
    """What it has to reach; None: nothing."""


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
        _run(axes, ratios, place, colour=SAMPLES[at % len(SAMPLES)], shift=0.18 * (at - (len(runs) - 1) / 2), name=run)
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


def _run(
    axes: Axes, ratios: Sequence[Ratio], place: Mapping[str, int], *, colour: str, shift: float, name: str
) -> None:
    heights = [place[ratio.name] + shift for ratio in ratios]
    axes.hlines(heights, [r.low for r in ratios], [r.high for r in ratios], color=colour, linewidth=3, alpha=0.4)
    axes.plot([r.value for r in ratios], heights, "o", color=colour, markersize=5, label=name)
    targets = [(ratio.target, place[ratio.name]) for ratio in ratios if ratio.target is not None]
    axes.plot([at for at, _ in targets], [line for _, line in targets], "|", color=FAINT, markersize=13)
