"""Progress of long work, on standard error: what is done, its rate, and the time that is left.

    measuring samples ━━━━━━━━━━──────────  512/1000   170/s  0:00:02 left

Nothing is drawn with `--quiet`, and nothing where standard error is no terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

Advance = Callable[[str, int, int | None], None]
"""Takes the stage, how many of its parts are done, and of how many (None: not known)."""
BAR = 20
"""Columns of a bar: with a title of 24 a line fits 80."""


@contextmanager
def progress_bars(stages: Mapping[str, str], *, quiet: bool) -> Iterator[Advance]:
    """Draw a bar for each stage from its first report on.

    Args:
        stages: names with the titles of their bars.
        quiet: draw nothing.

    Yields:
        The function that reports progress.
    """
    columns = (TextColumn("{task.description}"), BarColumn(BAR), MofNCompleteColumn(), PaceColumn())
    with _progress(*columns, quiet=quiet) as progress:
        bars = {
            stage: progress.add_task(title, total=None, visible=False, start=False) for stage, title in stages.items()
        }

        def advance(stage: str, done: int, total: int | None) -> None:
            if not progress.tasks[bars[stage]].started:
                progress.start_task(bars[stage])
            progress.update(bars[stage], completed=done, total=total, visible=True)

        yield advance


@contextmanager
def waiting(title: str, *, quiet: bool, total: int | None = None) -> Iterator[Callable[[str, int], None]]:
    """Draw the pace of work that has no bar, and the part that is under way, cut to the terminal.

    Args:
        title: of the first part.
        quiet: draw nothing.
        total: number of units of work; None: not known, and the time that has passed is drawn.

    Yields:
        The function that takes the title of the next part and the number of units done.
    """
    part = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    with _progress(SpinnerColumn(), PaceColumn(), part, quiet=quiet, expand=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda title, done: progress.update(task, description=title, completed=done)


def _progress(*columns: ProgressColumn, quiet: bool, expand: bool = False) -> Progress:
    disable = quiet or not sys.stderr.isatty()
    return Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        disable=disable,
        expand=expand,
        redirect_stdout=sys.stdout.isatty(),  # results that come meanwhile stand above; a pipe keeps what is its own
    )


class PaceColumn(ProgressColumn):
    """The rate and the time that is left; of work without a known end the time that has passed."""

    def render(self, task: Task) -> Text:
        """Format them."""
        return Text(pace(task.speed, task.time_remaining, task.elapsed), style="dim")


def pace(speed: float | None, left: float | None, passed: float | None) -> str:
    """Format rate and times.

    >>> pace(170.2, 2.9, 3.0), pace(0.2, 61.0, 3.0), pace(None, None, 3.0)
    ('170/s  0:00:02 left', '5.0 s each  0:01:01 left', '0:00:03')

    Args:
        speed: parts per second; None or 0: not known yet.
        left: seconds; None: not known.
        passed: seconds; None: it has not begun.
    """
    if not speed or left is None:
        return str(timedelta(seconds=int(passed or 0)))
    rate = f"{1 / speed:.1f} s each" if speed < 1 else f"{speed:.1f}/s" if speed < 10 else f"{speed:,.0f}/s"
    return f"{rate}  {timedelta(seconds=int(left))} left"
