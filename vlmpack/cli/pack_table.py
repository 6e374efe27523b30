"""What `vlmpack pack` tells: how far it is, and what it wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from vlmpack.store import LEFT_OUT, Manifest
from vlmpack.store import Progress as Told
from vlmpack.terminal import print_table, print_text

STAGES = {"measure": "measuring samples", "compare": "comparing what is packed", "write": "writing files"}
LISTED = 5
"""Samples in no row that are told in full."""
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


@contextmanager
def told(console: Console) -> Iterator[Told]:
    """A function for `write_rows(progress=...)` that draws a bar for each stage."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bars = {stage: progress.add_task(text, total=None, visible=False) for stage, text in STAGES.items()}

        def tell(stage: str, done: int, total: int | None) -> None:
            progress.update(bars[stage], completed=done, total=total, visible=True)

        yield tell


def print_store(out: Path, manifest: Manifest, console: Console) -> None:
    """Rows, samples, sizes, and what was left out of the folder `out`."""
    counts = manifest.counts
    table = Table(box=box.SIMPLE, show_header=False, title=f"[bold]{escape(str(out))}[/]", title_justify="left")
    table.add_column(style="cyan")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for name, value, meaning in _lines(manifest):
        table.add_row(name, value, meaning)
    print_table(console, table)
    if counts.refused + counts.dropped:
        _print_left_out(out, manifest, console)


def _lines(manifest: Manifest) -> Iterator[tuple[str, str, str]]:
    """(what, how much, what that is for)."""
    counts, sizes = manifest.counts, manifest.sizes
    yield "rows", f"{counts.rows:,}", f"of {manifest.capacity:,} tokens"
    yield "fill", f"{manifest.fill_ratio:.2%}", "tokens of samples per token of row"
    yield "samples", f"{counts.samples:,}", f"of {counts.total:,}; {counts.samples / counts.rows:.2f} in a row"
    yield "refused", f"{counts.refused:,}", "cannot be used, or longer than --max-length"
    yield "dropped", f"{counts.dropped:,}", "exceed a row by themselves"
    yield "tokens", f"{counts.tokens:,}", f"{counts.targets:,} of them learnt"
    if counts.patches:
        yield "images", f"{counts.images:,}", f"and {counts.videos:,} videos: {counts.patches:,} patches"
    yield "written", size(manifest.bytes), f"in {len(manifest.shards):,} file(s)"
    yield "", "", ""
    yield "longest row", f"{sizes.longest_row:,}", "tokens: fixed sizes for CUDA graphs"
    yield "longest segment", f"{sizes.longest_segment:,}", "tokens of a sample"
    yield "most segments", f"{sizes.most_segments:,}", "samples in a row"
    if counts.patches:
        yield "most images", f"{sizes.most_images:,}", "images and videos in a row"
        yield "most patches", f"{sizes.most_patches:,}", "in a row"


def _print_left_out(out: Path, manifest: Manifest, console: Console) -> None:
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in manifest.reasons.items())
    console.print(f"[yellow]Left out[/] (all are listed in {escape(str(out / LEFT_OUT))}): {escape(reasons)}")
    with (out / LEFT_OUT).open(encoding="utf-8") as lines:
        for line in islice(lines, LISTED):
            one = json.loads(line)
            name = "" if one["sample_id"] in (None, one["index"]) else f" (id {one['sample_id']!r})"
            print_text(console, Text(f"sample {one['index']}{name}: {one['detail']}"), indent=2)


def size(count: int) -> str:
    """A number of bytes as people read it."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {UNITS[unit]}" if unit else f"{count} bytes"
