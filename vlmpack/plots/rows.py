"""Draw where every token is: a padded batch and its row, one row from the inside, its mask, the tree of its prefixes.

Each sample has a color and a number, its images are darker and hatched, padding is grey. A picture is made of pieces:
runs of tokens of one sample and one kind, on lines of one width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, final

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch, Polygon, Rectangle
from matplotlib.path import Path

from vlmpack.errors import LayoutError
from vlmpack.layout.batch import PaddedBatch, lengths_from_mask
from vlmpack.layout.packing import pack as pack_batch
from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.row import PackedRow
from vlmpack.layout.segments import Segments
from vlmpack.plots.figures import (
    ACCENT,
    CURVES,
    FAINT,
    INK,
    PADDING,
    SAMPLES,
    dress,
    legend,
    log_y,
    new_figure,
    whole_y,
)

Kind = Literal["text", "image", "padding"]
LINE_INCHES = 0.27
BAR = 0.8
"""Height of a bar, of the line's height."""
SHARED = "#8D93A1"
"""Of nodes that several samples have."""
SMALLEST = 1e-9
"""Errors are drawn from here on: no error has no place on a log axis."""
BEND = 0.012
"""Length of the curve from a node to its branches, of the picture's width."""


@final
@dataclass(frozen=True, kw_only=True)
class Piece:
    """Neighboring tokens of one sample and one kind, on one line."""

    line: float
    """Line of the picture, from the top."""
    start: float
    """First column, in tokens."""
    stop: float
    """Column after the last one."""
    kind: Kind
    """Kind of the tokens; videos count as images."""
    sample: int | None = None
    """Sample of the tokens; None: padding, or of several samples."""

    def bar(self, other: str = PADDING) -> Rectangle:
        """Draw it in its sample's color, or the one given; images are hatched."""
        corner, length = (self.start, self.line - BAR / 2), self.stop - self.start
        color = to_rgb(other if self.sample is None else SAMPLES[self.sample % len(SAMPLES)])
        return Rectangle(corner, length, BAR, **_fill(color, hatched=self.kind == "image"))


def _fill(color: str | tuple[float, float, float], *, hatched: bool = False) -> dict:
    """The look of a bar, on axes and in legends."""
    if not hatched:
        return {"facecolor": color, "linewidth": 0}
    dark = tuple(0.62 * part for part in to_rgb(color))
    return {"facecolor": dark, "edgecolor": color, "hatch": "////", "linewidth": 0}


# ---------------------------------------------------------------------- a batch and its row


def plot_rows(batch: PaddedBatch, row: PackedRow | None = None, *, title: str | None = None) -> Figure:
    """Draw a padded batch above the packed row of the same samples, both to the same scale.

    The row is as long as all samples together, so it goes on from line to line: the area of a panel is what a step
    computes.

    Args:
        batch: the padded batch, [B, S].
        row: the row; None: the batch, packed without gaps.
        title: a heading for the whole figure.
    """
    row = pack_batch(batch) if row is None else row
    width = batch.input_ids.shape[1]
    padded, packed = padded_pieces(batch), packed_pieces(row, width=width)
    lines = [1 + max(int(piece.line) for piece in pieces) for pieces in (padded, packed)]
    heights = [n * LINE_INCHES for n in lines]
    figure = new_figure(9.5, sum(heights) + 1.7, title, h_pad=0.08, hspace=0.06)
    top, bottom = figure.subplots(2, 1, height_ratios=heights, sharex=True)
    shapes = f"{lines[0]} rows of {width:,}", "1 row" + (f", drawn in lines of {width:,}" if lines[1] > 1 else "")
    for axes, name, shape, pieces, count in zip(
        (top, bottom), ("Padded batch", "Packed row"), shapes, (padded, packed), lines, strict=True
    ):
        _draw_pieces(axes, pieces)
        axes.set_xlim(-0.002 * width, 1.002 * width)
        axes.set_ylim(count - 0.5, -0.5)
        total = sum(piece.stop - piece.start for piece in pieces)
        real = sum(piece.stop - piece.start for piece in pieces if piece.kind != "padding")
        note = f"{shape}  =  {total:,} tokens computed"
        dress(axes, f"{name}: {real / total:.0%} full", note, grid=False)
    top.tick_params(labelbottom=False)
    _legend(figure, {"text of a sample": SAMPLES[0], "its image": None, "padding": PADDING})
    return figure


def _draw_pieces(axes: Axes, pieces: Sequence[Piece]) -> None:
    """Draw bars, a seam in front of each sample, and its number on its longest text."""
    axes.set_yticks([])
    begun: set[int] = set()
    widest: dict[int, Piece] = {}
    for piece in pieces:
        axes.add_patch(piece.bar())
        if piece.sample is None:
            continue
        if piece.sample not in begun and piece.start:
            axes.vlines(piece.start, piece.line - BAR / 2, piece.line + BAR / 2, color="white", linewidth=1.5)
        begun.add(piece.sample)
        best = widest.get(piece.sample)
        if piece.kind == "text" and (best is None or piece.stop - piece.start > best.stop - best.start):
            widest[piece.sample] = piece
    for sample, piece in widest.items():
        _number(axes, (piece.start + piece.stop) / 2, piece.line, str(sample))


