"""The prefix tree of a row as lines of characters, one for each node.

     tokens  samples           0                    40                  80
         60  ┬ 3 samples       ====####################
         18  ├ receipt-1                               aaaaaa
         20  └ receipt-2                               bbbbbbb
         41  ─ receipt-3       cccCCCCCCCCCCC

A node stands where its tokens do in its samples: behind its parent. Shared tokens are "=", those of images and videos
"#"; of one sample a letter, and its capital. Colours only repeat what the characters say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any, final

from rich.console import Console, Group
from rich.text import Text

if TYPE_CHECKING:
    import numpy as np

    from vlmpack.layout.prefix_tree import PrefixTree

MOST_LINES = 60
"""Nodes that are drawn; `--json` has them all."""
NAMES = 26
"""Columns of the widest name, its lines included."""
COLOURS = (("#9ecae9", "#3a6ea5"), ("#ffcf9c", "#a8611a"), ("#b5dfa8", "#3f7d34"), ("#d9b8e8", "#76459a"))
"""Backgrounds of (text, images) of neighbouring samples."""
SHARED = ("=", "#")
SHARED_STYLES = ("black on #d5d8de", "bold white on #4a4f5c")


def letter(sample: int, *, is_media: bool) -> str:
    """Return the letter of a sample, by its place in the row; the capital for its images and videos."""
    small = ascii_lowercase[sample % len(ascii_lowercase)]
    return small.upper() if is_media else small


def style(sample: int, *, is_media: bool) -> str:
    """Return the colours of a sample, by its place in the row."""
    text, media = COLOURS[sample % len(COLOURS)]
    return f"bold white on {media}" if is_media else f"black on {text}"


@final
@dataclass(frozen=True, kw_only=True)
class Node:
    """One node, ready to be drawn."""

    tokens: int
    """Its tokens."""
    media: int
    """Its tokens of images and videos."""
    start: int
    """Tokens before it on its path."""
    depth: int
    """Nodes before it on its path."""
    is_last: bool
    """It has no sibling after it."""
    lines: tuple[bool, ...]
    """For each depth above it, below the roots: another node follows there."""
    has_children: bool
    """Nodes begin where it ends."""
    samples: tuple[int, ...]
    """Samples that have it, by their places in the row."""
    ends: tuple[int, ...]
    """Samples that end in it."""


@final
@dataclass(frozen=True, kw_only=True)
class TreeDrawing:
    """The tree of a row, cut into cells of the same number of tokens."""

    tree: PrefixTree
    """The tree."""
    nodes: tuple[Node, ...]
    """Its nodes, in their order."""
    cells: tuple[tuple[bool, ...], ...]
    """For each cell of each node: most of its tokens belong to images and videos."""
    names: tuple[str, ...]
    """Of the samples."""
    tokens_per_cell: int
    """The last cell of a node may hold fewer."""
    margin: int
    """Columns in front of the first cell."""
    width: int
    """Columns of the terminal."""

    @classmethod
    def of(
        cls,
        tree: PrefixTree,
        types: np.ndarray,
        sample_ids: Sequence[int | str],
        *,
        width: int = 80,
        tokens_per_cell: int | None = None,
    ) -> TreeDrawing:
        """Cut the tree of a row into cells.

        Args:
            tree: of a row of T tokens.
            types: [T] `mm_token_type_ids`: 0 text, others image or video.
            sample_ids: of its samples.
            width: columns of the terminal.
            tokens_per_cell: None: as few as the width allows, a power of two.
        """
        names, is_media = tuple(map(str, sample_ids)), types[tree.source().numpy()] != 0
        nodes = _nodes(tree, is_media)
        widest = max(2 * node.depth + 2 + len(_name(node, names)) for node in nodes)
        margin = _digits(tree) + 2 + min(widest, NAMES) + 1
        fewest = -(-max(tree.keys.lengths) // max(width - margin, 8))
        each = tokens_per_cell or 1 << max(fewest - 1, 0).bit_length()
        starts = [range(low, high, each) for low, high in tree.nodes.spans]
        cells = tuple(tuple(_is_most(is_media[at : min(at + each, span.stop)]) for at in span) for span in starts)
        return cls(tree=tree, nodes=nodes, cells=cells, names=names, tokens_per_cell=each, margin=margin, width=width)

    # ------------------------------------------------------------------ in characters

    def draw(self, console: Console) -> Group:
        """Draw a line for each node and the totals; with lines between nodes on a terminal that has them."""
        lines = [self._head()]
        has_lines = console.is_terminal and not console.options.ascii_only
        lines += [
            self._line(node, cells, has_lines=has_lines)
            for node, cells in zip(self.nodes[:MOST_LINES], self.cells, strict=False)
        ]
        if more := len(self.nodes) - MOST_LINES:
            lines += [Text(f"... and {more:,} more nodes; --json lists them all")] * (more > 0)
        return Group(*lines, Text(), Text(self._totals()))

    def _head(self) -> Text:
        line = Text(f"{'tokens':>{_digits(self.tree)}}  samples", style="dim", no_wrap=True)
        line.pad_right(self.margin - len(line))
        cells = max(self.width - self.margin, 1)
        places = range(0, cells, max(20, cells // 3))
        scale = "".join(f"{place * self.tokens_per_cell:<{places.step},}" for place in places)
        return line.append(scale[:cells].rstrip())

    def _line(self, node: Node, cells: Sequence[bool], *, has_lines: bool) -> Text:
        line = Text(no_wrap=True)
        line.append(f"{node.tokens:>{_digits(self.tree)},}", style="dim")
        line.append("  " + _guide(node, has_lines=has_lines), style="dim")
        name, room = _name(node, self.names), max(self.margin - 1 - len(line), 1)
        line.append(name if len(name) <= room else f"{name[: room - 1]}~")
        line.pad_right(self.margin + node.start // self.tokens_per_cell - len(line))
        for media, run in groupby(cells):
            line.append(self._character(node, media) * len(list(run)), style=self._style(node, media))
        line.truncate(self.width)
        return line

    def _character(self, node: Node, media: bool) -> str:
        return SHARED[media] if len(node.samples) > 1 else letter(min(node.samples), is_media=media)

    def _style(self, node: Node, media: bool) -> str:
        return SHARED_STYLES[media] if len(node.samples) > 1 else style(min(node.samples), is_media=media)

    def _totals(self) -> str:
        numbers = self.to_dict()
        nodes, pairs, plain = len(self.nodes), numbers["attended_pairs"], numbers["plain_pairs"]
        each = f"{self.tokens_per_cell:,} tokens" if self.tokens_per_cell > 1 else "a token"
        return (
            f"{numbers['computed']:,} tokens are computed for {numbers['tokens']:,} of {len(self.names):,} samples "
            f"({1 - numbers['computed'] / numbers['tokens']:.1%} less), {pairs:,} attended pairs for {plain:,} "
            f"({1 - pairs / plain:.1%} less). {nodes:,} node{'' if nodes == 1 else 's'}, {numbers['levels']:,} deep. = "
            f"is shared text, # shared images and videos; capitals: images and videos of one sample. A character is "
            f"{each}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the tree and its totals, for JSON."""
        from vlmpack.plan.prefix_groups import attended_pairs

        tree, lengths = self.tree, self.tree.segments.lengths[: len(self.names)]
        columns = {"parents": list(tree.parents), "lengths": list(tree.lengths), "leaves": list(tree.leaves)}
        return {
            "tokens": sum(lengths),
            "computed": tree.num_tokens,
            "attended_pairs": tree.attended_pairs,
            "plain_pairs": sum(attended_pairs(length) for length in lengths),
            "levels": 1 + max(tree.depths),
            **columns,
            "media": [node.media for node in self.nodes],
            "images": list(tree.images),
            "videos": list(tree.videos),
        }


