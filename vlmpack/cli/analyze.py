"""`vlmpack analyze`: measure lengths, simulate packing, and compute the recipe that keeps the samples of an update."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, final

import typer
from rich.columns import Columns
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from vlmpack.cli import options
from vlmpack.cli.inputs import InputOptions, measure, open_inputs
from vlmpack.cli.mixing import MixOptions, mix_lines, mix_numbers
from vlmpack.cli.prefix_savings import PrefixSavings, print_savings
from vlmpack.errors import ConfigError, check_extra
from vlmpack.files import write_text
from vlmpack.terminal import make_table, number_columns, print_table, print_text, sample_name

if TYPE_CHECKING:
    import numpy as np

    from vlmpack.plan.length_table import LengthTable, Summary
    from vlmpack.plan.simulation import PaddedRecipe, Padding, Simulation

HISTOGRAMS = ("tokens", "text", "image", "video")
"""Columns that are drawn as histograms."""
LISTED = 5
"""Refused samples that are printed with their details."""
BAR = 20
"""Characters of the longest bar of a histogram."""
EIGHTHS = " ▏▎▍▌▋▊▉█"
SamplesPerUpdate = Annotated[
    int | None, typer.Option(min=1, help="Samples that an update sees, instead of --accumulation.")
]
MIN_SHARED = 64
"""Tokens of the shortest prefix that counts as shared, where none are given."""
MinShared = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Find samples that begin alike with so many tokens, by the bytes of images; 0: do not. By default "
        f"{MIN_SHARED}, where images have grids.",
    ),
]
Estimate = Annotated[
    bool, typer.Option("--estimate", help="Count ceil(H/32) x ceil(W/32) tokens an image: no resize rule is used.")
]


def analyze(
    dataset: options.Dataset,
    processor: options.Processor,
    capacity: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of a row, once or more; by default 12000, 16000 and 20000.")
    ] = None,
    world_size: Annotated[int, typer.Option(min=1, help="Ranks.")] = 1,
    per_device_batch: Annotated[int, typer.Option(min=1, help="Samples of a padded batch, on each rank.")] = 8,
    accumulation: Annotated[int | None, typer.Option(min=1, help="Padded batches that are added up.")] = None,
    samples_per_update: SamplesPerUpdate = None,
    rows_per_device: Annotated[int, typer.Option(min=1, help="Packed rows of a batch, on each rank.")] = 1,
    strategy: options.Strategy = "exact_fill",
    max_patches: options.MaxPatches = None,
    max_images: options.MaxImages = None,
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
    min_shared: MinShared = None,
    estimate: Estimate = False,
    workers: options.Workers = 0,
    cache: options.Cache = None,
    out: Annotated[Path | None, typer.Option(help="Folder for a PNG of the histograms, and all numbers.")] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure how long samples are, and simulate packing them: what it saves, and the gradient accumulation to set.

    Images are measured by their headers; no pixel is decoded, no model is read. The padded recipe (ranks, batch,
    accumulation) is the one you would train with otherwise: the packed one keeps its samples per update. Where samples
    begin alike, it says what computing each shared prefix once would save (VLMCollator(share_prefixes=True)).

    The exit status is 1 if no sample can be used, 2 for a refusal, 0 otherwise.
    """
    if out is not None:
        check_extra("plots", "matplotlib", needed_by="`vlmpack analyze --out`")

    from vlmpack.plan.simulation import CAPACITIES
    from vlmpack.store.content import why_no_marks

    packing = Packing(
        capacities=tuple(capacity or CAPACITIES), rows_per_device=rows_per_device, strategy=strategy,
        recipe=_recipe(world_size, per_device_batch, accumulation, samples_per_update),
        max_patches=max_patches, max_images=max_images,
    )  # fmt: skip
    source = InputOptions(
        dataset=dataset, processor=processor, split=split, num=num, seed=seed, max_length=max_length,
        overlength=overlength, max_pixels=max_pixels, image_root=image_root, branches=branches, columns=columns or (),
        mix=MixOptions.of(mix, stopping_strategy, epoch), add_stop=add_stop, ignored_keys=ignored_keys or (),
    )  # fmt: skip
    inputs = open_inputs(source, train_on=train_on)
    if out is not None:
        options.make_folder("--out", out)
    console = Console(quiet=as_json)
    without = None if min_shared is not None else why_no_marks(inputs.collator)
    least = None if without or min_shared == 0 else min_shared or MIN_SHARED
    table = measure(inputs, quiet=quiet, workers=workers, cache=cache, estimate=estimate, min_shared=least)
    analysis = Analysis(
        source=source.title, table=table, packing=packing, is_estimate=estimate, min_shared=least,
        mix=mix_numbers(inputs.dataset),
    )  # fmt: skip
    print_analysis(analysis, console)
    if without:
        console.print()
        print_text(console, Text(f"Shared prefixes were not looked for: {without}."))
    for path in _save(analysis, out) if out is not None else ():
        console.print(f"written: {path}", highlight=False, markup=False)
    if as_json:
        typer.echo(json.dumps(analysis.to_dict(), indent=2))
    raise typer.Exit(0 if len(table) else 1)


