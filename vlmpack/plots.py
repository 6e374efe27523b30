"""Figures of rows, prefix trees, plans, lengths and losses. This is the only module that imports matplotlib.

| call | what it draws |
|---|---|
| `plot_rows(batch, row=None)` | a padded batch above the packed row of the same samples, to the same scale |
| `plot_row(row, positions=, errors=, window=)` | one row: samples, images, tokens trained on, MRoPE positions, errors |
| `plot_mask(row.segments)` | the block-diagonal causal mask, and what would leak without it |
| `plot_tree(row)` | the prefix tree of a row: one bar per node, to the right of its parent |
| `plot_lengths({"tokens": table.tokens, ...})` | one histogram per column, with median and percentiles |
| `plot_fill({"exact fill": plan, ...})` | how full the rows of plans are |
| `plot_balance({"balanced": schedule, ...})` | the cost of each step on data parallel ranks |
| `plot_losses({"padded": [...], "packed": [...]})` | loss curves that should agree, and their differences |
| `save(figure, path)` | writes a PNG, and creates its folder |

Figures are matplotlib `Figure` objects. `pyplot` is never used, so drawing needs no display. Each sample has a color
and a number; its images are darker and hatched; padding is gray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import torch

from vlmpack.errors import ConfigError, LayoutError, check_extra
from vlmpack.files import atomic_file, writing
from vlmpack.layout.batch import PaddedBatch
from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.row import PackedRow
from vlmpack.layout.row import pack as pack_batch
from vlmpack.layout.segments import Segments
from vlmpack.plan.balance import EMPTY, Schedule
from vlmpack.plan.length_table import summary
from vlmpack.plan.plan import Plan

check_extra("plots", "matplotlib", needed_by="vlmpack.plots")

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch, Polygon, Rectangle
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, PercentFormatter, StrMethodFormatter

SAMPLES = ("#4C78A8", "#F2A65A", "#59A89C", "#D8697A", "#8E7CC3", "#9AB857", "#C98BB9", "#7FB7D6")
"""One color per sample or curve, repeated cyclically."""
PADDING = "#E9E9EC"
INK = "#2B2D33"
FAINT = "#8A8D96"
ACCENT = "#C8442F"
CURVES = (SAMPLES[0], ACCENT, *SAMPLES[2:])
BINS = 40
STEP = 2
"""Bar width of a fill histogram, in percent."""
Scale = Literal["linear", "whole", "log"]
NONE = -1
"""Sample number of padding."""
LINE_INCHES = 0.27
BAR = 0.8
"""Height of a bar, relative to the line height."""
SHARED = "#8D93A1"
"""Color of nodes that several samples share."""
SMALLEST = 1e-9
"""Smallest error drawn, because a log axis cannot show 0."""
BEND = 0.012
"""Length of the line from a node to its branches, relative to the width of the picture."""


# ---------------------------------------------------------------------- style


def save(figure: Figure, path: str | Path, *, dpi: int = 160) -> Path:
    """Write the figure as a PNG, and create its folder.

    Returns:
        The path written.

    Raises:
        ConfigError: the file cannot be written.
    """
    target = Path(path)
    with atomic_file(target) as temporary, writing(target):
        figure.savefig(temporary, dpi=dpi, facecolor="white", format="png")
    return target


def new_figure(width: float, height: float, title: str | None = None, **spacing: Any) -> Figure:
    """Make a figure of this size in inches, with an optional title above it."""
    size = (width, height + (0.4 if title else 0))
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(**spacing))
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    return figure


def dress(axes: Axes, title: str, note: str = "", *, x: str = "", y: Scale = "linear", grid: bool = True) -> None:
    """Style axes: no box, a bold title on the left, a note on the right, and faint grid lines behind everything.

    Args:
        axes: axes whose x axis counts whole numbers.
        title: the heading.
        note: numbers that belong to the heading.
        x: label of the x axis.
        y: scale of the y axis; "whole" shows whole numbers, and "log" few ticks.
        grid: draw grid lines.
    """
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, colors=FAINT, labelsize=8)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=8)
    axes.set_title(note, loc="right", fontsize=9.5, color=FAINT, pad=8)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if x:
        axes.set_xlabel(x, fontsize=8.5, color=FAINT, loc="right")
    if grid:
        axes.grid(axis="y", color=PADDING, linewidth=0.8)
        axes.set_axisbelow(True)
    if y == "whole":
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    elif y == "log":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=5))
        axes.yaxis.set_minor_locator(NullLocator())


def legend(where: Axes | Figure, **settings: Any) -> None:
    """Draw a legend without a box, on axes or below a figure."""
    settings.setdefault("loc", "best" if isinstance(where, Axes) else "outside lower left")
    where.legend(frameon=False, fontsize=8.5, labelcolor=INK, **settings)


# ---------------------------------------------------------------------- lengths and losses


def plot_lengths(columns: Mapping[str, np.ndarray], *, title: str | None = None) -> Figure:
    """Draw one histogram per column, one below the other.

    A last bar with a plus also holds everything above the 99th percentile. Lines mark the median and the 95th and 99th
    percentiles.

    Args:
        columns: name -> int64 [N], not negative; at least one column, with at least one sample.
        title: heading of the whole figure.
    """
    figure = new_figure(8, 2.1 * len(columns), title)
    panels = figure.subplots(len(columns), 1, squeeze=False)[:, 0]
    for i, (axes, (name, values)) in enumerate(zip(panels, columns.items(), strict=True)):
        numbers = summary(values)
        shown, color = np.minimum(values, numbers.p99), SAMPLES[i % len(SAMPLES)]
        counts, edges, _ = axes.hist(shown, bins=BINS, rwidth=0.92, color=color, linewidth=0)
        if numbers.max > numbers.p99:
            axes.annotate("+", (edges[-2:].mean(), counts[-1]), ha="center", va="bottom", fontsize=9, color=FAINT)
        for line, (text, at) in enumerate({"median": numbers.median, "p95": numbers.p95, "p99": numbers.p99}.items()):
            axes.axvline(at, color=ACCENT, linewidth=1)
            above = axes.get_xaxis_transform()
            axes.text(at, 1 - 0.1 * line, f" {text}", transform=above, fontsize=7.5, color=ACCENT, ha="left", va="top")
        note = f"mean {numbers.mean:,.0f}   median {numbers.median:,.0f}   p99 {numbers.p99:,.0f}   max {numbers.max:,}"
        dress(axes, name, note, x="of a sample" if axes is panels[-1] else "", y="whole")
    return figure


def plot_losses(curves: Mapping[str, Sequence[float]], *, title: str = "Training loss") -> Figure:
    """Draw one loss curve per name, and below them the difference of each from the first.

    The first curve is broad and pale and the others are thin, so curves that agree all stay visible. Differences have a
    log axis, which shows the size of differences that are invisible above. Steps that are bitwise equal have no point.

    Args:
        curves: name -> loss of each optimizer step, in nats per token.
        title: the heading.
    """
    several = len(curves) > 1
    figure = new_figure(7, 5.0 if several else 3.4)
    panels = figure.subplots(1 + several, 1, height_ratios=(1.6, 1)[: 1 + several], sharex=True, squeeze=False)[:, 0]
    for i, (name, losses) in enumerate(curves.items()):
        broad = i == 0 and several
        (line,) = panels[0].plot(range(1, len(losses) + 1), losses, label=name, color=CURVES[i % len(CURVES)])
        line.set(linewidth=6 if broad else 1.6, alpha=0.35 if broad else 1.0)
    dress(panels[0], title, "nats a token", x="" if several else "step")
    legend(panels[0])
    if several:
        _draw_differences(panels[1], curves)
    return figure


def _draw_differences(axes: Axes, curves: Mapping[str, Sequence[float]]) -> None:
    (first, reference), *others = curves.items()
    largest = 0.0
    for i, (_, losses) in enumerate(others, start=1):
        steps = min(len(losses), len(reference))
        values = np.abs(np.asarray(losses[:steps], float) - np.asarray(reference[:steps], float))
        largest = max(largest, float(values.max(initial=0)))
        drawn = np.where(values > 0, values, np.nan)
        axes.plot(range(1, steps + 1), drawn, color=CURVES[i % len(CURVES)], linewidth=1.2, marker="o", markersize=2.5)
    note = f"at most {largest:.1e}" if largest else "none: equal to the last bit"
    dress(axes, f"Difference from “{first}”", note, x="step", y="log" if largest else "linear")


# ---------------------------------------------------------------------- plans


def plot_fill(plans: Mapping[str, Plan], *, title: str | None = None) -> Figure:
    """Draw how full the rows of plans are: one histogram per plan, on a common axis, with its mean.

    Args:
        plans: name -> plan.
        title: heading of the whole figure.

    Raises:
        ConfigError: there are no plans, or one has no rows.
    """
    if not plans or not all(len(plan) for plan in plans.values()):
        raise ConfigError("a fill histogram needs plans, each with a row at least")
    figure = new_figure(8, 1.55 * len(plans) + 0.4, title)
    panels = figure.subplots(len(plans), 1, sharex=True, squeeze=False)[:, 0]
    edges = np.arange(0, 100 + STEP, STEP)
    least = 100.0
    for at, (axes, (name, plan)) in enumerate(zip(panels, plans.items(), strict=True)):
        fills = 100 * np.asarray(plan.tree_tokens) / plan.capacity
        least = min(least, float(fills.min()))
        color = SAMPLES[at % len(SAMPLES)]
        axes.hist(np.minimum(fills, 100), bins=edges, rwidth=0.92, color=color, linewidth=0)
        axes.axvline(fills.mean(), color=ACCENT, linewidth=1)
        note = f"{len(plan):,} rows of {plan.capacity:,} tokens, on average {fills.mean():.1f}% full"
        dress(axes, name, note, x="of a row are computed tokens" if axes is panels[-1] else "", y="whole")
        axes.xaxis.set_major_formatter(PercentFormatter())
    panels[0].set_xlim(max(0, least // 10 * 10 - 10), 100.5)
    return figure


def plot_balance(schedules: Mapping[str, Schedule], *, title: str | None = None) -> Figure:
    """Draw the range of costs over data parallel ranks in each step, relative to the mean of the step.

    The upper edge is the rank that all others wait for. A last step with unused entries is left out.

    Args:
        schedules: name -> rows distributed over ranks by `balance_rows`.
        title: heading of the whole figure.
    """
    figure = new_figure(9, 2.8, title)
    panels = figure.subplots(1, len(schedules), sharey=True, squeeze=False)[0]
    for at, (axes, (name, schedule)) in enumerate(zip(panels, schedules.items(), strict=True)):
        load = schedule.load[(schedule.rows != EMPTY).all((1, 2))]
        load = load / load.mean(1, keepdims=True)
        steps, color = range(1, len(load) + 1), SAMPLES[at % len(SAMPLES)]
        axes.fill_between(steps, load.min(1), load.max(1), color=color, alpha=0.3, linewidth=0, step="mid")
        axes.step(steps, load.max(1), color=ACCENT, linewidth=1.2, where="mid")
        dress(axes, name, f"{schedule.imbalance - 1:.2%} of the time lost", x="step")
    panels[0].set_ylabel("cost of a rank, mean 1", fontsize=8.5, color=FAINT)
    return figure


# ---------------------------------------------------------------------- pieces of rows


@final
@dataclass(frozen=True, kw_only=True)
class Piece:
    """Neighboring tokens on one line that have the same sample and kind."""

    line: float
    """Line of the picture, counted from the top."""
    start: float
    """First column, in tokens."""
    stop: float
    """Column after the last token."""
    sample: int | None
    """Sample of the tokens; None: padding, or shared by several samples."""
    is_image: bool = False
    """Whether these are tokens of an image or video."""

    def bar(self, other: str = PADDING) -> Rectangle:
        """Make a bar in the sample's color, or in `other` without a sample; images are hatched."""
        corner, length = (self.start, self.line - BAR / 2), self.stop - self.start
        color = to_rgb(other if self.sample is None else SAMPLES[self.sample % len(SAMPLES)])
        return Rectangle(corner, length, BAR, **_fill(color, hatched=self.is_image))