def _name(node: Node, names: Sequence[str]) -> str:
    """Name a node by its sample, or by how many have it, and by those that end in it before others go on."""
    if len(node.samples) == 1:
        return names[min(node.samples)]
    ends = ", ".join(names[sample] for sample in node.ends)
    return f"{len(node.samples):,} samples{f', ends {ends}' if ends and node.has_children else ''}"


def _is_most(cell: np.ndarray) -> bool:
    return bool(2 * cell.sum() > len(cell))


def _nodes(tree: PrefixTree, is_media: np.ndarray) -> tuple[Node, ...]:
    count = len(tree.parents)
    samples: list[list[int]] = [[] for _ in range(count)]
    ends: list[list[int]] = [[] for _ in range(count)]
    for sample, leaf in enumerate(tree.leaves):
        ends[leaf].append(sample)
        for node in tree.path(leaf):
            samples[node].append(sample)
    last = dict(zip(tree.parents, range(count), strict=True))  # the last child of each node
    nodes: list[Node] = []
    for node, ((low, high), keys) in enumerate(zip(tree.nodes.spans, tree.keys.lengths, strict=True)):
        path = tree.path(node)
        nodes.append(
            Node(
                tokens=high - low,
                media=int(is_media[low:high].sum()),
                start=keys - (high - low),
                depth=len(path) - 1,
                is_last=last[tree.parents[node]] == node,
                lines=tuple(last[tree.parents[above]] != above for above in path[1:-1]),
                has_children=node in last,
                samples=tuple(samples[node]),
                ends=tuple(ends[node]),
            )
        )
    return tuple(nodes)


def _guide(node: Node, *, has_lines: bool) -> str:
    """Lines from a node's parent to it, or as many columns of spaces."""
    if not has_lines:
        return "  " * node.depth  # a pipe has no drawn lines
    above = "".join("│ " if goes_on else "  " for goes_on in node.lines)
    if node.depth:
        return above + ("└" if node.is_last else "├") + ("┬ " if node.has_children else "─ ")
    return "┬ " if node.has_children else "─ "


def _digits(tree: PrefixTree) -> int:
    return max(len("tokens"), len(f"{max(tree.lengths):,}"))
