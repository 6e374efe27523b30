"""Draw one packed row from the inside: its segments, positions and errors token by token, and its attention mask."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch, Polygon, Rectangle
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

from vlmpack.errors import LayoutError
from vlmpack.layout.row import PackedRow
from vlmpack.layout.segments import Segments
from vlmpack.plots.figures import ACCENT, CURVES, FAINT, INK, PADDING, SAMPLES, bare, heading
from vlmpack.plots.rows import Piece, bar_of, darker, packed_pieces, seams_and_numbers

AXES = ("time", "height", "width")
"""Names of the rows of MRoPE positions."""
AXIS_COLOURS = (INK, SAMPLES[0], SAMPLES[1])
SMALLEST = 1e-9
"""Errors are drawn from here on: no error has no place on a log axis."""


def plot_row(
    row: PackedRow,
    *,
    positions: torch.Tensor | np.ndarray | None = None,
    errors: Mapping[str, torch.Tensor | np.ndarray] | None = None,
    window: tuple[int, int] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw a row as one long bar, and below it, token by token, its positions and errors.

    Each sample has a colour and a number, its images are darker and hatched, padding is grey; a thin line under the bar
    marks the tokens that are learnt. Dotted lines go down from the boundaries.

    Args:
        row: the row, [1, T].
        positions: [3, T] or [3, 1, T], rotary positions over time, height and width; a text row in front is left out.
        errors: name -> [T], not negative, drawn on a log axis; no error lies on its lowest line.
        window: the first token that is drawn, and the one after the last; None: all.
        title: a heading for the whole figure.

    Raises:
        LayoutError: positions or errors are of another length than the row, or the window lies outside of it.
    """
    total = row.segments.total
    start, stop = (0, total) if window is None else window
    if not 0 <= start < stop <= total:
        raise LayoutError(f"window is {window}, and the row has {total} tokens; give two of them in order")
    curves = {name: _checked(values, total, name) for name, values in (errors or {}).items()}
    heights = [0.8, *([1.9] if positions is not None else []), *([2.1] if curves else [])]
    size = (9.5, sum(heights) + 1.0 + (0.4 if title else 0))
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(h_pad=0.06, hspace=0.05))
    panels = figure.subplots(len(heights), 1, height_ratios=heights, sharex=True, squeeze=False)[:, 0].tolist()
    _draw_bar(panels[0], row)
    if positions is not None:
        _draw_positions(panels[1], positions, total, slice(start, stop))
    if curves:
        _draw_errors(panels[-1], curves)
    for axes in panels[1:]:
        for edge in row.segments.stride[1:-1]:
            axes.axvline(edge, color=FAINT, linewidth=0.8, linestyle=":")
    for axes in panels[:-1]:
        axes.tick_params(labelbottom=False)
    margin = 0.002 * (stop - start)
    panels[0].set_xlim(start - margin, stop + margin)
    panels[-1].set_xlabel("token of the row", fontsize=8.5, color=FAINT, loc="right")
    panels[-1].xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
    panels[-1].xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    return figure


def _checked(values: torch.Tensor | np.ndarray, total: int, name: str) -> np.ndarray:
    array = np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values, np.float64).reshape(-1)
    if len(array) != total:
        raise LayoutError(f"{name} has {len(array)} values, and the row {total} tokens; give one value a token")
    return array


def _draw_bar(axes: Axes, row: PackedRow) -> None:
    total = row.segments.total
    pieces: list[Piece] = packed_pieces(row, width=total)
    for piece in pieces:
        axes.add_patch(bar_of(piece))
    seams_and_numbers(axes, pieces)
    learnt = np.zeros(total, bool) if row.shift_labels is None else (row.shift_labels[0] != -100).cpu().numpy()
    edges = np.flatnonzero(np.diff(np.concatenate([[False], learnt, [False]])))
    for start, stop in edges.reshape(-1, 2).tolist():  # the label of a token is the token after it
        axes.add_patch(Rectangle((start + 1, 0.52), stop - start, 0.09, facecolor=INK, linewidth=0))
    axes.set_ylim(0.64, -0.5)
    axes.set_yticks([])
    bare(axes)
    segments = row.segments
    note = f"{segments.num_samples} samples  =  {segments.total:,} tokens, {int(learnt.sum()):,} learnt"
    heading(axes, f"Row: {segments.fill:.0%} full", note)
    colour = SAMPLES[0]
    entries = [
        Patch(facecolor=colour, label="text"),
        Patch(facecolor=darker(colour), edgecolor=colour, hatch="////", linewidth=0, label="image"),
        Patch(facecolor=INK, label="learnt"),
        *([Patch(facecolor=PADDING, label="padding")] if segments.has_gaps else []),
    ]
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    figure.legend(handles=entries, loc="outside lower left", ncols=4, frameon=False, fontsize=8.5, labelcolor=INK)


