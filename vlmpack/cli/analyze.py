"""`vlmpack analyze`: measure lengths, simulate packing, and compute the recipe that keeps the samples of an update."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, final

import typer
from rich.columns import Columns
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from vlmpack.cli import options
from vlmpack.cli.inputs import Inputs, measure, mix_lines, mix_numbers, open_inputs
from vlmpack.cli.options import DataOptions, of_rows
from vlmpack.cli.pack import print_store, store_numbers
from vlmpack.errors import ConfigError, check_extra
from vlmpack.files import write_text
from vlmpack.terminal import make_table, number_columns, print_table, print_text, sample_name, text_column

if TYPE_CHECKING:
    import numpy as np

    from vlmpack.collate.encoded import Encoded
    from vlmpack.layout.prefix_tree import PrefixTree
    from vlmpack.plan.length_table import LengthTable, Summary
    from vlmpack.plan.simulation import PaddedRecipe, Padding, Simulation

HISTOGRAMS = ("tokens", "text", "image", "video")
"""Columns that are drawn as histograms."""
LISTED = 5
"""Refused samples that are printed with their details."""
BAR = 20
"""Characters of the longest bar of a histogram."""
EIGHTHS = " ▏▎▍▌▋▊▉█"
MIN_SHARED = 64
"""Tokens of the shortest shared prefix, unless --min-shared is given."""
UNITS = ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"))
"""Of large counts, so that tables fit 80 columns."""


@options.with_options(DataOptions)
def analyze(
    data: DataOptions,
    capacity: Annotated[
        list[int] | None,
        of_rows(min=1, metavar="N", help="Tokens of a row; by default 12000, 16000 and 20000. Repeatable."),
    ] = None,
    rows: Annotated[
        int, of_rows(min=0, metavar="N", help="Print the first N rows, sample by sample; of the first capacity.")
    ] = 0,
    world_size: Annotated[int, of_rows(min=1, help="Ranks.")] = 1,
    per_device_batch: Annotated[int, of_rows(min=1, help="Samples of a padded batch, on each rank.")] = 8,
    samples_per_update: Annotated[
        int | None,
        of_rows(min=1, metavar="N", help="Samples of an update that packing has to keep; by default a batch."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for a picture of the histograms, and all numbers.")] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Report how long samples are and what packing them saves; print rows with --rows.

    Images are measured by their headers: no pixel is decoded, and no model is read. DATASET may be a folder written by
    `vlmpack pack`, too. The exit status is 1 if no sample can be used.
    """
    if out is not None:
        check_extra("plots", "matplotlib", needed_by="`vlmpack analyze --out`")

    from vlmpack.lengths import why_no_marks
    from vlmpack.plan.simulation import CAPACITIES, PaddedRecipe
    from vlmpack.rows import is_packed

    console = Console(quiet=as_json)
    if is_packed(Path(data.dataset).expanduser()):
        _analyze_store(data, rows, console, as_json=as_json)
        return
    recipe = PaddedRecipe(world_size=world_size, per_device_batch=per_device_batch)
    if samples_per_update is not None:
        recipe = PaddedRecipe.reaching(samples_per_update, world_size=world_size, per_device_batch=per_device_batch)
    inputs = open_inputs(data)
    if out is not None:
        options.make_folder("--out", out)
    without = why_no_marks(inputs.collator) if data.min_shared is None else None
    min_shared = None if without or data.min_shared == 0 else data.min_shared or MIN_SHARED
    table = measure(inputs, data, quiet=quiet, min_shared=min_shared)
    analysis = Analysis(
        source=data.title, table=table, recipe=recipe, capacities=tuple(capacity or CAPACITIES), strategy=data.strategy,
        max_patches=data.max_patches, min_shared=min_shared, mix=mix_numbers(inputs.dataset),
    )  # fmt: skip
    drawn = _planned_rows(inputs, analysis, rows, min_shared=data.min_shared)
    print_analysis(analysis, console)
    if without:
        console.print()
        print_text(console, Text(f"Shared prefixes were not looked for: {without}."))
    print_rows(drawn, console)
    numbers = {**analysis.to_dict(), "rows": drawn}
    for path in _save(analysis, numbers, out) if out is not None else ():
        console.print(f"written: {path}", highlight=False, markup=False)
    if as_json:
        typer.echo(json.dumps(numbers, indent=2))
    raise typer.Exit(0 if len(table) else 1)


def _save(analysis: Analysis, numbers: dict[str, Any], folder: Path) -> list[Path]:
    """Write the numbers, and the picture if there are samples."""
    file = folder / "analysis.json"
    write_text(file, json.dumps(numbers, indent=2) + "\n")
    if not len(analysis.table):
        return [file]
    from vlmpack.plots import plot_lengths, save

    figure = plot_lengths(analysis.histograms, capacities=analysis.capacities, title=analysis.source)
    return [file, save(figure, folder / "lengths.png")]


# ---------------------------------------------------------------------- numbers


