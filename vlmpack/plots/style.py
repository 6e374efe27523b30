"""Colours, sizes and headings that all figures share, and writing a figure to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vlmpack.files import atomic_file, writing

SAMPLES = ("#4C78A8", "#F2A65A", "#59A89C", "#D8697A", "#8E7CC3", "#9AB857", "#C98BB9", "#7FB7D6")
"""One colour a sample, again from the first after the last."""
PADDING = "#E9E9EC"
"""Padding of a row, and grid lines."""
INK = "#2B2D33"
"""Titles and names."""
FAINT = "#8A8D96"
"""Notes and labels of axes."""
ACCENT = "#C8442F"
"""Marks that are to be seen first."""


def save(figure: Figure, path: str | Path, *, dpi: int = 160) -> Path:
    """Write the figure as a PNG, whole or not at all, making the folder where there is none.

    Returns:
        The path that was written.

    Raises:
        ConfigError: the file cannot be written.
    """
    target = Path(path)
    with atomic_file(target) as temporary, writing(target):
        figure.savefig(temporary, dpi=dpi, facecolor="white", format="png")
    return target


def remove_frame(axes: Axes, *, grid: Literal["x", "y"] | None = None) -> None:
    """Remove the box around the axes and the ticks, and draw grid lines of one axis behind the data."""
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, colors=FAINT, labelsize=8)
    if grid is not None:
        axes.grid(axis=grid, color=PADDING, linewidth=0.8)
        axes.set_axisbelow(True)


def heading(axes: Axes, title: str, note: str = "") -> None:
    """Write a bold title at the left of the axes, and its numbers at the right."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=8)
    axes.set_title(note, loc="right", fontsize=9.5, color=FAINT, pad=8)


def figure_heading(figure: Figure, title: str | None) -> None:
    """Write a bold title above all axes of a figure; None: no title."""
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)


def label_x(axes: Axes, text: str) -> None:
    """Write the name of the x axis below its right end."""
    axes.set_xlabel(text, fontsize=8.5, color=FAINT, loc="right")