def _number(axes: Axes, x: float, line: float, text: str, color: str = "white") -> None:
    place = "center" if color == "white" else "left"
    style = {"fontsize": 8, "fontweight": "bold", "color": color}
    axes.text(x, line, text, ha=place, va="center", clip_on=True, **style)


def _legend(figure: Figure, entries: Mapping[str, str | None], image: str = SAMPLES[0]) -> None:
    """Draw a legend below the figure: titles and colors; None: the look of images."""
    looks = {title: _fill(color or image, hatched=color is None) for title, color in entries.items()}
    legend(figure, handles=[Patch(label=title, **look) for title, look in looks.items()], ncols=len(looks))


def padded_pieces(batch: PaddedBatch) -> list[Piece]:
    """Put every row of the batch on a line."""
    spans = lengths_from_mask(batch.attention_mask) if batch.metadata is None else batch.metadata.spans
    width = batch.input_ids.shape[1]
    types = _types(batch.mm_token_type_ids, (len(spans.lengths), width))
    pieces = []
    for row, (offset, length) in enumerate(zip(spans.offsets, spans.lengths, strict=True)):
        stop = offset + length
        pieces += _padding(row, 0, offset)
        pieces += _runs(row, row, offset, types[row, offset:stop])
        pieces += _padding(row, stop, width)
    return pieces


def packed_pieces(row: PackedRow, *, width: int) -> list[Piece]:
    """Put the row on lines of `width` tokens."""
    types = _types(row.mm_token_type_ids, (1, row.segments.total))[0]
    pieces, at = [], 0
    for sample, (start, stop) in enumerate(row.segments.spans[: row.segments.num_samples]):
        pieces += [*_padding(0, at, start), *_runs(0, sample, start, types[start:stop])]
        at = stop
    pieces += _padding(0, at, row.segments.total)
    return [part for piece in pieces for part in _wrapped(piece, width)]


def _types(types: torch.Tensor | None, shape: tuple[int, int]) -> np.ndarray:
    return np.zeros(shape, np.int64) if types is None else types.cpu().numpy()


def _padding(line: float, start: int, stop: int) -> list[Piece]:
    return [Piece(line=line, start=start, stop=stop, kind="padding")] if stop > start else []


def _runs(line: float, sample: int | None, start: int, types: np.ndarray) -> Iterator[Piece]:
    """Yield runs of text and of image tokens."""
    is_image = types != 0
    edges = np.flatnonzero(is_image[1:] != is_image[:-1]) + 1
    for a, b in pairwise([0, *edges.tolist(), len(types)]):
        if b > a:
            kind: Kind = "image" if is_image[a] else "text"
            yield Piece(line=line, start=start + a, stop=start + b, kind=kind, sample=sample)