def _fill(color: str | tuple[float, float, float], *, hatched: bool = False) -> dict:
    """Return the style of a bar, in axes and legends."""
    if not hatched:
        return {"facecolor": color, "linewidth": 0}
    dark = tuple(0.62 * part for part in to_rgb(color))
    return {"facecolor": dark, "edgecolor": color, "hatch": "////", "linewidth": 0}


# ---------------------------------------------------------------------- a batch and its row


def plot_rows(batch: PaddedBatch, row: PackedRow | None = None, *, title: str | None = None) -> Figure:
    """Draw a padded batch above the packed row of the same samples, to the same scale.

    The row is as long as all samples together, so it wraps from line to line. The area of a panel is the number of
    tokens that a step computes.

    Args:
        batch: the padded batch, [B, S].
        row: the packed row; None: pack `batch` without gaps.
        title: heading of the whole figure.
    """
    row = pack_batch(batch) if row is None else row
    width = batch.input_ids.shape[1]
    padded, packed = padded_pieces(batch), packed_pieces(row, width=width)
    lines = [1 + max(int(piece.line) for piece in pieces) for pieces in (padded, packed)]
    heights = [n * LINE_INCHES for n in lines]
    figure = new_figure(9.5, sum(heights) + 1.7, title, h_pad=0.08, hspace=0.06)
    top, bottom = figure.subplots(2, 1, height_ratios=heights, sharex=True)
    shapes = f"{lines[0]} rows of {width:,}", "1 row" + (f", drawn in lines of {width:,}" if lines[1] > 1 else "")
    for axes, name, shape, pieces, drawn in zip(
        (top, bottom), ("Padded batch", "Packed row"), shapes, (padded, packed), lines, strict=True
    ):
        _draw_pieces(axes, pieces)
        axes.set_xlim(-0.002 * width, 1.002 * width)
        axes.set_ylim(drawn - 0.5, -0.5)
        total = sum(piece.stop - piece.start for piece in pieces)
        real = sum(piece.stop - piece.start for piece in pieces if piece.sample is not None)
        note = f"{shape}  =  {total:,} tokens computed"
        dress(axes, f"{name}: {real / total:.0%} full", note, grid=False)
    top.tick_params(labelbottom=False)
    _legend(figure, {"text of a sample": SAMPLES[0], "its image": None, "padding": PADDING})
    return figure


