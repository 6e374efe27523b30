"""`vlmpack pack`: plan the rows of a data set, and write them to files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from vlmpack.cli import options
from vlmpack.cli.inputs import InputOptions, open_inputs
from vlmpack.cli.mixing import MixOptions, mix_lines, mix_numbers
from vlmpack.cli.progress import progress_bars
from vlmpack.errors import check_extra
from vlmpack.terminal import format_bytes, make_table, number_columns, print_table, print_text, sample_name, text_column

if TYPE_CHECKING:
    from vlmpack.store.manifest import Manifest

ON_BAD = ("raise", "skip")
OVERSIZE = ("error", "drop", "own_row")
OnBad = Annotated[str, options.word(*ON_BAD, help="A bad sample: raise (stop) or skip (leave out, and list).")]
Oversize = Annotated[
    str, options.word(*OVERSIZE, help="A sample that exceeds a row by itself: error, drop (and list) or own_row.")
]
MaxBadFraction = Annotated[
    float | None, typer.Option(min=0, max=1, help="Most samples that may be left out as bad; by default 0.01.")
]
PadSeqToMult = Annotated[
    int, typer.Option(min=1, help="Each sample takes up a multiple of this: 2 x CP under context parallelism.")
]
RowsMultiple = Annotated[
    int, typer.Option(min=1, help="Make the number of rows a multiple of this: ranks x accumulation.")
]
LISTED = 5
"""Samples in no row that are printed with their details."""
STAGES = {"measure": "measuring samples", "compare": "comparing what is packed", "write": "writing files"}


def pack(
    dataset: options.Dataset,
    out: Annotated[Path, typer.Argument(help="Folder for the rows; one that was interrupted is continued.")],
    processor: options.Processor,
    capacity: Annotated[int, typer.Option(min=1, help="Tokens of a row.")],
    split: options.Split = "train",
    num: options.Num = None,
    image_root: options.ImageRoot = None,
    branches: options.Branches = "conversation",
    columns: options.Columns = None,
    mix: options.Mix = None,
    stopping_strategy: options.Stopping = "first_exhausted",
    epoch: options.Epoch = 0,
    seed: options.Seed = 0,
    max_length: options.MaxLength = None,
    overlength: options.Overlength = "error",
    max_pixels: options.MaxPixels = None,
    add_stop: options.AddStop = None,
    ignored_keys: options.IgnoredKeys = None,
    train_on: options.TrainOn = "assistant",
    on_bad: OnBad = "raise",
    max_bad_fraction: MaxBadFraction = None,
    oversize: Oversize = "error",
    strategy: options.Strategy = "exact_fill",
    max_patches: options.MaxPatches = None,
    max_images: options.MaxImages = None,
    max_segments: Annotated[int | None, typer.Option(min=1, help="Most samples in a row.")] = None,
    min_shared: options.MinShared = 0,
    pad_seq_to_mult: PadSeqToMult = 1,
    rows_multiple: RowsMultiple = 1,
    shuffle: Annotated[int | None, typer.Option(min=0, help="Seed that shuffles samples and rows.")] = None,
    shard_rows: Annotated[int, typer.Option(min=1, help="Rows of a file.")] = 128,
    workers: options.Workers = 0,
    ray: Annotated[bool, typer.Option("--ray", help="Measure and write as tasks of Ray instead of --workers.")] = False,
    cache: options.Cache = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Plan which samples share a row, and write the rows: token ids, labels, and images still encoded.

    Killed or stopped, run it again: it continues, and the files are the same, byte for byte. Train on them with
    vlmpack.store.PackedDataset(OUT, processor). With --min-shared samples that begin alike share rows, which compute
    what they share once.
    """
    check_extra("data", "pyarrow", needed_by="`vlmpack pack`")
    if ray:
        check_extra("ray", "ray", needed_by="`vlmpack pack --ray`")

    from vlmpack.collate.assemble import SharePrefixes
    from vlmpack.collate.skipped import SkipLimit
    from vlmpack.layout.segments import SlotRule
    from vlmpack.store.write import StoreSettings, write_rows

    settings = StoreSettings(
        capacity=capacity, max_patches=max_patches, max_images=max_images, strategy=strategy, seed=shuffle,
        rows_multiple=rows_multiple,
        oversize=oversize,  # pyright: ignore[reportArgumentType]
        shard_rows=shard_rows,
    )  # fmt: skip
    source = InputOptions(
        dataset=dataset, processor=processor, split=split, num=num, seed=seed, max_length=max_length,
        overlength=overlength, max_pixels=max_pixels, image_root=image_root, branches=branches, columns=columns or (),
        mix=MixOptions.of(mix, stopping_strategy, epoch), add_stop=add_stop, ignored_keys=ignored_keys or (),
    )  # fmt: skip
    slots = SlotRule(multiple=pad_seq_to_mult, max_segments=max_segments)
    skip_limit = None if max_bad_fraction is None else SkipLimit(max_bad_fraction=max_bad_fraction)
    sharing = SharePrefixes(min_shared=min_shared) if min_shared else False
    inputs = open_inputs(
        source, train_on=train_on, on_bad=on_bad, skip_limit=skip_limit, slots=slots, share_prefixes=sharing
    )
    with progress_bars(STAGES, quiet=quiet) as progress:
        manifest = write_rows(
            inputs.dataset, out, inputs.collator, settings, workers=workers, executor="ray" if ray else "local",
            cache=cache, progress=progress,
        )  # fmt: skip
    mixed = mix_numbers(inputs.dataset)
    print_store(out, manifest, Console(quiet=as_json), mix=mixed)
    if as_json:
        typer.echo(json.dumps({**numbers(out, manifest), "mix": mixed}, indent=2))


