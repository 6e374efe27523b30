"""Figures that compare runs: curves of training losses, and ratios of benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vlmpack.plots.style import ACCENT, FAINT, INK, PADDING, SAMPLES, heading, label_x, remove_frame

COLOURS = (SAMPLES[0], ACCENT, *SAMPLES[2:])
LINE_INCHES = 0.28


def plot_losses(curves: Mapping[str, Sequence[float]], *, title: str = "Training loss") -> Figure:
    """Draw one loss curve a name.

    The first is broad and pale and the others are thin, so that curves which agree all stay visible.

    Args:
        curves: name -> loss of each optimiser step, in nats a token.
        title: the heading.
    """
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    for i, (name, losses) in enumerate(curves.items()):
        broad = i == 0 and len(curves) > 1
        (line,) = axes.plot(range(1, len(losses) + 1), losses, label=name, color=COLOURS[i % len(COLOURS)])
        line.set(linewidth=6 if broad else 1.6, alpha=0.35 if broad else 1.0)
    remove_frame(axes, grid="y")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    label_x(axes, "step")
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    heading(axes, title, "nats a token")
    return figure


@final
@dataclass(frozen=True, kw_only=True)
class Ratio:
    """One ratio of one run."""

    name: str
    """Name of the ratio; ratios of several runs with one name share a line."""
    value: float
    """The median."""
    low: float
    """The lower quartile."""
    high: float
    """The upper quartile."""
    target: float | None = None
    """The value it has to reach; None: none."""


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
    remove_frame(axes, grid="x")
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
