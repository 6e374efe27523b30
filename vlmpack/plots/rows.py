"""Draw where every token is: the padded batch, and the row that it is packed into.

A picture is made of pieces, as plain numbers: stretches of tokens of one sample and one kind, cut into lines of one
width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, final

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from vlmpack.layout.batch import MaskSpans, PaddedBatch, lengths_from_mask
from vlmpack.layout.packing import pack as pack_batch
from vlmpack.layout.row import PackedRow
from vlmpack.plots.figures import INK, PADDING, SAMPLES, bare, heading

Kind = Literal["text", "image", "padding"]
LINE_INCHES = 0.27
BAR = 0.8
"""Height of a bar, of the line's height."""


@final
@dataclass(frozen=True, kw_only=True)
class Piece:
    """Neighbouring tokens of one sample and one kind, on one line."""

    line: int
    """Line of the picture, from the top."""
    start: int
    """First column, in tokens."""
    stop: int
    """Column after the last one."""
    kind: Kind
    """Kind of the tokens; videos count as images."""
    sample: int | None = None
    """Sample of the tokens; None: padding."""


def plot_rows(batch: PaddedBatch, row: PackedRow | None = None, *, title: str | None = None) -> Figure:
    """Draw a padded batch above the packed row of the same samples, both to the same scale.

    Each sample has a colour and a number; its image tokens are darker and hatched, padding is grey. The row is as long
    as all samples together, so it goes on from line to line: the area of a panel is what a step computes.

    Args:
        batch: the padded batch, [B, S].
        row: the row; None: the batch, packed without gaps.
        title: a heading for the whole figure.
    """
    row = pack_batch(batch) if row is None else row
    width = batch.input_ids.shape[1]
    padded, packed = padded_pieces(batch), packed_pieces(row, width=width)
    lines = [1 + max(piece.line for piece in pieces) for pieces in (padded, packed)]
    heights = [n * LINE_INCHES for n in lines]
    size = (9.5, sum(heights) + 1.7 + (0.4 if title else 0))
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(h_pad=0.08, hspace=0.06))
    top, bottom = figure.subplots(2, 1, height_ratios=heights, sharex=True)
    _draw(top, padded, lines[0], width)
    _draw(bottom, packed, lines[1], width)
    _head(top, "Padded batch", f"{lines[0]} rows of {width:,}", padded)
    _head(bottom, "Packed row", "1 row" + (f", drawn in lines of {width:,}" if lines[1] > 1 else ""), packed)
    top.tick_params(labelbottom=False)
    _legend(figure)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    return figure


def fill_ratio(pieces: Sequence[Piece]) -> float:
    """Return the tokens of samples per token of the picture, 0 to 1."""
    return 1 - _tokens(pieces, "padding") / _tokens(pieces)


def _tokens(pieces: Sequence[Piece], kind: str | None = None) -> int:
    return sum(piece.stop - piece.start for piece in pieces if kind in (None, piece.kind))


def _head(axes: Axes, name: str, shape: str, pieces: Sequence[Piece]) -> None:
    heading(axes, f"{name}: {fill_ratio(pieces):.0%} full", f"{shape}  =  {_tokens(pieces):,} tokens computed")


def _draw(axes: Axes, pieces: Sequence[Piece], lines: int, width: int) -> None:
    for piece in pieces:
        axes.add_patch(bar_of(piece))
    seams_and_numbers(axes, pieces)
    axes.set_xlim(-0.002 * width, 1.002 * width)
    axes.set_ylim(lines - 0.5, -0.5)
    axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    bare(axes)


def seams_and_numbers(axes: Axes, pieces: Sequence[Piece]) -> None:
    """Draw a seam in front of each sample, and its number on its longest text."""
    for piece in _first(pieces):
        if piece.start:
            axes.vlines(piece.start, piece.line - BAR / 2, piece.line + BAR / 2, color="white", linewidth=1.5)
    for piece in _widest(pieces):
        middle, number = (piece.start + piece.stop) / 2, str(piece.sample)
        style = {"fontsize": 8, "fontweight": "bold", "color": "white"}
        axes.text(middle, piece.line, number, ha="center", va="center", clip_on=True, **style)


