"""A packed row as a ribbon of characters: which sample each token belongs to, and what it is.

        0 aaaaAAAAAAAAAAaabbbbbbbcccCCC      a, b, c: the samples, one letter each, again from a after z
      928 CCCCCCCCCcc....                    capitals: tokens of images and videos;  dots: padding

Colours only repeat what the letters say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from string import ascii_lowercase
from typing import final

import numpy as np
from rich.columns import Columns
from rich.console import Group
from rich.text import Text

from vlmpack.errors import LayoutError
from vlmpack.layout import Segments

LINES = 8
"""Lines that a row takes at most, unless a cell's tokens are given."""
PADDING = -1
COLOURS = (("#9ecae9", "#3a6ea5"), ("#ffcf9c", "#a8611a"), ("#b5dfa8", "#3f7d34"), ("#d9b8e8", "#76459a"))
"""Backgrounds of (text, images) of neighbouring samples."""


@final
@dataclass(frozen=True, kw_only=True)
class Ribbon:
    """One row, cut into cells of the same number of tokens."""

    cells: np.ndarray
    """int64: twice the sample's place in the row, one more for its images; -1: padding. What a cell holds most of."""
    tokens_per_cell: int
    """The last cell may hold fewer."""
    lengths: tuple[int, ...]
    """Tokens of each sample of the row."""
    media: tuple[int, ...]
    """How many of them belong to images and videos."""
    names: tuple[str, ...]
    """What each sample is called."""
    total: int
    """Tokens of the row T, padding included."""


def make_ribbon(
    segments: Segments,
    types: np.ndarray | None = None,
    sample_ids: Sequence[int | str] | None = None,
    *,
    width: int = 80,
    tokens_per_cell: int | None = None,
) -> Ribbon:
    """Cut a row into cells.

    Args:
        segments: of the row, T tokens wide.
        types: [T] `mm_token_type_ids`: 0 text, others image or video; None: all text.
        sample_ids: of its samples; None: their places in the row.
        width: columns of the terminal.
        tokens_per_cell: None: as few as `LINES` lines allow, a round number.

    Raises:
        LayoutError: types or ids of another row.
    """
    count, total = segments.num_samples, segments.total
    names = tuple(str(name) for name in (range(count) if sample_ids is None else sample_ids))
    types = np.zeros(total, np.int64) if types is None else np.asarray(types).reshape(-1)
    if len(types) != total or len(names) != count:
        raise LayoutError(
            f"a row of {count} samples in {total} tokens was given {len(names)} sample ids and {len(types)} token types"
        )
    what = 2 * segments.seq_idx().numpy().astype(np.int64) + (types != 0)
    what[segments.padding_mask().numpy()] = PADDING
    each = tokens_per_cell or _round_up(total, LINES * _cells_per_line(width, total))
    spans = segments.spans[:count]
    return Ribbon(
        cells=np.array([_most(what[at : at + each]) for at in range(0, total, each)], np.int64),
        tokens_per_cell=each,
        lengths=segments.lengths[:count],
        media=tuple(int((types[start:stop] != 0).sum()) for start, stop in spans),
        names=names,
        total=total,
    )


def draw(ribbon: Ribbon, *, width: int = 80) -> Group:
    """The ribbon in lines, what its letters mean, and its totals."""
    per_line = _cells_per_line(width, ribbon.total)
    lines = [_line(ribbon, at, per_line) for at in range(0, len(ribbon.cells), per_line)]
    shown = set((ribbon.cells[ribbon.cells != PADDING] // 2).tolist())
    entries = [_entry(ribbon, sample, is_shown=sample in shown) for sample in range(len(ribbon.names))]
    return Group(
        *lines, Text(), Columns(entries, padding=(0, 3)), Text(), _totals(ribbon, has_hidden=len(shown) < len(entries))
    )


def _line(ribbon: Ribbon, first: int, per_line: int) -> Text:
    line = Text(no_wrap=True)
    line.append(f"{first * ribbon.tokens_per_cell:>{_margin(ribbon.total) - 1},} ", style="dim")
    for cell, run in groupby(ribbon.cells[first : first + per_line].tolist()):
        line.append(_letter(cell) * len(list(run)), style=_style(cell))
    return line


def _entry(ribbon: Ribbon, sample: int, *, is_shown: bool) -> Text:
    """A sample in the legend; a letter in brackets does not appear in the ribbon, as the sample dominates no cell."""
    letter = _letter(2 * sample)
    entry = Text(no_wrap=True)
    entry.append(letter if is_shown else f"({letter})", style=_style(2 * sample))
    media = f" ({ribbon.media[sample]:,} image)" if ribbon.media[sample] else ""
    return entry.append(f" {ribbon.names[sample]}: {ribbon.lengths[sample]:,}{media}")


def _totals(ribbon: Ribbon, *, has_hidden: bool) -> Text:
    real, media = sum(ribbon.lengths), sum(ribbon.media)
    padding, count = ribbon.total - real, len(ribbon.names)
    parts = [f"{real - media:,} text", f"{media:,} image (capitals)" if media else "", f"{padding:,} padding (dots)"]
    samples = f"{count:,} sample{'' if count == 1 else 's'}"
    told = f"{ribbon.total:,} tokens = {' + '.join(part for part in parts if part)}, {samples}"
    each = f"{ribbon.tokens_per_cell:,} tokens" if ribbon.tokens_per_cell > 1 else "a token"
    return Text(f"{told}. A character is {each}{'; samples in brackets fill none' if has_hidden else ''}.")


# ---------------------------------------------------------------------- cells


def _letter(cell: int) -> str:
    if cell == PADDING:
        return "."
    letter = ascii_lowercase[cell // 2 % len(ascii_lowercase)]
    return letter.upper() if cell % 2 else letter


def _style(cell: int) -> str:
    if cell == PADDING:
        return "dim"
    text, media = COLOURS[cell // 2 % len(COLOURS)]
    return f"bold white on {media}" if cell % 2 else f"black on {text}"


def _most(tokens: np.ndarray) -> int:
    """What most of a cell's tokens are; of two alike, what comes first."""
    found, first, counts = np.unique(tokens, return_index=True, return_counts=True)
    return int(found[np.lexsort((first, -counts))[0]])


def _margin(total: int) -> int:
    """Columns in front of a line: where it starts in the row."""
    return len(f"{total:,}") + 1


def _cells_per_line(width: int, total: int) -> int:
    return max(width - _margin(total), 1)


def _round_up(total: int, cells: int) -> int:
    """The smallest power of two with which a row has no more than so many cells."""
    return 1 << max(-(-total // cells) - 1, 0).bit_length()
