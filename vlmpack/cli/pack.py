"""`vlmpack pack`: a data set, planned and written down as packed rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlmpack.cli.inputs import (
    CacheOption,
    DatasetArgument,
    MaxLengthOption,
    NumOption,
    OverlengthOption,
    ProcessorOption,
    SeedOption,
    SplitOption,
    WorkersOption,
)
from vlmpack.cli.need import need


def pack(
    dataset: DatasetArgument,
    out: Annotated[Path, typer.Argument(help="Folder for the rows; one that was interrupted is continued.")],
    processor: ProcessorOption,
    capacity: Annotated[int, typer.Option(min=1, help="Tokens of a row.")],
    split: SplitOption = "train",
    num: NumOption = None,
    seed: SeedOption = 0,
    max_length: MaxLengthOption = None,
    overlength: OverlengthOption = "error",
    train_on: Annotated[str, typer.Option(help="What is learnt: assistant (its turns) or all.")] = "assistant",
    on_bad: Annotated[str, typer.Option(help="A bad sample: raise (stop) or skip (leave out, and list).")] = "raise",
    max_bad_fraction: Annotated[
        float | None, typer.Option(min=0, max=1, help="Most samples that may be left out as bad; by default 0.01.")
    ] = None,
    oversize: Annotated[
        str, typer.Option(help="A sample that exceeds a row by itself: error, drop (and list) or own_row.")
    ] = "error",
    max_patches: Annotated[int | None, typer.Option(min=1, help="Most vision patches in a row.")] = None,
    max_images: Annotated[int | None, typer.Option(min=1, help="Most images and videos in a row.")] = None,
    max_segments: Annotated[int | None, typer.Option(min=1, help="Most samples in a row.")] = None,
    pad_seq_to_mult: Annotated[
        int, typer.Option(min=1, help="Each sample takes up a multiple of this: 2 x CP under context parallelism.")
    ] = 1,
    rows_multiple: Annotated[
        int, typer.Option(min=1, help="Make the number of rows a multiple of this: ranks x accumulation.")
    ] = 1,
    shuffle: Annotated[
        int | None, typer.Option(min=0, help="Seed that shuffles samples and rows; or as given.")
    ] = None,
    images: Annotated[str, typer.Option(help="Keep images as bytes, or as reference (path and SHA-256).")] = "bytes",
    shard_rows: Annotated[int, typer.Option(min=1, help="Rows of a file.")] = 128,
    workers: WorkersOption = 0,
    ray: Annotated[bool, typer.Option("--ray", help="Measure and write as tasks of Ray instead of --workers.")] = False,
    cache: CacheOption = None,
) -> None:
    """Plan which samples share a row, and write the rows down: token ids, what is learnt, and images still encoded.

    Killed or stopped, run it again: it goes on where it was, and ends with the same files. Train on them with
    vlmpack.offline.PackedDataset(OUT, processor).
    """
    need("pack", "pyarrow", extra="data")
    if ray:
        need("pack --ray", "ray", extra="ray")

    from rich.console import Console

    from vlmpack.cli.inputs import open_inputs
    from vlmpack.cli.pack_table import print_store, told
    from vlmpack.layout import SlotRule
    from vlmpack.offline import StoreSettings, write_rows

    settings = StoreSettings(
        capacity=capacity,
        max_patches=max_patches,
        max_images=max_images,
        oversize=oversize,  # pyright: ignore[reportArgumentType]
        seed=shuffle,
        rows_multiple=rows_multiple,
        images=images,  # pyright: ignore[reportArgumentType]
        shard_rows=shard_rows,
    )
    inputs = open_inputs(
        dataset,
        processor=processor,
        split=split,
        num=num,
        seed=seed,
        max_length=max_length,
        overlength=overlength,
        train_on=train_on,
        on_bad=on_bad,
        max_bad_fraction=max_bad_fraction,
        slots=SlotRule(multiple=pad_seq_to_mult, max_segments=max_segments),
    )
    with told(Console(stderr=True)) as progress:
        manifest = write_rows(
            inputs.dataset,
            out,
            inputs.collator,
            settings,
            workers=workers,
            executor="ray" if ray else "local",
            cache=cache,
            progress=progress,
        )
    print_store(out, manifest, Console())
