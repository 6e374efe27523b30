"""Draw the tree of a shared prefix: a bar for each node, behind its parent, as long as its tokens.

All bars are equally high, so that the ink is what a step computes. A shared node is grey and stands in the middle of
its branches; a branch has the colour and the number of its sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch, PathPatch, Rectangle
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from vlmpack.errors import LayoutError
from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.row import PackedRow
from vlmpack.plots.figures import FAINT, INK, SAMPLES, bare, heading

LINE_INCHES = 0.3
BAR = 0.72
"""Height of a bar, of the line's height."""
SHARED = "#8D93A1"
"""Of nodes that several samples have."""
DARKER = 0.62
"""Brightness of images, as a part of that of their node's text."""
BEND = 0.012
"""Length of the curve from a node to its branches, of the picture's width."""
NARROW = 0.04
"""A node up to this part of the picture's width has no room for a number."""


@final
@dataclass(frozen=True, kw_only=True)
class Branch:
    """One node of the picture."""

    start: int
    """Tokens before it on its path."""
    line: float
    """Line of the picture, from the top; between the lines of its branches where it has some."""
    parent: int
    """The node before it; -1: a root."""
    media: tuple[tuple[int, int, bool], ...]
    """(start, stop, tokens of images or videos) of its stretches, from the start of a sample."""
    samples: tuple[int, ...]
    """Samples that have it."""
    ends: tuple[int, ...]
    """Samples that end in it."""

    @property
    def stop(self) -> int:
        """Tokens up to its end."""
        return self.media[-1][1]


def plot_tree(row: PackedRow, *, title: str | None = None) -> Figure:
    """Draw the tree of a row whose samples share prefixes, from left to right.

    Nodes that several samples have are grey, with their number of samples; a branch has its sample's colour and number.
    Images and videos are darker and hatched. Every bar is computed once.

    Args:
        row: with a tree, as `VLMCollator(share_prefixes=True)` makes it.
        title: a heading for the whole figure.

    Raises:
        LayoutError: the row has no tree.
    """
    tree = row.tree
    if tree is None:
        raise LayoutError("the row has no tree: its samples share nothing, or it was made without share_prefixes")
    types = np.zeros(row.segments.total, np.int64)
    if row.mm_token_type_ids is not None:
        types = row.mm_token_type_ids.cpu().numpy()[0]
    branches = branches_of(tree, types)
    lines = 1 + max(branch.line for branch in branches)
    size = (9.5, lines * LINE_INCHES + 1.2 + (0.4 if title else 0))
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(h_pad=0.08))
    axes = figure.subplots()
    _draw(axes, branches, width=max(tree.keys.lengths), lines=lines)
    whole, computed = tree.segments.num_tokens, tree.num_tokens
    note = f"{tree.segments.num_samples} samples of {whole:,} tokens  =  {computed:,} tokens computed"
    heading(axes, f"Prefix tree: {1 - computed / whole:.0%} shared", note)
    _legend(figure)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    return figure


# ---------------------------------------------------------------------- nodes


def branches_of(tree: PrefixTree, types: np.ndarray) -> list[Branch]:
    """Place the nodes of a tree: a line for each that has no branches, the others in the middle of theirs.

    Args:
        tree: of a row of T tokens.
        types: int64 [T]: 0 text, others image or video.
    """
    is_media = types[tree.source().numpy()] != 0
    samples: list[list[int]] = [[] for _ in tree.parents]
    for sample, leaf in enumerate(tree.leaves):
        for node in tree.path(leaf):
            samples[node].append(sample)
    branches = []
    for node, ((low, high), keys) in enumerate(zip(tree.nodes.spans, tree.keys.lengths, strict=True)):
        start = keys - (high - low)
        branch = Branch(
            start=start,
            line=0.0,
            parent=tree.parents[node],
            media=tuple((start + a, start + b, media) for a, b, media in _stretches(is_media[low:high])),
            samples=tuple(samples[node]),
            ends=tuple(sample for sample, leaf in enumerate(tree.leaves) if leaf == node),
        )
        branches.append(branch)
    return _on_lines(branches)