def _recipe(
    world_size: int, per_device_batch: int, accumulation: int | None, samples_per_update: int | None
) -> PaddedRecipe:
    from vlmpack.plan.simulation import PaddedRecipe

    if samples_per_update is None:
        return PaddedRecipe(world_size=world_size, per_device_batch=per_device_batch, accumulation=accumulation or 1)
    if accumulation is not None:
        raise ConfigError("--samples-per-update determines --accumulation; give one of them")
    return PaddedRecipe.reaching(samples_per_update, world_size=world_size, per_device_batch=per_device_batch)


def _save(analysis: Analysis, folder: Path) -> list[Path]:
    """Write the numbers, and the picture if there are samples."""
    numbers = folder / "analysis.json"
    write_text(numbers, json.dumps(analysis.to_dict(), indent=2) + "\n")
    if not len(analysis.table):
        return [numbers]
    from vlmpack.plots.figures import plot_lengths, save

    figure = plot_lengths(analysis.histograms, capacities=analysis.packing.capacities, title=analysis.source)
    return [numbers, save(figure, folder / "lengths.png")]


# ---------------------------------------------------------------------- numbers


@final
@dataclass(frozen=True, kw_only=True)
class Packing:
    """Settings of simulated packing. Wrong ones are refused here, before a sample is measured."""

    recipe: PaddedRecipe
    """Training without packing: its samples per update are kept."""
    capacities: tuple[int, ...]
    """Of rows, in tokens; each is simulated."""
    rows_per_device: int = 1
    """Rows of a batch, on each rank."""
    strategy: str = "exact_fill"
    """Placement of samples, see `plan_bins`."""
    max_patches: int | None = None
    """Most patches of the vision tower in a row; None: no limit."""
    max_images: int | None = None
    """Most images and videos in a row; None: no limit."""

    def __post_init__(self) -> None:
        import numpy as np

        from vlmpack.plan.length_table import LengthTable

        ones, zero = np.ones(1, np.int64), np.zeros(1, np.int64)
        columns = dict.fromkeys(("image_tokens", "video_tokens", "images", "videos", "patches", "targets"), zero)
        self.simulate(LengthTable(sample_ids=zero, text_tokens=ones, **columns))

    def simulate(self, table: LengthTable, *, share_prefixes: bool = False) -> tuple[Simulation, ...]:
        """Pack the table into rows of every capacity; a table without samples into none.

        Args:
            table: the samples.
            share_prefixes: prefixes are computed once a row, by the groups of the table.

        Raises:
            ConfigError: a setting is unknown, below 1, or contradicts another.
        """
        from vlmpack.plan.simulation import simulate

        run = partial(
            simulate, table, recipe=self.recipe, rows_per_device=self.rows_per_device, strategy=self.strategy,
            max_patches=self.max_patches, max_images=self.max_images, share_prefixes=share_prefixes,
        )  # fmt: skip
        return tuple(map(run, self.capacities)) if len(table) else ()