def _draw_positions(axes: Axes, positions: torch.Tensor | np.ndarray, total: int, shown: slice) -> None:
    array = np.asarray(positions.cpu() if isinstance(positions, torch.Tensor) else positions)
    array = array.reshape(array.shape[0], -1)[-3:]
    room = 0.03 * max(array[:, shown].max() - array[:, shown].min(), 1)
    for name, colour, line in zip(AXES, AXIS_COLOURS, array, strict=False):
        width = 2.2 if name == "time" else 1.1
        values = _checked(line, total, f"positions ({name})")
        axes.plot(np.arange(total) + 0.5, values, color=colour, linewidth=width, label=name, drawstyle="steps-mid")
    bare(axes)
    axes.set_ylim(array[:, shown].min() - room, array[:, shown].max() + room)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    axes.grid(axis="y", color=PADDING, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK, ncols=3, loc="best")
    heading(axes, "Rotary positions (MRoPE)", "begin at 0 in every sample, run over the grid of an image")


def _draw_errors(axes: Axes, curves: Mapping[str, np.ndarray]) -> None:
    for at, (name, values) in enumerate(curves.items()):
        drawn = np.maximum(values, SMALLEST)
        axes.plot(drawn, color=(ACCENT, *CURVES)[at % (1 + len(CURVES))], linewidth=1.0, label=name)
    axes.set_yscale("log")
    bare(axes)
    axes.yaxis.set_major_locator(LogLocator(numticks=5))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color=PADDING, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK, loc="best")
    heading(axes, "Difference from each sample alone", "largest of a token's logits")


# ---------------------------------------------------------------------- masks


def plot_mask(segments: Segments, *, title: str | None = None) -> Figure:
    """Draw the block-diagonal causal mask of a row, and what causal attention over the whole row would add.

    A triangle in its colour is what a sample attends to. The pale red area is what leaks where boundaries are lost.

    Args:
        segments: of the row.
        title: a heading for the whole figure.
    """
    total, pairs = segments.total, segments.attended_pairs
    causal = total * (total + 1) // 2
    figure = Figure(figsize=(5.4, 5.2 + (0.4 if title else 0)), layout="constrained")
    axes = figure.subplots()
    axes.add_patch(Polygon([(0, 0), (0, total), (total, total)], facecolor=ACCENT, alpha=0.16, linewidth=0))
    for sample, ((start, stop), (_, slot)) in enumerate(zip(segments.spans, pairwise(segments.stride), strict=True)):
        corners = [(start, start), (start, stop), (stop, stop)]
        axes.add_patch(Polygon(corners, facecolor=SAMPLES[sample % len(SAMPLES)], linewidth=0))
        third = start + (stop - start) / 3
        axes.text(third, stop - (stop - start) / 3, str(sample), ha="center", va="center", fontsize=9, color="white")
        if slot > stop:
            axes.add_patch(Rectangle((stop, stop), slot - stop, slot - stop, facecolor=PADDING, linewidth=0))
    if segments.num_samples > 1:
        text = f"a leak: {(causal - pairs) / causal:.0%} of\ncausal attention"
        axes.text(0.04 * total, 0.97 * total, text, fontsize=8.5, color=ACCENT, va="bottom")
    axes.set(xlim=(0, total), ylim=(total, 0), aspect="equal")
    bare(axes)
    axes.set_xlabel("key", fontsize=8.5, color=FAINT, loc="right")
    axes.set_ylabel("query", fontsize=8.5, color=FAINT, loc="top")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    heading(axes, "Attention mask", f"{pairs:,} pairs of {causal:,}")
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    return figure