def _stretches(is_media: np.ndarray) -> Iterator[tuple[int, int, bool]]:
    """Yield (start, stop, media) of the runs of text and of media."""
    edges = np.flatnonzero(is_media[1:] != is_media[:-1]) + 1
    for start, stop in pairwise([0, *edges.tolist(), len(is_media)]):
        yield start, stop, bool(is_media[start])


def _on_lines(branches: list[Branch]) -> list[Branch]:
    """Give each node its line; children stand behind their parents, so their lines are there first from the end."""
    children: list[list[int]] = [[] for _ in branches]
    for node, branch in enumerate(branches):
        if branch.parent >= 0:
            children[branch.parent].append(node)
    lines, last = [0.0] * len(branches), 0
    for node in range(len(branches)):
        if not children[node]:
            lines[node], last = float(last), last + 1
    for node in reversed(range(len(branches))):
        if children[node]:
            lines[node] = (lines[children[node][0]] + lines[children[node][-1]]) / 2
    return [Branch(**{**vars(branch), "line": line}) for branch, line in zip(branches, lines, strict=True)]


# ---------------------------------------------------------------------- drawing


def _draw(axes: Axes, branches: list[Branch], *, width: int, lines: float) -> None:
    bend = BEND * width
    for branch in branches:
        if branch.parent >= 0:
            axes.add_patch(_curve(branches[branch.parent], branch, bend))
    for branch in branches:
        for start, stop, media in branch.media:
            begin = start + bend if start == branch.start and branch.parent >= 0 else start
            axes.add_patch(_bar(branch, min(begin, stop - bend / 4), stop, media=media))
        _number(axes, branch, width)
    axes.set_xlim(-0.002 * width, 1.03 * width)
    axes.set_ylim(lines - 0.5, -0.5)
    axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel("tokens from the start of a sample", fontsize=8.5, color=FAINT, loc="right")
    bare(axes)


def _curve(parent: Branch, child: Branch, bend: float) -> PathPatch:
    """A curve from the end of a node to the beginning of a branch."""
    x, half = parent.stop, bend / 2
    points = [(x, parent.line), (x + half, parent.line), (x + half, child.line), (x + bend, child.line)]
    codes = [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4]
    return PathPatch(Path(points, codes), fill=False, edgecolor=SHARED, linewidth=1.2)


def _bar(branch: Branch, start: float, stop: float, *, media: bool) -> Rectangle:
    colour = to_rgb(SHARED if len(branch.samples) > 1 else SAMPLES[min(branch.samples) % len(SAMPLES)])
    corner, length = (start, branch.line - BAR / 2), stop - start
    if not media:
        return Rectangle(corner, length, BAR, facecolor=colour, linewidth=0)
    red, green, blue = colour
    dark = (DARKER * red, DARKER * green, DARKER * blue)
    return Rectangle(corner, length, BAR, facecolor=dark, edgecolor=colour, hatch="////", linewidth=0)


def _number(axes: Axes, branch: Branch, width: int) -> None:
    """Write how many samples share a node, and the number of each sample where it ends."""
    if len(branch.samples) > 1 and branch.stop - branch.start > NARROW * width:
        middle = (branch.start + branch.stop) / 2
        count = f"{len(branch.samples)} ×"
        axes.text(middle, branch.line, count, ha="center", va="center", fontsize=8, fontweight="bold", color="white")
    if branch.ends:
        names = ", ".join(map(str, branch.ends))
        place = branch.stop + 0.006 * width
        axes.text(place, branch.line, names, ha="left", va="center", fontsize=8, fontweight="bold", color=INK)


def _legend(figure: Figure) -> None:
    grey = to_rgb(SHARED)
    dark = (DARKER * grey[0], DARKER * grey[1], DARKER * grey[2])
    entries = [
        Patch(facecolor=SHARED, label="shared, computed once"),
        Patch(facecolor=dark, edgecolor=SHARED, hatch="////", linewidth=0, label="its image"),
        Patch(facecolor=SAMPLES[0], label="of one sample, with its number"),
    ]
    figure.legend(handles=entries, loc="outside lower left", ncols=3, frameon=False, fontsize=8.5, labelcolor=INK)
