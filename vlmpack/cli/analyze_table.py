"""The answer of `vlmpack analyze`, for people."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich import box
from rich.columns import Columns
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from vlmpack.cli.analyze_run import Analysis
from vlmpack.plan import HistogramBin, LengthTable, Padding, Simulation, histogram
from vlmpack.terminal import print_table, print_text

LISTED = 5
"""Refused samples that are told in full."""
BAR = 20
"""Characters of the longest bar of a histogram."""
EIGHTHS = " ▏▎▍▌▋▊▉█"


def print_analysis(analysis: Analysis, console: Console) -> None:
    """Tables, histograms, and what they mean."""
    console.print(_head(analysis), soft_wrap=not console.is_terminal)
    _print_refused(analysis.table, console)
    if not len(analysis.table):
        return
    print_table(console, _summaries(analysis))
    drawn = (bars(name, values, ascii_only=console.options.ascii_only) for name, values in analysis.drawn.items())
    console.print(Columns(drawn, padding=(0, 4)))
    print_table(console, _layouts(analysis))
    for simulation in analysis.simulations:
        console.print(f"[bold]Rows of {simulation.capacity:,} tokens[/]", highlight=False)
        for sentence in simulation.explain():
            print_text(console, Text(sentence), indent=2)


def bars(name: str, values: np.ndarray, *, ascii_only: bool = False) -> Group:
    """A histogram: one line a bin, the longest bar `BAR` characters long.

    Args:
        name: what is counted, written above.
        values: int64 [N].
        ascii_only: whether the terminal has no block characters.
    """
    bins = histogram(values)
    most = max((one.count for one in bins), default=0)
    starts = len(f"{bins[-1].start:,}") if bins else 0
    lines = [_bar_line(one, most, starts, ascii_only=ascii_only) for one in bins]
    return Group(Text(name, style="bold"), *lines, Text())


def _bar_line(one: HistogramBin, most: int, starts: int, *, ascii_only: bool) -> Text:
    line = Text(f"{one.start:>{starts},}{' ' if one.stop else '+'} ", no_wrap=True)
    line.append(f"{_bar(one.count / most, ascii_only=ascii_only):<{BAR}}", style="cyan")
    return line.append(f" {one.count:,}")


def _bar(part: float, *, ascii_only: bool) -> str:
    """Blocks for 0 to 1; what is there at all can be seen."""
    eighths = max(round(part * BAR * 8), 1 if part else 0)
    if ascii_only:
        return "#" * -(-eighths // 8)
    return EIGHTHS[8] * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def _head(analysis: Analysis) -> str:
    table = analysis.table
    media = {"images": table.images.sum(), "videos": table.videos.sum()}
    told = [f"{len(table):,} samples", f"{table.tokens.sum():,} tokens"]
    told += [f"{count:,} {name}" for name, count in media.items() if count]
    estimate = " [yellow](image tokens are estimated)[/]" if analysis.is_estimate else ""
    return f"[bold]{escape(analysis.source)}[/]: {', '.join(told)}{estimate}\n"


def _print_refused(table: LengthTable, console: Console) -> None:
    if not table.refused:
        return
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in table.reasons.items())
    count = f"{len(table.refused):,} of {table.given:,}"
    console.print(f"[yellow]{count} samples cannot be used[/]: {escape(reasons)}", highlight=False)
    for one in table.refused[:LISTED]:
        name = "" if one.sample_id is None or one.sample_id == one.index else f" (id {one.sample_id!r})"
        said = Text(f"{one.index}{name}: {one.reason}: {one.detail}")
        print_text(console, said, indent=2)
    more = len(table.refused) - LISTED
    console.print(f"  and {more:,} more (--out writes them all)\n" if more > 0 else "", highlight=False)


def _summaries(analysis: Analysis) -> Table:
    table = _table("a sample", "mean", "median", "p95", "p99", "max", "in all")
    for name, one in analysis.summaries.items():
        table.add_row(name, *(f"{n:,.0f}" for n in (one.mean, one.median, one.p95, one.p99, one.max, one.total)))
    return table


def _layouts(analysis: Analysis) -> Table:
    """Padded and packed, a line each; rows are counted as if they were filled up to their capacity."""
    recipe, samples = analysis.recipe, len(analysis.table)
    table = _table(
        "",
        "rows",
        "padding",
        "samples\na row",
        "accumu-\nlation",
        "samples\nan update",
        "updates\nan epoch",
        "too\nlong",
    )
    padded = f"{recipe.accumulation:,}", f"{recipe.samples_per_update:,}", f"{recipe.updates(samples):,}"
    for name, padding in (("padded to batch", analysis.padded_to_longest), ("padded to max", analysis.padded_to_max)):
        table.add_row(name, f"{samples:,}", _waste(padding), "1", *padded, "0")
    table.add_section()
    for one in analysis.simulations:
        table.add_row(f"packed, {one.capacity:,}", *_packed(one))
    return table


def _waste(padding: Padding) -> str:
    return f"{padding.waste:.1%}"


def _packed(one: Simulation) -> Sequence[str]:
    return (
        f"{one.rows:,}",
        f"{1 - one.fill:.1%}" if one.rows else "",
        f"{one.samples_per_row:.2f}",
        f"{one.accumulation:,}",
        f"{one.samples_per_update:,.1f}",
        f"{one.updates:,}",
        f"{len(one.oversize):,}",
    )


def _table(first: str, *numbers: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for title in numbers:
        table.add_column(title, justify="right", no_wrap=True)
    return table