def _first(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the first piece of each sample."""
    first: dict[int, Piece] = {}
    for piece in pieces:
        if piece.sample is not None:
            first.setdefault(piece.sample, piece)
    return list(first.values())


def _widest(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the longest text piece of each sample, for its number."""
    widest: dict[int | None, Piece] = {}
    for piece in pieces:
        best = widest.get(piece.sample)
        if piece.kind == "text" and (best is None or piece.stop - piece.start > best.stop - best.start):
            widest[piece.sample] = piece
    return list(widest.values())


def bar_of(piece: Piece) -> Rectangle:
    """The bar of a piece in its sample's colour; images are hatched, padding is grey."""
    corner, length = (piece.start, piece.line - BAR / 2), piece.stop - piece.start
    if piece.sample is None:
        return Rectangle(corner, length, BAR, facecolor=PADDING, linewidth=0)
    colour = to_rgb(SAMPLES[piece.sample % len(SAMPLES)])
    if piece.kind == "text":
        return Rectangle(corner, length, BAR, facecolor=colour, linewidth=0)
    return Rectangle(corner, length, BAR, facecolor=darker(colour), edgecolor=colour, hatch="////", linewidth=0)


def darker(colour: str | tuple[float, float, float], keep: float = 0.62) -> tuple[float, float, float]:
    """Return the colour with a part of its brightness."""
    red, green, blue = to_rgb(colour)
    return keep * red, keep * green, keep * blue


def _legend(figure: Figure) -> None:
    colour = to_rgb(SAMPLES[0])
    entries = [
        Patch(facecolor=colour, label="text of a sample"),
        Patch(facecolor=darker(colour), edgecolor=colour, hatch="////", linewidth=0, label="its image"),
        Patch(facecolor=PADDING, label="padding"),
    ]
    figure.legend(handles=entries, loc="outside lower left", ncols=3, frameon=False, fontsize=8.5, labelcolor=INK)


# ---------------------------------------------------------------------- pieces


def padded_pieces(batch: PaddedBatch) -> list[Piece]:
    """Put every row of the batch on a line."""
    spans = _spans(batch)
    width = batch.input_ids.shape[1]
    types = _types(batch.mm_token_type_ids, (len(spans.lengths), width))
    pieces = []
    for row, (offset, length) in enumerate(zip(spans.offsets, spans.lengths, strict=True)):
        stop = offset + length
        pieces += _padding(row, 0, offset)
        pieces += _sample(row, row, offset, types[row, offset:stop])
        pieces += _padding(row, stop, width)
    return pieces


def packed_pieces(row: PackedRow, *, width: int) -> list[Piece]:
    """Put the row on lines of `width` tokens."""
    types = _types(row.mm_token_type_ids, (1, row.segments.total))[0]
    pieces, at = [], 0
    for sample, (start, stop) in enumerate(row.segments.spans[: row.segments.num_samples]):
        pieces += [*_padding(0, at, start), *_sample(0, sample, start, types[start:stop])]
        at = stop
    pieces += _padding(0, at, row.segments.total)
    return [part for piece in pieces for part in _wrapped(piece, width)]


def _spans(batch: PaddedBatch) -> MaskSpans:
    return lengths_from_mask(batch.attention_mask) if batch.metadata is None else batch.metadata.spans


def _types(types: torch.Tensor | None, shape: tuple[int, int]) -> np.ndarray:
    return np.zeros(shape, np.int64) if types is None else types.cpu().numpy()


def _padding(line: int, start: int, stop: int) -> list[Piece]:
    return [Piece(line=line, start=start, stop=stop, kind="padding")] if stop > start else []


def _sample(line: int, sample: int, start: int, types: np.ndarray) -> Iterator[Piece]:
    """Yield the sample's runs of text and of image tokens."""
    is_image = types != 0
    edges = np.flatnonzero(is_image[1:] != is_image[:-1]) + 1
    for a, b in pairwise([0, *edges.tolist(), len(types)]):
        if b > a:
            kind: Kind = "image" if is_image[a] else "text"
            yield Piece(line=line, start=start + a, stop=start + b, kind=kind, sample=sample)


def _wrapped(piece: Piece, width: int) -> Iterator[Piece]:
    """Cut the piece where a line of `width` tokens ends."""
    for line in range(piece.start // width, (piece.stop - 1) // width + 1):
        first = line * width
        yield replace(piece, line=line, start=max(piece.start - first, 0), stop=min(piece.stop - first, width))
