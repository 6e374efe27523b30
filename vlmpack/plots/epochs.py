"""Draw what a run comes to: how full its rows are, its speed and memory by micro-batch, its measures over epochs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator, PercentFormatter, StrMethodFormatter

from vlmpack.errors import ConfigError
from vlmpack.plan.balance import EMPTY, Schedule
from vlmpack.plan.plan import Plan
from vlmpack.plots.figures import ACCENT, FAINT, INK, SAMPLES, heading, plain

STEP = 2
"""Width of a bar of a fill histogram, in per cent."""


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
    figure = Figure(figsize=(8, 1.55 * len(plans) + 0.4 + (0.4 if title else 0)), layout="constrained")
    panels = figure.subplots(len(plans), 1, sharex=True, squeeze=False)[:, 0]
    edges = np.arange(0, 100 + STEP, STEP)
    least = 100.0
    for at, (axes, (name, plan)) in enumerate(zip(panels, plans.items(), strict=True)):
        fills = 100 * np.asarray([plan.lengths[ids].sum() for ids in plan]) / plan.capacity
        least = min(least, float(fills.min()))
        counts, _ = np.histogram(np.minimum(fills, 100), edges)
        axes.bar(edges[:-1], counts, width=0.92 * STEP, align="edge", color=SAMPLES[at % len(SAMPLES)], linewidth=0)
        axes.axvline(fills.mean(), color=ACCENT, linewidth=1)
        plain(axes)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        heading(axes, name, f"{len(plan):,} rows of {plan.capacity:,} tokens, on average {fills.mean():.1f}% full")
    panels[0].set_xlim(max(0, least // 10 * 10 - 10), 100.5)
    panels[-1].xaxis.set_major_formatter(PercentFormatter())
    panels[-1].set_xlabel("of a row are real tokens", fontsize=8.5, color=FAINT, loc="right")
    return _titled(figure, title)


def plot_balance(schedules: Mapping[str, Schedule], *, title: str | None = None) -> Figure:
    """Draw what data parallel ranks compute in each step, from the cheapest to the dearest, over the step's mean.

    The upper edge is the rank on which all others block. A last step with empty places is left out.

    Args:
        schedules: name -> rows dealt to ranks, by `balance_rows`.
        title: a heading for the whole figure.
    """
    figure = Figure(figsize=(9, 2.8 + (0.4 if title else 0)), layout="constrained")
    panels = figure.subplots(1, len(schedules), sharey=True, squeeze=False)[0]
    for at, (axes, (name, schedule)) in enumerate(zip(panels, schedules.items(), strict=True)):
        load = schedule.load[(schedule.rows != EMPTY).all((1, 2))]
        load = load / load.mean(1, keepdims=True)
        steps, colour = range(1, len(load) + 1), SAMPLES[at % len(SAMPLES)]
        axes.fill_between(steps, load.min(1), load.max(1), color=colour, alpha=0.3, linewidth=0, step="mid")
        axes.step(steps, load.max(1), color=ACCENT, linewidth=1.2, where="mid")
        plain(axes)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.set_xlabel("step", fontsize=8.5, color=FAINT, loc="right")
        heading(axes, name, f"{schedule.imbalance - 1:.2%} of the time lost")
    panels[0].set_ylabel("cost of a rank, mean 1", fontsize=8.5, color=FAINT)
    return _titled(figure, title)


# ---------------------------------------------------------------------- speed and memory


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
    """Draw speed and memory against the samples of a micro-batch, a colour a run.

    Args:
        runs: name -> measured steps, such as those of padded batches and of packed rows.
        title: a heading for the whole figure.
    """
    figure = Figure(figsize=(9, 3.1 + (0.4 if title else 0)), layout="constrained")
    speed, memory = figure.subplots(1, 2)
    colours = (FAINT, *SAMPLES)
    for at, (name, costs) in enumerate(runs.items()):
        style = {"color": colours[at % len(colours)], "marker": "o", "markersize": 4, "linewidth": 1.8, "label": name}
        samples = [cost.samples for cost in costs]
        speed.plot(samples, [cost.tokens_per_second for cost in costs], **style)
        memory.plot(samples, [cost.memory / 2**20 for cost in costs], **style)
    for axes, name, unit in ((speed, "Speed", "real tokens a second"), (memory, "Memory", "MiB")):
        plain(axes)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.set_xlabel("samples of a micro-batch", fontsize=8.5, color=FAINT, loc="right")
        axes.legend(frameon=False, fontsize=8.5, labelcolor=INK, loc="best")
        heading(axes, name, unit)
    return _titled(figure, title)


# ---------------------------------------------------------------------- epochs


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
    figure = Figure(figsize=(1.0 + 3.6 * len(panels), 2.9 + (0.4 if title else 0)), layout="constrained")
    for axes, (name, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        _draw_curves(axes, curves, log=name in log)
        heading(axes, name)
    return _titled(figure, title)


def _draw_curves(axes: Axes, curves: Mapping[str, Curve], *, log: bool) -> None:
    for at, (name, values) in enumerate(curves.items()):
        colour = SAMPLES[at % len(SAMPLES)]
        points = values if isinstance(values, Mapping) else dict(enumerate(values, start=1))
        style = {"marker": "o", "markersize": 3} if len(points) < 20 else {}
        axes.plot(list(points), list(points.values()), color=colour, linewidth=1.8, label=name, **style)
    plain(axes)
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.set_xlabel("epoch", fontsize=8.5, color=FAINT, loc="right")
    columns = 1 if len(curves) < 5 else 2
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, ncols=columns, loc="best")


def _titled(figure: Figure, title: str | None) -> Figure:
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    return figure