def numbers(out: Path, manifest: Manifest) -> dict[str, Any]:
    """Return the numbers of the store in the folder `out`, for JSON."""
    from vlmpack.store.manifest import LEFT_OUT

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


def print_store(out: Path, manifest: Manifest, console: Console, *, mix: dict[str, Any] | None = None) -> None:
    """Print rows, samples, sizes, the data sets of a mix, and the samples left out of the folder `out`."""
    table = make_table("name", *number_columns("number"), text_column("meaning"), header=False)
    console.print(f"[bold]{escape(str(out))}[/]", highlight=False, soft_wrap=not console.is_terminal)
    for name, number, meaning in _lines(manifest):
        table.add_row(f"[cyan]{name}[/]", number, f"[dim]{meaning}[/]")
    print_table(console, table)
    for line in mix_lines(mix):
        print_text(console, Text(f"mixed: {line}"))
    if manifest.counts.refused + manifest.counts.dropped:
        _print_left_out(out, manifest, console)


def _lines(manifest: Manifest) -> Iterator[tuple[str, str, str]]:
    """Yield (name, number, meaning)."""
    counts, sizes = manifest.counts, manifest.sizes
    yield "rows", f"{counts.rows:,}", f"of {manifest.capacity:,} tokens"
    yield "fill ratio", f"{manifest.fill_ratio:.2%}", "tokens of samples per token of row"
    yield "samples", f"{counts.samples:,}", f"of {counts.total:,}; {counts.samples / counts.rows:.2f} in a row"
    yield "refused", f"{counts.refused:,}", "cannot be used, or longer than --max-length"
    yield "dropped", f"{counts.dropped:,}", "exceed a row by themselves"
    yield "tokens", f"{counts.tokens:,}", f"{counts.targets:,} of them targets"
    if counts.patches:
        yield "images", f"{counts.images:,}", f"and {counts.videos:,} videos: {counts.patches:,} patches"
    yield "written", format_bytes(manifest.bytes), f"in {len(manifest.shards):,} file(s)"
    yield "", "", ""
    yield "longest row", f"{sizes.longest_row:,}", "tokens: fixed sizes for CUDA graphs"
    yield "longest segment", f"{sizes.longest_segment:,}", "tokens of a sample"
    yield "most segments", f"{sizes.most_segments:,}", "samples in a row"
    if counts.patches:
        yield "most images", f"{sizes.most_images:,}", "images and videos in a row"
        yield "most patches", f"{sizes.most_patches:,}", "in a row"


def _print_left_out(out: Path, manifest: Manifest, console: Console) -> None:
    from vlmpack.store.manifest import LEFT_OUT

    reasons = ", ".join(f"{reason} {count:,}" for reason, count in manifest.reasons.items())
    console.print(f"[yellow]Left out[/] (all are listed in {escape(str(out / LEFT_OUT))}): {escape(reasons)}")
    with (out / LEFT_OUT).open(encoding="utf-8") as lines:
        for line in map(json.loads, islice(lines, LISTED)):
            text = f"sample {sample_name(line['index'], line['sample_id'])}: {line['detail']}"
            print_text(console, Text(text), indent=2)