@final
@dataclass(frozen=True, kw_only=True)
class Analysis:
    """The result of `vlmpack analyze`."""

    source: str
    """The data set."""
    table: LengthTable
    """Its samples."""
    packing: Packing
    """Settings of the simulations."""
    is_estimate: bool = False
    """Image tokens are estimated by the image's size alone."""
    min_shared: int | None = None
    """Tokens of the shortest prefix that counts as shared; None: shared prefixes were not looked for."""
    mix: dict[str, Any] | None = None
    """Counts of each data set of a mix; None: there is one data set."""

    @cached_property
    def simulations(self) -> tuple[Simulation, ...]:
        """The table packed, once for each capacity."""
        return self.packing.simulate(self.table)

    @cached_property
    def savings(self) -> PrefixSavings | None:
        """Savings by shared prefixes; None: they were not looked for, or there are no samples."""
        groups = self.table.groups
        if groups is None or self.min_shared is None or not len(self.table):
            return None
        shared = self.packing.simulate(self.table, share_prefixes=True) if len(groups) else ()
        return PrefixSavings(min_shared=self.min_shared, groups=groups, plain=self.simulations, shared=shared)

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """int64 [N] each: tokens, and every other column that is not zero throughout."""
        table = self.table
        columns = {
            "tokens": table.tokens,
            "text": table.text_tokens,
            "image": table.image_tokens,
            "video": table.video_tokens,
            "targets": table.targets,
            "patches": table.patches,
        }
        return {name: values for name, values in columns.items() if name == "tokens" or values.any()}

    @property
    def histograms(self) -> dict[str, np.ndarray]:
        """The columns for histograms."""
        return {name: values for name, values in self.columns.items() if name in HISTOGRAMS}

    @property
    def summaries(self) -> dict[str, Summary]:
        """Mean, percentiles and total of each column."""
        from vlmpack.plan.length_table import summary

        return {name: summary(values) for name, values in self.columns.items()}

    @property
    def paddings(self) -> dict[str, Padding]:
        """Batches of neighbouring samples, padded to the longest of the batch, or of all samples."""
        recipe, tokens = self.packing.recipe, self.table.tokens
        return {"to_longest": recipe.padding(tokens), "to_max": recipe.padding(tokens, to="max")}

    def to_dict(self) -> dict[str, Any]:
        """Return every number, for JSON."""
        table, recipe = self.table, self.packing.recipe
        return {
            "source": self.source,
            "mix": self.mix,
            "samples": len(table),
            "refused": {
                "samples": len(table.refused),
                "reasons": table.reasons,
                "listed": [asdict(refused) for refused in table.refused],
            },
            "images": int(table.images.sum()),
            "videos": int(table.videos.sum()),
            "estimate": self.is_estimate,
            "columns": {name: asdict(summary) for name, summary in self.summaries.items()},
            "padded": {
                **asdict(recipe),
                "samples_per_update": recipe.samples_per_update,
                "updates": recipe.updates(len(table)),
                **{name: {**asdict(padding), "waste": padding.waste} for name, padding in self.paddings.items()},
            },
            "packed": [{**each.to_dict(), "explained": each.explain()} for each in self.simulations],
            "shared_prefixes": None if self.savings is None else self.savings.to_dict(),
        }


# ---------------------------------------------------------------------- tables


def print_analysis(analysis: Analysis, console: Console) -> None:
    """Print tables, histograms and recipes."""
    console.print(_head(analysis), soft_wrap=not console.is_terminal)
    for line in mix_lines(analysis.mix):
        print_text(console, Text(line), indent=2)
    _print_refused(analysis.table, console)
    if not len(analysis.table):
        return
    print_table(console, _summaries(analysis))
    ascii_only = console.options.ascii_only
    bars = (histogram_bars(name, values, ascii_only=ascii_only) for name, values in analysis.histograms.items())
    console.print(Columns(bars, padding=(0, 4)))
    print_table(console, _layouts(analysis))
    for simulation in analysis.simulations:
        console.print(f"[bold]Rows of {simulation.capacity:,} tokens[/]", highlight=False)
        for sentence in simulation.explain():
            print_text(console, Text(sentence), indent=2)
    if analysis.savings is not None:
        print_savings(analysis.savings, console)


