"""Measures over epochs, or over the samples of a micro-batch, in panels side by side."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import cycle

from matplotlib.figure import Figure

from vlmpack.plots import SAMPLES, dress, legend, new_figure

Curve = Sequence[float] | Mapping[int, float]
"""Values from the first epoch on, or a mapping from epoch (or any other x value) to value."""


def plot_curves(
    panels: Mapping[str, Mapping[str, Curve]], *, x: str = "epoch", log: Collection[str] = (), title: str | None = None
) -> Figure:
    """Draw measures over epochs, or over the samples of a micro-batch, in panels side by side.

    Args:
        panels: name of a panel -> name of a curve -> its values.
        x: label of the x axis, which counts whole numbers.
        log: names of panels with a log axis.
        title: heading of the whole figure.
    """
    figure = new_figure(1.0 + 3.6 * len(panels), 2.9, title)
    for axes, (name, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for color, (curve, values) in zip(cycle(SAMPLES), curves.items(), strict=False):
            points = values if isinstance(values, Mapping) else dict(enumerate(values, start=1))
            marker = "o" if len(points) < 20 else None
            line = {"color": color, "linewidth": 1.8, "marker": marker, "markersize": 3}
            axes.plot(list(points), list(points.values()), label=curve, **line)
        if name not in log:
            axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
        dress(axes, name, x=x, y="log" if name in log else "linear")
        legend(axes, ncols=1 if len(curves) < 5 else 2)
    return figure
