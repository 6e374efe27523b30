"""`vlmpack analyze`: how long samples are, what packing saves, and which recipe keeps the samples of an update."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlmpack.cli.need import need
from vlmpack.cli.options import (
    CacheOption,
    DatasetArgument,
    ImageRootOption,
    ImagesOption,
    JsonOption,
    MaxLengthOption,
    MaxPixelsOption,
    NumOption,
    OverlengthOption,
    PatchesOption,
    ProcessorOption,
    SeedOption,
    SplitOption,
    WorkersOption,
)
from vlmpack.errors import ConfigError

if TYPE_CHECKING:
    from vlmpack.cli.analyze_run import Analysis
    from vlmpack.plan import PaddedRecipe

CapacitiesOption = Annotated[
    list[int] | None, typer.Option(min=1, help="Tokens of a row, once or more; by default 12000, 16000 and 20000.")
]
RanksOption = Annotated[int, typer.Option(min=1, help="Ranks.")]
BatchOption = Annotated[int, typer.Option(min=1, help="Samples of a padded batch, on each rank.")]
AccumulationOption = Annotated[int | None, typer.Option(min=1, help="Padded batches that are added up.")]
UpdateOption = Annotated[
    int | None, typer.Option(min=1, help="Samples that an update sees, instead of --accumulation.")
]
RowsOption = Annotated[int, typer.Option(min=1, help="Packed rows of a batch, on each rank.")]
StrategyOption = Annotated[str, typer.Option(help="How samples are placed: exact_fill, rolling_fill, ...")]
EstimateOption = Annotated[
    bool, typer.Option("--estimate", help="Count ceil(H/32) x ceil(W/32) tokens an image: no resize rule is used.")
]
OutOption = Annotated[Path | None, typer.Option(help="Folder for a PNG of the histograms, and all numbers.")]


def analyze(
    dataset: DatasetArgument,
    processor: ProcessorOption,
    capacity: CapacitiesOption = None,
    world_size: RanksOption = 1,
    per_device_batch: BatchOption = 8,
    accumulation: AccumulationOption = None,
    samples_per_update: UpdateOption = None,
    rows_per_device: RowsOption = 1,
    strategy: StrategyOption = "exact_fill",
    max_patches: PatchesOption = None,
    max_images: ImagesOption = None,
    split: SplitOption = "train",
    num: NumOption = None,
    image_root: ImageRootOption = None,
    seed: SeedOption = 0,
    max_length: MaxLengthOption = None,
    overlength: OverlengthOption = "error",
    max_pixels: MaxPixelsOption = None,
    estimate: EstimateOption = False,
    workers: WorkersOption = 0,
    cache: CacheOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how long samples are, and simulate packing them: what it saves, and the gradient accumulation to set.

    Images are measured by their headers; no pixel is decoded, no model is read. The padded recipe (ranks, batch,
    accumulation) is the one you would train with otherwise: the packed one keeps its samples per update.

    The exit status is 1 if no sample can be used, 2 if it cannot be run as asked, 0 otherwise.
    """
    if out is not None:
        need("analyze --out", "matplotlib", extra="plots")

    from rich.console import Console

    from vlmpack.cli.analyze_run import Analysis, PackingTrial
    from vlmpack.cli.analyze_table import print_analysis
    from vlmpack.cli.folder import made_folder
    from vlmpack.cli.inputs import InputOptions, measured, open_inputs

    packing = PackingTrial(
        capacities=tuple(capacity or PackingTrial.capacities), rows_per_device=rows_per_device, strategy=strategy,
        recipe=_recipe(world_size, per_device_batch, accumulation, samples_per_update),
        max_patches=max_patches, max_images=max_images,
    )  # fmt: skip
    inputs = open_inputs(InputOptions(
        dataset=dataset, processor=processor, split=split, num=num, seed=seed, max_length=max_length,
        overlength=overlength, max_pixels=max_pixels, image_root=image_root,
    ))  # fmt: skip
    if out is not None:
        made_folder("--out", out)
    console = Console(quiet=as_json)
    table = measured(inputs, console, workers=workers, cache=cache, estimate=estimate)
    analysis = Analysis.of(table, packing, source=dataset, is_estimate=estimate)
    print_analysis(analysis, console)
    for path in _save(analysis, out) if out is not None else ():
        console.print(f"written: {path}", highlight=False, markup=False)
    if as_json:
        typer.echo(json.dumps(analysis.to_dict(), indent=2))
    raise typer.Exit(0 if len(table) else 1)


def _recipe(
    world_size: int, per_device_batch: int, accumulation: int | None, samples_per_update: int | None
) -> PaddedRecipe:
    from vlmpack.plan import PaddedRecipe

    if samples_per_update is None:
        return PaddedRecipe(world_size=world_size, per_device_batch=per_device_batch, accumulation=accumulation or 1)
    if accumulation is not None:
        raise ConfigError("--samples-per-update says what --accumulation comes to; give one of them")
    return PaddedRecipe.reaching(samples_per_update, world_size=world_size, per_device_batch=per_device_batch)


def _save(analysis: Analysis, folder: Path) -> list[Path]:
    """Write the numbers, and the picture where there are samples."""
    numbers = folder / "analysis.json"
    numbers.write_text(json.dumps(analysis.to_dict(), indent=2) + "\n", encoding="utf-8")
    if not len(analysis.table):
        return [numbers]
    from vlmpack.plots import plot_lengths, save

    capacities = [one.capacity for one in analysis.simulations]
    figure = plot_lengths(analysis.drawn, capacities=capacities, title=analysis.source)
    return [numbers, save(figure, folder / "lengths.png")]