def histogram_bars(name: str, values: np.ndarray, *, ascii_only: bool = False) -> Group:
    """Draw a histogram: one line a bin, the longest bar `BAR` characters long.

    Args:
        name: printed above.
        values: int64 [N].
        ascii_only: draw with "#", for a terminal without block characters.
    """
    from vlmpack.plan.length_table import histogram

    bins = histogram(values)
    most = max((each.count for each in bins), default=0)
    digits = len(f"{bins[-1].start:,}") if bins else 0
    lines = [Text(name, style="bold")]
    for each in bins:
        line = Text(f"{each.start:>{digits},}{' ' if each.stop else '+'} ", no_wrap=True)
        line.append(f"{_bar(each.count / most, ascii_only=ascii_only):<{BAR}}", style="cyan")
        lines.append(line.append(f" {each.count:,}"))
    return Group(*lines, Text())


def _bar(part: float, *, ascii_only: bool) -> str:
    """Draw 0 to 1 in blocks; a part above 0 has an eighth of a block at least."""
    eighths = max(round(part * BAR * 8), 1 if part else 0)
    if ascii_only:
        return "#" * -(-eighths // 8)
    return EIGHTHS[8] * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def _head(analysis: Analysis) -> str:
    table = analysis.table
    media = {"images": table.images.sum(), "videos": table.videos.sum()}
    counts = [f"{len(table):,} samples", f"{table.tokens.sum():,} tokens"]
    counts += [f"{count:,} {name}" for name, count in media.items() if count]
    estimate = " [yellow](image tokens are estimated)[/]" if analysis.is_estimate else ""
    return f"[bold]{escape(analysis.source)}[/]: {', '.join(counts)}{estimate}\n"


def _print_refused(table: LengthTable, console: Console) -> None:
    if not table.refused:
        return
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in table.reasons.items())
    count = f"{len(table.refused):,} of {table.measured:,}"
    console.print(f"[yellow]{count} samples cannot be used[/]: {escape(reasons)}", highlight=False)
    for each in table.refused[:LISTED]:
        line = f"{sample_name(each.index, each.sample_id)}: {each.reason}: {each.detail}"
        print_text(console, Text(line), indent=2)
    more = len(table.refused) - LISTED
    console.print(f"  and {more:,} more (--out writes them all)\n" if more > 0 else "", highlight=False)


def _summaries(analysis: Analysis) -> Table:
    table = make_table("a sample", *number_columns("mean", "median", "p95", "p99", "max", "in all"))
    for name, of in analysis.summaries.items():
        table.add_row(name, *(f"{n:,.0f}" for n in (of.mean, of.median, of.p95, of.p99, of.max, of.total)))
    return table


def _layouts(analysis: Analysis) -> Table:
    """Make the table of padded and packed; rows are counted as if they were filled up to their capacity."""
    recipe, samples = analysis.packing.recipe, len(analysis.table)
    titles = ("rows", "padding", "samples\na row", "accumu-\nlation", "samples\nan update", "updates\nan epoch")
    table = make_table("", *number_columns(*titles, "too\nlong"))
    padded = f"{recipe.accumulation:,}", f"{recipe.samples_per_update:,}", f"{recipe.updates(samples):,}"
    for name, padding in zip(("padded to batch", "padded to max"), analysis.paddings.values(), strict=True):
        table.add_row(name, f"{samples:,}", f"{padding.waste:.1%}", "1", *padded, "0")
    table.add_section()
    for packed in analysis.simulations:
        table.add_row(
            f"packed, {packed.capacity:,}",
            f"{packed.rows:,}",
            f"{1 - packed.fill:.1%}" if packed.rows else "",
            f"{packed.samples_per_row:.2f}",
            f"{packed.accumulation:,}",
            f"{packed.samples_per_update:,.1f}",
            f"{packed.updates:,}",
            f"{len(packed.oversize):,}",
        )
    return table
