"""`vlmpack show`: a packed row as a ribbon in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from vlmpack.cli.options import (
    PROCESSOR_HELP,
    CacheOption,
    ImageRootOption,
    MaxLengthOption,
    MaxPixelsOption,
    NumOption,
    OverlengthOption,
    SeedOption,
    SplitOption,
    WorkersOption,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from vlmpack.cli.show_rows import ShownRows


def show(
    source: Annotated[str, typer.Argument(help="A data set, as for analyze; or a folder written by `vlmpack pack`.")],
    row: Annotated[
        list[int] | None, typer.Option(help="Which row, once or more; -1 is the last one; by default the first.")
    ] = None,
    processor: Annotated[str | None, typer.Option(help=f"{PROCESSOR_HELP} A data set needs one.")] = None,
    capacity: Annotated[int, typer.Option(min=1, help="Tokens of a row; of a packed folder its own.")] = 12_000,
    tokens_per_cell: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a character; by default as few as eight lines allow.")
    ] = None,
    split: SplitOption = "train",
    num: NumOption = None,
    image_root: ImageRootOption = None,
    seed: SeedOption = 0,
    max_length: MaxLengthOption = None,
    overlength: OverlengthOption = "error",
    max_pixels: MaxPixelsOption = None,
    workers: WorkersOption = 0,
    cache: CacheOption = None,
) -> None:
    """Draw packed rows: which samples share a row, where their images are, and what is padding.

    A data set is planned first, from image headers; no pixel is decoded.
    """
    from rich.console import Console

    from vlmpack.cli.inputs import InputOptions, check_finished, is_store
    from vlmpack.cli.show_rows import checked_processor, planned, stored

    console, asked = Console(), row or [0]
    if is_store(source):
        rows = stored(source)
    else:
        check_finished(source)
        options = InputOptions(
            dataset=source, processor=checked_processor(source, processor), split=split, num=num, seed=seed,
            max_length=max_length, overlength=overlength, max_pixels=max_pixels, image_root=image_root,
        )  # fmt: skip
        rows = planned(options, console, asked=asked, capacity=capacity, workers=workers, cache=cache)
    print_rows(rows, asked, console, tokens_per_cell=tokens_per_cell)


def print_rows(rows: ShownRows, asked: Sequence[int], console: Console, *, tokens_per_cell: int | None = None) -> None:
    """The source in one line, then each row that was asked for.

    Raises:
        ConfigError: there is no such row.
    """
    from vlmpack.cli.show_ribbon import draw, make_ribbon

    shown = [rows.row(at) for at in asked]
    console.print(rows.told, highlight=False, markup=False, soft_wrap=not console.is_terminal)
    for one in shown:
        ribbon = make_ribbon(
            one.segments, one.types, one.sample_ids, width=console.width, tokens_per_cell=tokens_per_cell
        )
        console.print(f"\n[bold]{one.told}[/]", highlight=False)
        console.print(draw(ribbon, width=console.width))