@final
@dataclass(frozen=True, kw_only=True)
class Analysis:
    """The result of `vlmpack analyze`."""

    source: str
    """The data set."""
    table: LengthTable
    """Its samples."""
    recipe: PaddedRecipe
    """Training without packing: its samples per update are kept."""
    capacities: tuple[int, ...]
    """Of rows, in tokens; each is simulated."""
    strategy: str = "exact_fill"
    """Placement of samples, see `plan_bins`."""
    max_patches: int | None = None
    """Most patches of the vision tower in a row; None: no limit."""
    min_shared: int | None = None
    """Tokens of the shortest prefix that counts as shared; None: shared prefixes were not looked for."""
    mix: dict[str, Any] | None = None
    """Counts of each data set of a mix; None: there is one data set."""

    @cached_property
    def simulations(self) -> tuple[Simulation, ...]:
        """The table packed, once for each capacity; none without samples."""
        return self._simulated(share_prefixes=False)

    @cached_property
    def shared(self) -> tuple[Simulation, ...]:
        """The same with each shared prefix computed once a row; none where there is nothing to share."""
        return self._simulated(share_prefixes=True) if self.table.groups is not None and len(self.table.groups) else ()

    def _simulated(self, *, share_prefixes: bool) -> tuple[Simulation, ...]:
        from vlmpack.plan.simulation import simulate

        return tuple(
            simulate(
                self.table, capacity, recipe=self.recipe, strategy=self.strategy, max_patches=self.max_patches,
                share_prefixes=share_prefixes,
            )
            for capacity in (self.capacities if len(self.table) else ())
        )  # fmt: skip

    @property
    def sharing_samples(self) -> int:
        """Samples that share a prefix with others."""
        return 0 if self.table.groups is None else int((self.table.groups.of_samples >= 0).sum())

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
        """Batches of neighboring samples, padded to the longest of the batch, or of all samples."""
        tokens = self.table.tokens
        return {"to_longest": self.recipe.padding(tokens), "to_max": self.recipe.padding(tokens, to="max")}

    def to_dict(self) -> dict[str, Any]:
        """Return every number, for JSON."""
        table, recipe = self.table, self.recipe
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
            "columns": {name: asdict(summary) for name, summary in self.summaries.items()},
            "padded": {
                **asdict(recipe),
                "samples_per_update": recipe.samples_per_update,
                "updates": recipe.updates(len(table)),
                **{name: {**asdict(padding), "waste": padding.waste} for name, padding in self.paddings.items()},
            },
            "packed": [{**each.to_dict(), "explained": each.explain()} for each in self.simulations],
            "shared_prefixes": self._shared_numbers(),
        }

    def _shared_numbers(self) -> dict[str, Any] | None:
        if self.min_shared is None or self.table.groups is None or not len(self.table):
            return None
        packed = [
            {
                "capacity": plain.capacity,
                "plain": dict(_counts(plain)),
                "shared": dict(_counts(shared)),
                "saved": {name: share for name, _, _, share in _savings(plain, shared)},
            }
            for plain, shared in zip(self.simulations, self.shared, strict=False)
        ]
        groups = {"groups": len(self.table.groups), "samples": self.sharing_samples}
        return {"min_shared": self.min_shared, **groups, "packed": packed}


def _counts(simulation: Simulation) -> Iterator[tuple[str, int]]:
    """Yield (name, count) of what an epoch computes."""
    yield "rows", simulation.rows
    assert simulation.computed is not None, "simulate counts it"
    yield from asdict(simulation.computed).items()


def _savings(plain: Simulation, shared: Simulation) -> Iterator[tuple[str, int, int, float]]:
    """Yield (name, without sharing, with it, the part that is saved) of everything that is not 0."""
    for (name, before), (_, after) in zip(_counts(plain), _counts(shared), strict=True):
        if before:
            yield name, before, after, 1 - after / before


# ---------------------------------------------------------------------- rows


def _analyze_store(data: DataOptions, rows: int, console: Console, *, as_json: bool) -> None:
    """Print what a folder of packed rows holds.

    Raises:
        ConfigError: the folder is damaged, or options by which rows would be planned are given.
    """
    from vlmpack.rows import PackedDataset

    given = [field.name for field in fields(data)[2:] if getattr(data, field.name) != field.default]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"{data.dataset} is packed already, so {names} would be ignored; leave it out")
    folder = Path(data.dataset).expanduser()
    dataset = PackedDataset(folder)
    shown = range(min(rows, len(dataset)))
    drawn = [row_numbers(row, dataset.measured(row), dataset.tree(row)) for row in shown]
    print_store(folder, dataset.manifest, console)
    print_rows(drawn, console)
    if as_json:
        typer.echo(json.dumps({**store_numbers(folder, dataset.manifest), "rows": drawn}, indent=2))