def _draw_pieces(axes: Axes, pieces: Sequence[Piece]) -> None:
    """Draw bars, a seam before each sample, and the sample's number on its longest run of text."""
    axes.set_yticks([])
    widest: dict[int, Piece] = {}
    before = None
    for piece in pieces:
        axes.add_patch(piece.bar())
        if piece.sample not in (None, before) and piece.start:
            axes.vlines(piece.start, piece.line - BAR / 2, piece.line + BAR / 2, color="white", linewidth=1.5)
        before = piece.sample
        if piece.sample is not None and not piece.is_image:
            longest = widest.get(piece.sample, piece)
            widest[piece.sample] = max(longest, piece, key=lambda each: each.stop - each.start)
    for sample, piece in widest.items():
        _number(axes, (piece.start + piece.stop) / 2, piece.line, str(sample))


def _number(axes: Axes, x: float, line: float, text: str, color: str = "white") -> None:
    side = "center" if color == "white" else "left"
    axes.text(x, line, text, ha=side, va="center", clip_on=True, fontsize=8, fontweight="bold", color=color)


def _legend(figure: Figure, entries: Mapping[str, str | None], image: str = SAMPLES[0]) -> None:
    """Draw a legend below the figure from titles and colors; the color None gives the style of images."""
    looks = {title: _fill(color or image, hatched=color is None) for title, color in entries.items()}
    legend(figure, handles=[Patch(label=title, **look) for title, look in looks.items()], ncols=len(looks))


