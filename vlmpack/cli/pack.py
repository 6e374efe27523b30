"""`vlmpack pack`: a data set, planned and written down as packed rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlmpack.cli.need import need
from vlmpack.cli.options import (
    CacheOption,
    DatasetArgument,
    ImageRootOption,
    ImagesOption,
    MaxLengthOption,
    NumOption,
    OverlengthOption,
    PatchesOption,
    ProcessorOption,
    SeedOption,
    SplitOption,
    WorkersOption,
    one_of,
)

TRAIN_ON = ("assistant", "all")
ON_BAD = ("raise", "skip")
OVERSIZE = ("error", "drop", "own_row")
IMAGES = ("bytes", "reference")

OutArgument = Annotated[Path, typer.Argument(help="Folder for the rows; one that was interrupted is continued.")]
CapacityOption = Annotated[int, typer.Option(min=1, help="Tokens of a row.")]
TrainOnOption = Annotated[
    str, typer.Option(callback=one_of(*TRAIN_ON), help="What is learnt: assistant (its turns) or all.")
]
OnBadOption = Annotated[
    str, typer.Option(callback=one_of(*ON_BAD), help="A bad sample: raise (stop) or skip (leave out, and list).")
]
BadFractionOption = Annotated[
    float | None, typer.Option(min=0, max=1, help="Most samples that may be left out as bad; by default 0.01.")
]
OversizeOption = Annotated[
    str,
    typer.Option(
        callback=one_of(*OVERSIZE), help="A sample that exceeds a row by itself: error, drop (and list) or own_row."
    ),
]
SegmentsOption = Annotated[int | None, typer.Option(min=1, help="Most samples in a row.")]
MultipleOption = Annotated[
    int, typer.Option(min=1, help="Each sample takes up a multiple of this: 2 x CP under context parallelism.")
]
RowsOption = Annotated[
    int, typer.Option(min=1, help="Make the number of rows a multiple of this: ranks x accumulation.")
]
ShuffleOption = Annotated[int | None, typer.Option(min=0, help="Seed that shuffles samples and rows.")]
KeepOption = Annotated[
    str, typer.Option(callback=one_of(*IMAGES), help="Keep images as bytes, or as reference (path and SHA-256).")
]
ShardOption = Annotated[int, typer.Option(min=1, help="Rows of a file.")]
RayOption = Annotated[bool, typer.Option("--ray", help="Measure and write as tasks of Ray instead of --workers.")]


def pack(
    dataset: DatasetArgument,
    out: OutArgument,
    processor: ProcessorOption,
    capacity: CapacityOption,
    split: SplitOption = "train",
    num: NumOption = None,
    image_root: ImageRootOption = None,
    seed: SeedOption = 0,
    max_length: MaxLengthOption = None,
    overlength: OverlengthOption = "error",
    train_on: TrainOnOption = "assistant",
    on_bad: OnBadOption = "raise",
    max_bad_fraction: BadFractionOption = None,
    oversize: OversizeOption = "error",
    max_patches: PatchesOption = None,
    max_images: ImagesOption = None,
    max_segments: SegmentsOption = None,
    pad_seq_to_mult: MultipleOption = 1,
    rows_multiple: RowsOption = 1,
    shuffle: ShuffleOption = None,
    images: KeepOption = "bytes",
    shard_rows: ShardOption = 128,
    workers: WorkersOption = 0,
    ray: RayOption = False,
    cache: CacheOption = None,
) -> None:
    """Plan which samples share a row, and write the rows down: token ids, what is learnt, and images still encoded.

    Killed or stopped, run it again: it goes on where it was, and ends with the same files. Train on them with
    vlmpack.store.PackedDataset(OUT, processor).
    """
    need("pack", "pyarrow", extra="data")
    if ray:
        need("pack --ray", "ray", extra="ray")

    from rich.console import Console

    from vlmpack.cli.inputs import InputOptions, open_inputs
    from vlmpack.cli.pack_table import print_store, told
    from vlmpack.collate import SkipLimit
    from vlmpack.layout import SlotRule
    from vlmpack.store import StoreSettings, write_rows

    settings = StoreSettings(
        capacity=capacity, max_patches=max_patches, max_images=max_images, seed=shuffle, rows_multiple=rows_multiple,
        oversize=oversize,  # pyright: ignore[reportArgumentType]
        images=images,  # pyright: ignore[reportArgumentType]
        shard_rows=shard_rows,
    )  # fmt: skip
    options = InputOptions(
        dataset=dataset, processor=processor, split=split, num=num, seed=seed, max_length=max_length,
        overlength=overlength, image_root=image_root,
    )  # fmt: skip
    slots = SlotRule(multiple=pad_seq_to_mult, max_segments=max_segments)
    skip_limit = None if max_bad_fraction is None else SkipLimit(max_bad_fraction=max_bad_fraction)
    inputs = open_inputs(options, train_on=train_on, on_bad=on_bad, skip_limit=skip_limit, slots=slots)
    with told(Console(stderr=True)) as progress:
        manifest = write_rows(
            inputs.dataset, out, inputs.collator, settings, workers=workers, executor="ray" if ray else "local",
            cache=cache, progress=progress,
        )  # fmt: skip
    print_store(out, manifest, Console())
