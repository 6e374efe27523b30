"""Print tables, sentences and progress for people at a terminal, and plain lines for programs that read a pipe.

At a terminal, a table is as wide as the terminal: names wrap, numbers do not. In a pipe or a file, each table row is
one line of any width, without colors and lines, and columns are at least two spaces apart. Progress is drawn on
standard error, and only if that is a terminal:

    measuring samples             ━━━━━━━━━━────────── 512/1000 0:00:03 0:00:02
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich import box, progress
from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

NEEDED = 100_000
"""Line width for pipes, in characters: more than any table needs."""
GAP = 2
"""Spaces between two columns of a table."""
BYTE_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def number_columns(*titles: str) -> list[Column]:
    """Make right-aligned columns that do not wrap."""
    return [Column(title, justify="right", no_wrap=True) for title in titles]


def text_column(title: str) -> Column:
    """Make a column that wraps at a narrow terminal."""
    return Column(title, overflow="fold")


def print_table(
    console: Console, columns: Iterable[str | Column], rows: Iterable[Sequence[str | Text]], *, header: bool = True
) -> None:
    """Print a table: wrapped at a terminal, one line per row in a pipe.

    Args:
        console: where to print it.
        columns: columns from left to right; a plain string is the title of a column that does not wrap.
        rows: cells of each row; a string may contain rich markup. A row without cells is a line between two sections.
        header: print the titles, with a line below them.
    """
    if console.quiet:
        return
    whole = [Column(each, no_wrap=True) if isinstance(each, str) else each for each in columns]
    lines = box.SIMPLE_HEAD if header and console.is_terminal else None
    gap = 1 if console.is_terminal else GAP
    table = Table(*whole, box=lines, show_header=header, pad_edge=False, padding=(0, gap, 0, 0))
    for cells in rows:
        if cells:
            table.add_row(*cells)
        else:
            table.add_section()
    if console.is_terminal:
        console.print(table)
        return
    wide = Console(file=console.file, width=NEEDED, color_system=None, emoji=False)
    with wide.capture() as text:
        wide.print(table)
    console.file.write("".join(line.rstrip() + "\n" for line in text.get().splitlines()))


def print_facts(console: Console, facts: Mapping[str, object]) -> None:
    """Print a name and a value a line; names get spaces for underscores, whole numbers commas; True is "yes"."""
    shown = {name: ("no", "yes")[value] if isinstance(value, bool) else value for name, value in facts.items()}
    texts = {name: f"{value:,}" if isinstance(value, int) else str(value) for name, value in shown.items()}
    rows = [(name.replace("_", " "), Text(text)) for name, text in texts.items()]
    print_table(console, ("", text_column("")), rows, header=False)


def print_text(console: Console, text: str | Text, *, indent: int = 0) -> None:
    """Print a sentence: wrapped at a terminal, one line in a pipe. A string may contain rich markup."""
    line = Text.from_markup(text) if isinstance(text, str) else text
    if console.is_terminal:
        console.print(Padding(line, (0, 0, 0, indent)) if indent else line, highlight=False)
    else:
        console.print(Text(" " * indent).append_text(line), highlight=False, soft_wrap=True)


def format_bytes(count: int) -> str:
    """Format a number of bytes in the largest unit that gives at least 1."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(BYTE_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {BYTE_UNITS[unit]}" if unit else f"{count} bytes"


# ---------------------------------------------------------------------- progress


@contextmanager
def progress_lines(title: str | None = None, *, quiet: bool) -> Iterator[Callable[..., None]]:
    """Draw a progress line for each stage of a long task, from its first report on.

    Args:
        title: a stage that begins at once.
        quiet: draw nothing.

    Yields:
        `report(stage, done=0, total=None, detail="")`: the parts of a stage that are done, and the total number (None:
            unknown); `detail` replaces the name of the stage.
    """
    stage_column = progress.TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True))
    counts = progress.MofNCompleteColumn(), progress.TimeElapsedColumn(), progress.TimeRemainingColumn()
    with progress.Progress(
        stage_column,
        progress.BarColumn(20),
        *counts,
        console=Console(stderr=True),
        transient=True,
        expand=True,
        disable=quiet or not sys.stderr.isatty(),
        redirect_stdout=sys.stdout.isatty(),  # prints results above the progress lines; a pipe is left alone
    ) as lines:
        tasks: dict[str, progress.TaskID] = {}

        def report(stage: str, done: int = 0, total: int | None = None, detail: str = "") -> None:
            if stage not in tasks:
                tasks[stage] = lines.add_task(stage, total=total)
            lines.update(tasks[stage], completed=done, total=total, description=detail or stage)

        if title is not None:
            report(title)
        yield report


@contextmanager
def quiet_transformers(*shown: type[Warning]) -> Iterator[None]:
    """Suppress progress bars and retry messages of transformers and the hub, and all warnings but those shown."""
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    level, bars, requests = logging.get_verbosity(), logging.is_progress_bar_enabled(), hub.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hub.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for kind in shown:
                warnings.simplefilter("default", kind)
            yield
    finally:
        logging.set_verbosity(level)
        hub.set_verbosity(requests)
        if bars:
            logging.enable_progress_bar()
