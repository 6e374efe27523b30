"""Colours and sizes that all figures share."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

SAMPLES = ("#4C78A8", "#F2A65A", "#59A89C", "#D8697A", "#8E7CC3", "#9AB857", "#C98BB9", "#7FB7D6")
"""One colour a sample, again from the first after the last."""
PADDING = "#E9E9EC"
INK = "#2B2D33"
FAINT = "#8A8D96"
ACCENT = "#C8442F"


def save(figure: Figure, path: str | Path, *, dpi: int = 160) -> Path:
    """Write the figure as a PNG, making the folder where there is none.

    Returns:
        The path that was written.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=dpi, facecolor="white", format="png")
    return target


def bare(axes: Axes) -> None:
    """No box around the axes and no ticks: what is drawn explains itself."""
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, colors=FAINT, labelsize=8)


def heading(axes: Axes, title: str, note: str = "") -> None:
    """A bold title at the left, and what it says in numbers at the right."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=8)
    axes.set_title(note, loc="right", fontsize=9.5, color=FAINT, pad=8)
