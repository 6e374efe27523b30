"""`vlmpack analyze`: how long samples are, what packing saves, and which recipe keeps the samples of an update."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlmpack.cli.inputs import (
    CacheOption,
    DatasetArgument,
    MaxLengthOption,
    MaxPixelsOption,
    NumOption,
    OverlengthOption,
    ProcessorOption,
    SeedOption,
    SplitOption,
    WorkersOption,
)
from vlmpack.cli.need import need
from vlmpack.errors import ConfigError

if TYPE_CHECKING:
    from vlmpack.cli.analyze_run import Analysis
    from vlmpack.plan import PaddedRecipe


def analyze(
    dataset: DatasetArgument,
    processor: ProcessorOption,
    capacity: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of a row, once or more; by default 12000, 16000 and 20000.")
    ] = None,
    world_size: Annotated[int, typer.Option(min=1, help="Ranks.")] = 1,
    per_device_batch: Annotated[int, typer.Option(min=1, help="Samples of a padded batch, on each rank.")] = 8,
    accumulation: Annotated[int | None, typer.Option(min=1, help="Padded batches that are added up.")] = None,
    samples_per_update: Annotated[
        int | None, typer.Option(min=1, help="Samples that an update sees, instead of --accumulation.")
    ] = None,
    rows_per_device: Annotated[int, typer.Option(min=1, help="Packed rows of a batch, on each rank.")] = 1,
    strategy: Annotated[str, typer.Option(help="How samples are placed: exact_fill, rolling_fill, ...")] = "exact_fill",
    max_patches: Annotated[int | None, typer.Option(min=1, help="Most vision patches in a row.")] = None,
    max_images: Annotated[int | None, typer.Option(min=1, help="Most images and videos in a row.")] = None,
    split: SplitOption = "train",
    num: NumOption = None,
    seed: SeedOption = 0,
    max_length: MaxLengthOption = None,
    overlength: OverlengthOption = "error",
    max_pixels: MaxPixelsOption = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Count ceil(H/32) x ceil(W/32) tokens an image: no resize rule is used.")
    ] = False,
    workers: WorkersOption = 0,
    cache: CacheOption = None,
    out: Annotated[Path | None, typer.Option(help="Folder for a PNG of the histograms, and all numbers.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure how long samples are, and simulate packing them: what it saves, and the gradient accumulation to set.

    Images are measured by their headers; no pixel is decoded, no model is read. The padded recipe (ranks, batch,
    accumulation) is the one you would train with otherwise: the packed one keeps its samples per update.

    The exit status is 1 if no sample can be used, 2 if it cannot be run as asked, 0 otherwise.
    """
    if out is not None:
        need("analyze --out", "matplotlib", extra="plots")
    recipe = _recipe(world_size, per_device_batch, accumulation, samples_per_update)

    from rich.console import Console

    from vlmpack.cli.analyze_run import Analysis
    from vlmpack.cli.analyze_table import print_analysis
    from vlmpack.cli.folder import made_folder
    from vlmpack.cli.inputs import measured, open_inputs
    from vlmpack.plan import CAPACITIES

    console = Console(quiet=as_json)
    inputs = open_inputs(
        dataset,
        processor=processor,
        split=split,
        num=num,
        seed=seed,
        max_length=max_length,
        overlength=overlength,
        max_pixels=max_pixels,
    )
    if out is not None:
        made_folder("--out", out)
    analysis = Analysis.of(
        measured(inputs, console, workers=workers, cache=cache, estimate=estimate),
        capacity or CAPACITIES,
        source=dataset,
        recipe=recipe,
        is_estimate=estimate,
        rows_per_device=rows_per_device,
        strategy=strategy,
        max_patches=max_patches,
        max_images=max_images,
    )
    print_analysis(analysis, console)
    if out is not None:
        for path in _save(analysis, out):
            console.print(f"written: {path}", highlight=False, markup=False)
    if as_json:
        typer.echo(json.dumps(analysis.to_dict(), indent=2))
    raise typer.Exit(0 if len(analysis.table) else 1)


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