def padded_pieces(batch: PaddedBatch) -> list[Piece]:
    """Return the pieces of a batch, one line per row."""
    real = batch.attention_mask.bool().cpu().numpy()
    samples = np.where(real, np.arange(len(real))[:, None], NONE)
    return _pieces(samples.reshape(-1), _is_image(batch.mm_token_type_ids, real.size), width=real.shape[1])


def packed_pieces(row: PackedRow, *, width: int) -> list[Piece]:
    """Return the pieces of a row, wrapped to lines of `width` tokens."""
    samples = np.where(row.segments.padding_mask().numpy(), NONE, row.segments.seq_idx().numpy())
    return _pieces(samples, _is_image(row.mm_token_type_ids, len(samples)), width=width)


def _is_image(types: torch.Tensor | None, total: int) -> np.ndarray:
    return np.zeros(total, bool) if types is None else (types != 0).reshape(-1).cpu().numpy()


def _pieces(samples_T: np.ndarray, is_image_T: np.ndarray, *, width: int) -> list[Piece]:
    """Wrap tokens to lines of `width`, and cut lines into runs of one sample (`NONE`: padding) and one kind."""
    keys = np.stack([np.arange(len(samples_T)) // width, samples_T, is_image_T & (samples_T != NONE)])
    edges = np.flatnonzero((keys[:, 1:] != keys[:, :-1]).any(0)) + 1
    pieces = []
    for start, stop in pairwise([0, *edges.tolist(), len(samples_T)]):
        line, sample, is_image = keys[:, start].tolist()
        place = {"line": line, "start": start - line * width, "stop": stop - line * width}
        pieces.append(Piece(**place, sample=None if sample == NONE else sample, is_image=bool(is_image)))
    return pieces


# ---------------------------------------------------------------------- one row


def plot_row(
    row: PackedRow,
    *,
    positions: torch.Tensor | np.ndarray | None = None,
    errors: Mapping[str, torch.Tensor | np.ndarray] | None = None,
    window: tuple[int, int] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw a row as one long bar, and below it the positions and errors of each token.

    A thin line under the bar marks the tokens that are trained on. Dotted lines go down from the boundaries.

    Args:
        row: the row, [1, T].
        positions: rotary positions over time, height and width, [3, T] or [3, 1, T]; text positions in front of them
            are ignored.
        errors: name -> [T], not negative, drawn on a log axis; an error of 0 is drawn as the smallest value.
        window: the first token to draw, and the token after the last; None: all tokens.
        title: heading of the whole figure.

    Raises:
        LayoutError: positions or errors have another length than the row, or the window is outside of the row.
    """
    total = row.segments.total
    start, stop = (0, total) if window is None else window
    if not 0 <= start < stop <= total:
        raise LayoutError(f"window is {window}, and the row has {total} tokens; give two of them in order")
    curves = {name: _checked(values, total, name) for name, values in (errors or {}).items()}
    heights = [0.8, *([1.9] if positions is not None else []), *([2.1] if curves else [])]
    figure = new_figure(9.5, sum(heights) + 1.0, title, h_pad=0.06, hspace=0.05)
    panels = figure.subplots(len(heights), 1, height_ratios=heights, sharex=True, squeeze=False)[:, 0].tolist()
    _draw_pieces(panels[0], packed_pieces(row, width=total))
    is_target = np.zeros(total, bool) if row.shift_labels is None else (row.shift_labels[0] != -100).cpu().numpy()
    for first, last in np.flatnonzero(np.diff(np.concatenate([[False], is_target, [False]]))).reshape(-1, 2).tolist():
        # the label of a token is the next token
        panels[0].add_patch(Rectangle((first + 1, 0.52), last - first, 0.09, facecolor=INK, linewidth=0))
    panels[0].set_ylim(0.64, -0.5)
    note = f"{row.segments.num_samples} samples  =  {total:,} tokens, {int(is_target.sum()):,} trained on"
    dress(panels[0], f"Row: {row.segments.fill:.0%} full", note, grid=False)
    entries = {"text": SAMPLES[0], "image": None, "trained on": INK}
    _legend(figure, entries | ({"padding": PADDING} if row.segments.has_padding else {}))
    if positions is not None:
        _draw_positions(panels[1], positions, total, slice(start, stop))
    if curves:
        for (name, values), color in zip(curves.items(), (ACCENT, *CURVES), strict=False):
            panels[-1].plot(np.maximum(values, SMALLEST), color=color, linewidth=1.0, label=name)
        dress(panels[-1], "Difference from each sample alone", "largest of a token's logits", y="log")
        legend(panels[-1])
    for axes in panels[1:]:
        for edge in row.segments.stride[1:-1]:
            axes.axvline(edge, color=FAINT, linewidth=0.8, linestyle=":")
    for axes in panels[:-1]:
        axes.tick_params(labelbottom=False)
    margin = 0.002 * (stop - start)
    panels[0].set_xlim(start - margin, stop + margin)
    panels[-1].set_xlabel("token of the row", fontsize=8.5, color=FAINT, loc="right")
    return figure


def _checked(values: torch.Tensor | np.ndarray, total: int, name: str) -> np.ndarray:
    array = np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values, np.float64).reshape(-1)
    if len(array) != total:
        raise LayoutError(f"{name} has {len(array)} values, and the row {total} tokens; give one value a token")
    return array


def _draw_positions(axes: Axes, positions: torch.Tensor | np.ndarray, total: int, shown: slice) -> None:
    array = np.asarray(positions.cpu() if isinstance(positions, torch.Tensor) else positions)
    array = array.reshape(array.shape[0], -1)[-3:]
    for line, name, color, width in zip(
        array, ("time", "height", "width"), (INK, *SAMPLES), (2.2, 1.1, 1.1), strict=False
    ):
        values = _checked(line, total, f"positions ({name})")
        axes.plot(np.arange(total) + 0.5, values, color=color, linewidth=width, label=name, drawstyle="steps-mid")
    low, high = array[:, shown].min(), array[:, shown].max()
    margin = 0.03 * max(high - low, 1)
    axes.set_ylim(low - margin, high + margin)
    dress(axes, "Rotary positions (MRoPE)", "begin at 0 in every sample, run over the grid of an image", y="whole")
    legend(axes, ncols=3)


def plot_mask(segments: Segments, *, title: str | None = None) -> Figure:
    """Draw the block-diagonal causal mask of a row, and what causal attention over the whole row would add.

    Colored triangles are the pairs that a sample attends to. The pale red area leaks if boundaries are lost.

    Args:
        segments: segments of the row.
        title: heading of the whole figure.
    """
    total, pairs = segments.total, segments.attended_pairs
    causal = total * (total + 1) // 2
    figure = new_figure(5.4, 5.2, title)
    axes = figure.subplots()
    axes.add_patch(Polygon([(0, 0), (0, total), (total, total)], facecolor=ACCENT, alpha=0.16, linewidth=0))
    for sample, ((start, stop), (_, slot)) in enumerate(zip(segments.spans, pairwise(segments.stride), strict=True)):
        corners = [(start, start), (start, stop), (stop, stop)]
        axes.add_patch(Polygon(corners, facecolor=SAMPLES[sample % len(SAMPLES)], linewidth=0))
        third = (stop - start) / 3
        axes.text(start + third, stop - third, str(sample), ha="center", va="center", fontsize=9, color="white")
        if slot > stop:
            axes.add_patch(Rectangle((stop, stop), slot - stop, slot - stop, facecolor=PADDING, linewidth=0))
    if segments.num_samples > 1:
        text = f"a leak: {(causal - pairs) / causal:.0%} of\ncausal attention"
        axes.text(0.04 * total, 0.97 * total, text, fontsize=8.5, color=ACCENT, va="bottom")
    axes.set(xlim=(0, total), ylim=(total, 0), aspect="equal")
    dress(axes, "Attention mask", f"{pairs:,} pairs of {causal:,}", x="key", y="whole", grid=False)
    axes.set_ylabel("query", fontsize=8.5, color=FAINT, loc="top")
    return figure


# ---------------------------------------------------------------------- a prefix tree


def plot_tree(row: PackedRow, *, title: str | None = None) -> Figure:
    """Draw the prefix tree of a row from left to right: one bar per node, to the right of its parent.

    Nodes that several samples share are gray, show the number of these samples, and are centered on their branches.
    Nodes of one sample have its color and number. All bars have the same height, so their area is the number of tokens
    that a step computes.

    Args:
        row: a row with a prefix tree, from `VLMCollator(share_prefixes=True)`.
        title: heading of the whole figure.

    Raises:
        LayoutError: the row has no prefix tree.
    """
    tree = row.tree
    if tree is None:
        raise LayoutError("the row has no tree: its samples share nothing, or it was made without share_prefixes")
    is_image = _is_image(row.mm_token_type_ids, row.segments.total)[tree.source().numpy()]
    lines, width = tree_lines(tree), max(tree.keys.lengths)
    figure = new_figure(9.5, (1 + max(lines)) * 1.1 * LINE_INCHES + 1.2, title, h_pad=0.08)
    axes = figure.subplots()
    axes.set_yticks([])
    bend = BEND * width
    having = [[s for s, leaf in enumerate(tree.leaves) if node in tree.path(leaf)] for node in range(len(lines))]
    for node, ((low, high), stop) in enumerate(zip(tree.nodes.spans, tree.keys.lengths, strict=True)):
        line, samples, parent = lines[node], having[node], tree.parents[node]
        start = stop - (high - low)
        for piece in _pieces(np.full(high - low, samples[0]), is_image[low:high], width=high - low):
            first, last = start + piece.start, start + piece.stop
            if parent >= 0 and not piece.start:
                first = min(first + bend, last - bend / 4)
            sample = samples[0] if len(samples) == 1 else None
            axes.add_patch(replace(piece, line=line, start=first, stop=last, sample=sample).bar(SHARED))
        if parent >= 0:
            axes.plot([start, start + bend], [lines[parent], line], color=SHARED, linewidth=1.2, zorder=0)
        if len(samples) > 1 and high - low > 0.04 * width:  # otherwise there is no room for a number
            _number(axes, (start + stop) / 2, line, f"{len(samples)} ×")
        if ends := [str(sample) for sample in samples if tree.leaves[sample] == node]:
            _number(axes, stop + 0.006 * width, line, ", ".join(ends), INK)
    axes.set_xlim(-0.002 * width, 1.03 * width)
    axes.set_ylim(max(lines) + 0.5, -0.5)
    whole, computed = tree.segments.num_tokens, tree.num_tokens
    note = f"{tree.segments.num_samples} samples of {whole:,} tokens  =  {computed:,} tokens computed"
    x = "tokens from the start of a sample"
    dress(axes, f"Prefix tree: {1 - computed / whole:.0%} shared", note, x=x, grid=False)
    entries = {"shared, computed once": SHARED, "its image": None, "of one sample, with its number": SAMPLES[0]}
    _legend(figure, entries, image=SHARED)
    return figure


def tree_lines(tree: PrefixTree) -> list[float]:
    """Return the line of each node: leaves get one line each, other nodes are centered on their branches."""
    children = [[at for at, parent in enumerate(tree.parents) if parent == node] for node in range(len(tree.parents))]
    leaves = count()
    lines = [0.0 if branches else float(next(leaves)) for branches in children]
    for node, branches in reversed([*enumerate(children)]):  # children come after their parents
        if branches:
            lines[node] = (lines[branches[0]] + lines[branches[-1]]) / 2
    return lines
