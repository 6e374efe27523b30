"""Curves of training losses, for those that should lie on one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vlmpack.plots.style import ACCENT, FAINT, INK, SAMPLES, bare, heading

COLOURS = (SAMPLES[0], ACCENT, *SAMPLES[2:])


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
    bare(axes)
    axes.grid(axis="y", color="#E9E9EC", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step", fontsize=8.5, color=FAINT, loc="right")
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    heading(axes, title, "nats a token")
    return figure
