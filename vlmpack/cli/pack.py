"""`vlmpack pack`: plan the rows of a data set, and write them to files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.text import Text
from typer import Argument, Option

from vlmpack.cli.inputs import LISTED, mix_lines, mix_numbers, open_inputs
from vlmpack.cli.options import AtLeast1, DataOptions, OutputOptions, with_options
from vlmpack.errors import SampleError, check_extra
from vlmpack.terminal import format_bytes, print_facts, print_text, progress_lines

if TYPE_CHECKING:
    from vlmpack.rows import Manifest

STAGES = {"measure": "measuring samples", "compare": "checking finished files", "write": "writing files"}


@dataclass(frozen=True, kw_only=True)
class PackOptions(DataOptions, OutputOptions):
    """How rows are written."""

    out: Annotated[Path, Argument()]
    """Folder for the rows; an interrupted one is continued."""
    capacity: AtLeast1
    """Maximum tokens of a row."""
    rows_multiple: AtLeast1 = 1
    """Make the number of rows a multiple of N: ranks x accumulation."""
    pad_seq_to_mult: AtLeast1 = 1
    """Pad each sample to a multiple of N: 2 x CP for context parallelism."""
    on_bad: Literal["raise", "skip"] = "raise"
    """Stop at a sample that cannot be used, or skip and list it."""
    max_bad_fraction: Annotated[float | None, Option(min=0, max=1, metavar="PART")] = None
    """Maximum share of skipped samples; default 0.01."""
    shard_rows: AtLeast1 = 128
    """Rows per file."""
    ray: bool = False
    """Measure and write on Ray Data instead of --workers."""


@with_options
def pack(given: PackOptions) -> None:
    """Plan rows and write them to files: token ids, labels and encoded images.

    If it is stopped or killed, run it again: it continues, and the files are the same, byte for byte. Train on them
    with vlmpack.rows.PackedDataset(OUT, processor). With --min-shared, rows compute shared prefixes once.
    """
    check_extra("data", "pyarrow", needed_by="`vlmpack pack`")
    if given.ray:
        check_extra("ray", "ray", needed_by="`vlmpack pack --ray`")

    from vlmpack.collate.skipped import SkipLimit
    from vlmpack.layout.segments import SlotRule
    from vlmpack.plan.lengths import TRUNCATING
    from vlmpack.rows import StoreSettings, write_rows

    settings = StoreSettings(
        capacity=given.capacity, max_patches=given.max_patches, strategy=given.strategy,
        overlength="error" if given.overlength in TRUNCATING else given.overlength,
        rows_multiple=given.rows_multiple, shard_rows=given.shard_rows,
    )  # fmt: skip
    limit = None if given.max_bad_fraction is None else SkipLimit(max_bad_fraction=given.max_bad_fraction)
    slots = SlotRule(multiple=given.pad_seq_to_mult)
    dataset, collator = open_inputs(given, capacity=given.capacity, on_bad=given.on_bad, slots=slots, skip_limit=limit)
    with progress_lines(quiet=given.quiet) as progress:
        manifest = write_rows(
            dataset, given.out, collator, settings, workers=given.workers, executor="ray" if given.ray else "local",
            cache=given.cache, progress=lambda stage, done, total: progress(STAGES[stage], done, total),
        )  # fmt: skip
    numbers = {**store_numbers(given.out, manifest), "mix": mix_numbers(dataset)}
    print_store(numbers, Console(quiet=given.as_json))
    given.print_json(numbers)


def store_numbers(out: Path, manifest: Manifest) -> dict[str, Any]:
    """Return the numbers of a folder of packed rows, for JSON."""
    from vlmpack.rows import LEFT_OUT

    has_left_out = manifest.counts.refused + manifest.counts.dropped
    return {
        "out": str(out),
        "capacity": manifest.capacity,
        "fill_ratio": manifest.fill_ratio,
        "counts": asdict(manifest.counts),
        "sizes": asdict(manifest.sizes),
        "files": len(manifest.shards),
        "bytes": manifest.bytes,
        "reasons": dict(manifest.reasons),
        "left_out": str(out / LEFT_OUT) if has_left_out else None,
    }


def print_store(numbers: Mapping[str, Any], console: Console) -> None:
    """Print the rows, samples and sizes of a folder of packed rows, its mix, and the samples left out."""
    console.print(f"[bold]{escape(numbers['out'])}[/]", highlight=False, soft_wrap=not console.is_terminal)
    written = f"{format_bytes(numbers['bytes'])} in {numbers['files']:,} files"
    fill = {"capacity": numbers["capacity"], "fill_ratio": f"{numbers['fill_ratio']:.2%}"}
    print_facts(console, {**numbers["counts"], **fill, "written": written, **numbers["sizes"]})
    for line in mix_lines(numbers.get("mix")):
        print_text(console, Text(f"mixed: {line}"))
    if (left_out := numbers["left_out"]) is not None:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in numbers["reasons"].items())
        console.print(f"[yellow]Left out[/] (all are listed in {escape(left_out)}): {escape(reasons)}")
        with Path(left_out).open(encoding="utf-8") as lines:
            for line in map(json.loads, islice(lines, LISTED)):
                error = SampleError(line["detail"], index=line["index"], sample_id=line["sample_id"])
                print_text(console, Text(str(error)), indent=2)
