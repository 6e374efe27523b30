"""Tables for people at a terminal and for programs behind a pipe.

At a terminal a table is as wide as the terminal: names wrap, numbers do not. In a pipe or a file it has one line a row,
as wide as it needs, without colours and drawn lines: columns are two spaces or more apart.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

NEEDED = 100_000
"""Columns of a pipe: more than any table takes."""
GAP = 2
"""Columns between two of a table."""


def print_table(console: Console, table: Table) -> None:
    """Print a table as its reader needs it, a terminal's or a pipe's."""
    if console.quiet:
        return
    if console.is_terminal:
        console.print(table)
        return
    table.box, table.padding, table.pad_edge = None, (0, GAP, 0, 0), False
    wide = Console(file=console.file, width=NEEDED, color_system=None, emoji=False)
    with wide.capture() as text:
        wide.print(table)
    console.file.write("".join(line.rstrip() + "\n" for line in text.get().splitlines()))


def print_text(console: Console, text: str | Text, *, indent: int = 0) -> None:
    """Print a sentence: wrapped at a terminal, one line in a pipe. A string may have markup."""
    line = Text.from_markup(text) if isinstance(text, str) else text
    if console.is_terminal:
        console.print(Padding(line, (0, 0, 0, indent)) if indent else line, highlight=False)
    else:
        console.print(Text(" " * indent).append_text(line), highlight=False, soft_wrap=True)


def columns_that_fit(
    titles: Sequence[str], cells: Sequence[Sequence[str | Text]], *, taken: int, width: int
) -> Iterator[slice]:
    """Runs of columns that fit a table side by side, at least one each.

    Args:
        titles: of the columns; they wrap, but no word of them does.
        cells: of each column; they do not wrap.
        taken: columns of the terminal for what stands in front of each run.
        width: columns of the terminal.
    """
    start, used = 0, taken
    for at, (title, column) in enumerate(zip(titles, cells, strict=True)):
        needed = GAP + max(len(line) for line in [*wrapped(title).splitlines(), *map(str, column)])
        if used + needed > width and at > start:
            yield slice(start, at)
            start, used = at, taken
        used += needed
    yield slice(start, len(titles))


def wrapped(title: str) -> str:
    """A column's title in lines of a few words."""
    return textwrap.fill(title, 14, break_long_words=False, break_on_hyphens=False)