def _wrapped(piece: Piece, width: int) -> Iterator[Piece]:
    """Cut the piece where a line of `width` tokens ends."""
    for line in range(int(piece.start) // width, int(piece.stop - 1) // width + 1):
        first = line * width
        yield replace(piece, line=line, start=max(piece.start - first, 0), stop=min(piece.stop - first, width))


# ---------------------------------------------------------------------- one row


def plot_row(
    row: PackedRow,
    *,
    positions: torch.Tensor | np.ndarray | None = None,
    errors: Mapping[str, torch.Tensor | np.ndarray] | None = None,
    window: tuple[int, int] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw a row as one long bar, and below it, token by token, its positions and errors.

    A thin line under the bar marks the tokens that are trained on. Dotted lines go down from the boundaries.

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
    figure = new_figure(9.5, sum(heights) + 1.0, title, h_pad=0.06, hspace=0.05)
    panels = figure.subplots(len(heights), 1, height_ratios=heights, sharex=True, squeeze=False)[:, 0].tolist()
    _draw_bar(panels[0], figure, row)
    if positions is not None:
        _draw_positions(panels[1], positions, total, slice(start, stop))
    if curves:
        axes = panels[-1]
        for (name, values), color in zip(curves.items(), (ACCENT, *CURVES), strict=False):
            axes.plot(np.maximum(values, SMALLEST), color=color, linewidth=1.0, label=name)
        log_y(axes)
        dress(axes, "Difference from each sample alone", "largest of a token's logits")
        legend(axes)
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


def _draw_bar(axes: Axes, figure: Figure, row: PackedRow) -> None:
    segments = row.segments
    _draw_pieces(axes, packed_pieces(row, width=segments.total))
    trained = np.zeros(segments.total, bool)
    if row.shift_labels is not None:
        trained = (row.shift_labels[0] != -100).cpu().numpy()
    edges = np.flatnonzero(np.diff(np.concatenate([[False], trained, [False]])))
    for start, stop in edges.reshape(-1, 2).tolist():  # the label of a token is the token after it
        axes.add_patch(Rectangle((start + 1, 0.52), stop - start, 0.09, facecolor=INK, linewidth=0))
    axes.set_ylim(0.64, -0.5)
    note = f"{segments.num_samples} samples  =  {segments.total:,} tokens, {int(trained.sum()):,} trained on"
    dress(axes, f"Row: {segments.fill:.0%} full", note, grid=False)
    padding = {"padding": PADDING} if segments.has_gaps else {}
    _legend(figure, {"text": SAMPLES[0], "image": None, "trained on": INK, **padding})


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
    dress(axes, "Rotary positions (MRoPE)", "begin at 0 in every sample, run over the grid of an image")
    whole_y(axes)
    legend(axes, ncols=3)


def plot_mask(segments: Segments, *, title: str | None = None) -> Figure:
    """Draw the block-diagonal causal mask of a row, and what causal attention over the whole row would add.

    A triangle in its color is what a sample attends to. The pale red area is what leaks where boundaries are lost.

    Args:
        segments: of the row.
        title: a heading for the whole figure.
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
    dress(axes, "Attention mask", f"{pairs:,} pairs of {causal:,}", x="key", grid=False)
    axes.set_ylabel("query", fontsize=8.5, color=FAINT, loc="top")
    whole_y(axes)
    return figure


# ---------------------------------------------------------------------- a prefix tree


def plot_tree(row: PackedRow, *, title: str | None = None) -> Figure:
    """Draw the tree of a row whose samples share prefixes, from left to right: a bar a node, behind its parent.

    Nodes that several samples have are grey, with their number of samples, in the middle of their branches; a branch
    has its sample's color and number. All bars are equally high, so that the ink is what a step computes.

    Args:
        row: with a tree, as `VLMCollator(share_prefixes=True)` makes it.
        title: a heading for the whole figure.

    Raises:
        LayoutError: the row has no tree.
    """
    tree = row.tree
    if tree is None:
        raise LayoutError("the row has no tree: its samples share nothing, or it was made without share_prefixes")
    types = _types(row.mm_token_type_ids, (1, row.segments.total))[0][tree.source().numpy()]
    lines, width = tree_lines(tree), max(tree.keys.lengths)
    figure = new_figure(9.5, (1 + max(lines)) * 1.1 * LINE_INCHES + 1.2, title, h_pad=0.08)
    axes = figure.subplots()
    axes.set_yticks([])
    bend = BEND * width
    having = [[s for s, leaf in enumerate(tree.leaves) if node in tree.path(leaf)] for node in range(len(lines))]
    for node, ((low, high), stop) in enumerate(zip(tree.nodes.spans, tree.keys.lengths, strict=True)):
        line, samples, parent = lines[node], having[node], tree.parents[node]
        start = stop - (high - low)
        for piece in _runs(line, samples[0] if len(samples) == 1 else None, start, types[low:high]):
            if parent >= 0 and piece.start == start:
                piece = replace(piece, start=min(start + bend, piece.stop - bend / 4))
            axes.add_patch(piece.bar(SHARED))
        if parent >= 0:
            bends = [(start, lines[parent]), (start + bend / 2, lines[parent]), (start + bend / 2, line)]
            curve = Path([*bends, (start + bend, line)], [Path.MOVETO, *[Path.CURVE4] * 3])
            axes.add_patch(PathPatch(curve, fill=False, edgecolor=SHARED, linewidth=1.2, zorder=0))
        if len(samples) > 1 and high - low > 0.04 * width:  # or there is no room for a number
            _number(axes, (start + stop) / 2, line, f"{len(samples)} ×")
        if ends := [str(sample) for sample in samples if tree.leaves[sample] == node]:
            _number(axes, stop + 0.006 * width, line, ", ".join(ends), INK)
    axes.set_xlim(-0.002 * width, 1.03 * width)
    axes.set_ylim(max(lines) + 0.5, -0.5)
    whole, computed = tree.segments.num_tokens, tree.num_tokens
    note = f"{tree.segments.num_samples} samples of {whole:,} tokens  =  {computed:,} tokens computed"
    title_ = f"Prefix tree: {1 - computed / whole:.0%} shared"
    dress(axes, title_, note, x="tokens from the start of a sample", grid=False)
    entries = {"shared, computed once": SHARED, "its image": None, "of one sample, with its number": SAMPLES[0]}
    _legend(figure, entries, image=SHARED)
    return figure


def tree_lines(tree: PrefixTree) -> list[float]:
    """Place the nodes of a tree: a line for each that has no branches, the others in the middle of theirs."""
    count = len(tree.parents)
    children = [[node for node in range(count) if tree.parents[node] == parent] for parent in range(count)]
    lines, last = [0.0] * count, 0
    for node in range(count):
        if not children[node]:
            lines[node], last = float(last), last + 1
    for node in reversed(range(count)):  # children stand behind their parents
        if children[node]:
            lines[node] = (lines[children[node][0]] + lines[children[node][-1]]) / 2
    return lines