def _planned_rows(inputs: Inputs, analysis: Analysis, rows: int, *, min_shared: int | None) -> list[dict[str, Any]]:
    """Plan rows as `vlmpack pack` does, and describe the first of them."""
    from vlmpack.lengths import tree_of
    from vlmpack.plan.planner import plan_bins

    table = analysis.table
    if not rows or not len(table):
        return []
    plan = plan_bins(
        table, analysis.capacities[0], strategy=analysis.strategy, oversize="drop",
        budgets=table.budgets(patches=analysis.max_patches), groups=table.groups if min_shared else None,
    )  # fmt: skip
    found = []
    for row, ids in enumerate(plan.bins[:rows]):
        samples = [inputs.collator.measure(inputs.dataset[at], at) for at in ids]
        limits = inputs.collator.limits
        tree = tree_of(samples, limits=limits, min_shared=min_shared) if min_shared else None
        found.append(row_numbers(row, samples, tree))
    return found


def row_numbers(row: int, samples: Sequence[Encoded], tree: PrefixTree | None) -> dict[str, Any]:
    """Describe a row, for JSON: its samples, or the nodes of its tree, each behind its parent.

    Args:
        row: its place in the plan.
        samples: of the row.
        tree: what they share; None: nothing.
    """
    import numpy as np

    names = [str(at if sample.sample_id is None else sample.sample_id) for at, sample in enumerate(samples)]
    is_media = np.concatenate([sample.types != 0 for sample in samples])
    is_target = np.concatenate([sample.labels >= 0 for sample in samples])
    lengths = [sample.num_tokens for sample in samples]
    nodes, depths, paths = lengths, [0] * len(samples), [(at,) for at in range(len(samples))]
    if tree is not None:
        nodes, depths, paths = tree.lengths, tree.depths, [tree.path(leaf) for leaf in tree.leaves]
        is_media, is_target = is_media[tree.source().numpy()], is_target[tree.source().numpy()]

    def title(node: int) -> str:
        having = [name for name, path in zip(names, paths, strict=True) if node in path]
        ends = "".join(f", {name} ends here" for name, path in zip(names, paths, strict=True) if path[-1] == node)
        return having[0] if len(having) == 1 else f"{len(having):,} samples{ends}"

    stops = np.cumsum(nodes)
    parts = [
        {
            "name": title(node),
            "depth": depths[node],
            "tokens": int(stop - start),
            "media_tokens": int(is_media[start:stop].sum()),
            "targets": int(is_target[start:stop].sum()),
        }
        for node, (start, stop) in enumerate(pairwise([0, *stops]))
    ]
    return {"row": row, "samples": len(samples), "tokens": sum(lengths), "computed": int(stops[-1]), "parts": parts}


def print_rows(rows: Iterable[dict[str, Any]], console: Console) -> None:
    """Print each row as a table: a line a sample, or a line a node of its tree, indented below its parent."""
    for row in rows:
        tokens = f"{row['tokens']:,} tokens of {row['samples']:,} sample{'' if row['samples'] == 1 else 's'}"
        saved = f", {row['computed']:,} computed" if row["computed"] < row["tokens"] else ""
        console.print(f"\n[bold]Row {row['row']:,}[/]: {tokens}{saved}", highlight=False)
        table = make_table(text_column("sample"), *number_columns("tokens", "of media", "trained on"))
        for part in row["parts"]:
            counts = (f"{part[name]:,}" for name in ("tokens", "media_tokens", "targets"))
            table.add_row(Text("  " * part["depth"] + part["name"]), *counts)
        print_table(console, table)


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
    if analysis.min_shared is not None and analysis.table.groups is not None:
        _print_savings(analysis, analysis.min_shared, console)


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
    return f"[bold]{escape(analysis.source)}[/]: {', '.join(counts)}\n"


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
    recipe, samples = analysis.recipe, len(analysis.table)
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


def _print_savings(analysis: Analysis, min_shared: int, console: Console) -> None:
    """Print what sharing prefixes would save, or that there is nothing to share."""
    console.print("[bold]Shared prefixes[/]", highlight=False)
    if not analysis.shared:
        nothing = f"No samples share a beginning of {min_shared:,} tokens or more."
        print_text(console, Text(nothing), indent=2)
        return
    found = (
        f"{analysis.sharing_samples:,} samples begin like others with {min_shared:,} tokens or more, in "
        f'{len(analysis.table.groups or ()):,} groups. VLMCollator(layout="packed", share_prefixes=True) computes what '
        "they share once a row, exactly:"
    )
    print_text(console, Text(found), indent=2)
    table = make_table("rows of", *number_columns("as they are", "shared", "saved"))
    for plain, shared in zip(analysis.simulations, analysis.shared, strict=True):
        for name, before, after, part in _savings(plain, shared):
            what = f"{plain.capacity:,}: {name.replace('_', ' ')}"
            table.add_row(what, short(before), short(after), f"{part:.1%}")
        table.add_section()
    print_table(console, table)


def short(count: int) -> str:
    """Write a count with thousands separators, from ten million on with three digits and a unit.

    >>> short(9_876_543), short(12_345_678), short(4_000_000_000)
    ('9,876,543', '12.3 M', '4.00 G')
    """
    for size, unit in UNITS:
        if count >= max(size, 10**7):
            digits = 2 if count < 10 * size else 1 if count < 100 * size else 0
            return f"{count / size:,.{digits}f} {unit}"
    return f"{count:,}"
