"""`vlmpack analyze`: measure lengths, simulate packing, and find the accumulation that keeps the samples per update."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import islice, pairwise
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text
from typer import Option

from vlmpack.cli.inputs import (
    Inputs,
    measure,
    mix_lines,
    mix_numbers,
    open_inputs,
    plan_rows,
    print_refused,
)
from vlmpack.cli.options import AtLeast1, DataOptions, Limit, Method, ModelOptions, OutputOptions, with_options
from vlmpack.cli.pack import print_store, store_numbers
from vlmpack.errors import ConfigError
from vlmpack.terminal import number_columns, print_table, print_text, quiet_transformers, text_column

if TYPE_CHECKING:
    from vlmpack.collate.encoded import Encoded
    from vlmpack.layout.prefix_tree import PrefixTree
    from vlmpack.plan.length_table import LengthTable
    from vlmpack.plan.simulation import PaddedRecipe, Simulation

WORDS = {
    "tokens": "tokens",
    "text": "text tokens",
    "image": "image tokens",
    "video": "video tokens",
    "targets": "tokens trained on",
    "patches": "vision patches",
}
"""What is counted of each sample, and its name in tables."""
STATISTICS = {"mean": "mean", "median": "median", "95 %": "p95", "99 %": "p99", "max": "max", "sum": "total"}
"""Titles of what is told of each of them, and their keys in JSON."""
PADDED = {"to_longest": "padding to the longest in the batch", "to_max": "padding to the longest of all"}
COUNTED = ("tokens", "media_tokens", "targets")
"""Numbers of each part of a row."""
MIN_SHARED = 64
"""Minimum tokens of a shared prefix, unless --min-shared is given."""


@dataclass(frozen=True, kw_only=True)
class AnalyzeOptions(DataOptions, OutputOptions):
    """What is reported."""

    capacity: Annotated[list[int] | None, Option(min=1, metavar="N")] = None
    """Maximum tokens of a row; by default 12000, 16000 and 20000. Repeatable."""
    rows: Annotated[int, Option(min=0, metavar="N")] = 0
    """Print the first N rows, sample by sample, for the first capacity."""
    world_size: AtLeast1 = 1
    """Number of ranks."""
    per_device_batch: AtLeast1 = 8
    """Samples of a padded batch on each rank."""
    samples_per_update: Limit = None
    """Samples of an optimizer step that packing should keep; by default a batch."""
    memory: Annotated[float | None, Option(min=0.1, metavar="GIB")] = None
    """Memory of a GPU: propose mesh, checkpointing and capacity that fit in 90 % of it."""
    gpus: AtLeast1 = 1
    """Number of GPUs to train on."""
    method: Method = "lora"
    """Train LoRA adapters on bfloat16 weights, or all float32 weights."""


@with_options
def analyze(given: AnalyzeOptions) -> None:
    """Report the lengths of samples and what packing saves; with --rows, print rows; with --memory, propose a mesh.

    Images are measured from their headers: no image is decoded, and no model is loaded. DATASET may also be a folder
    written by `vlmpack pack`. The exit status is 1 if no sample can be used.
    """
    from vlmpack.lengths import why_no_marks
    from vlmpack.plan.simulation import CAPACITIES, PaddedRecipe
    from vlmpack.rows import is_packed

    console = Console(quiet=given.as_json)
    if is_packed(Path(given.dataset).expanduser()):
        _analyze_store(given, console)
        return
    batch = {"world_size": given.world_size, "per_device_batch": given.per_device_batch}
    recipe = PaddedRecipe(**batch)
    if given.samples_per_update is not None:
        recipe = PaddedRecipe.reaching(given.samples_per_update, **batch)
    inputs = open_inputs(given)
    without = why_no_marks(inputs.collator) if given.min_shared is None else None
    min_shared = None if without or given.min_shared == 0 else given.min_shared or MIN_SHARED
    table = measure(inputs, given, quiet=given.quiet, min_shared=min_shared)
    capacities = tuple(given.capacity or CAPACITIES) if len(table) else ()
    numbers = {
        "source": given.title,
        "mix": mix_numbers(inputs.dataset),
        **analysis_of(table, recipe, capacities, given, min_shared=min_shared),
        "rows": [],
        "memory": None,
    }
    if given.rows and capacities:
        numbers["rows"] = [*islice(_planned_rows(inputs, given, table, capacities[0]), given.rows)]
    if given.memory is not None and capacities:
        numbers["memory"] = _proposal(inputs, given, table, capacities)
    print_analysis(numbers, table, console)
    if without:
        print_text(console, Text(f"\nDid not look for shared prefixes: {without}."))
    print_rows(numbers["rows"], console)
    if numbers["memory"] is not None:
        _print_proposal(numbers["memory"], console)
    given.print_json(numbers)
    raise typer.Exit(0 if len(table) else 1)


# ---------------------------------------------------------------------- numbers


def analysis_of(
    table: LengthTable, recipe: PaddedRecipe, capacities: Sequence[int], data: DataOptions, *, min_shared: int | None
) -> dict[str, Any]:
    """Return the numbers of lengths and packing, for JSON and the tables.

    Args:
        table: lengths of the samples.
        recipe: training with padding; packing keeps its samples per update.
        capacities: capacities of rows to simulate, in tokens.
        data: how rows are planned.
        min_shared: minimum tokens of a shared prefix; None: shared prefixes were not looked for.
    """
    from vlmpack.plan.length_table import summary
    from vlmpack.plan.simulation import simulate

    planned = partial(
        simulate, table, recipe=recipe, strategy=data.strategy, max_patches=data.max_patches,
        overlength=data.rows_overlength,
    )  # fmt: skip
    packed = [planned(capacity) for capacity in capacities]
    shared_prefixes = None
    if min_shared is not None and table.groups is not None and capacities:
        trees = [planned(each, share_prefixes=True) for each in capacities] if len(table.groups) else []
        shared_prefixes = {
            "min_shared": min_shared,
            "groups": len(table.groups),
            "samples": int((table.groups.of_samples >= 0).sum()),
            "packed": [_savings(plain, shared) for plain, shared in zip(packed, trees, strict=False)],
        }
    counted = (table.tokens, table.text_tokens, table.image_tokens, table.video_tokens, table.targets, table.patches)
    columns = dict(zip(WORDS, counted, strict=True))
    paddings = {"to_longest": recipe.padding(table.tokens), "to_max": recipe.padding(table.tokens, to="max")}
    return {
        "samples": len(table),
        "refused": {
            "samples": len(table.refused),
            "reasons": table.reasons,
            "listed": [error.to_dict() for error in table.refused],
        },
        "images": int(table.images.sum()),
        "videos": int(table.videos.sum()),
        "columns": {
            name: asdict(summary(values)) for name, values in columns.items() if name == "tokens" or values.any()
        },
        "padded": {
            **asdict(recipe),
            "samples_per_update": recipe.samples_per_update,
            "updates": recipe.updates(len(table)),
            **{name: {**asdict(padding), "waste": padding.waste} for name, padding in paddings.items()},
        },
        "packed": [{**each.to_dict(), "explained": each.explain()} for each in packed],
        "shared_prefixes": shared_prefixes,
    }


def _savings(plain: Simulation, shared: Simulation) -> dict[str, Any]:
    """Return the work of an epoch without and with shared prefixes, and the fraction saved."""
    before, after = ({"rows": each.rows, **each.to_dict()["computed"]} for each in (plain, shared))
    saved = {name: 1 - after[name] / count for name, count in before.items() if count}
    return {"capacity": plain.capacity, "plain": before, "shared": after, "saved": saved}


def _proposal(inputs: Inputs, given: AnalyzeOptions, table: LengthTable, capacities: Sequence[int]) -> dict[str, Any]:
    """Propose how to train the model of --processor, for JSON. Rows have at most the patches of the densest sample."""
    from vlmpack.cli.memory import COMPUTED_IN, model_sizes, propose
    from vlmpack.cli.models import make_model
    from vlmpack.model.plain import find_model

    assert given.processor is not None and given.memory is not None
    dtype = "bfloat16" if given.method == "lora" else "float32"
    named = ModelOptions(model=given.processor, method=given.method, dtype=dtype)
    with quiet_transformers():
        model = make_model(named, inputs.collator.processor, only_shapes=True)
    density = float((table.patches / table.tokens).max())
    longest = int(table.tokens.max()) if given.rows_overlength == "own_row" else 0
    tokens = [max(longest, each) for each in capacities]
    patches = [min(ceil(each * density), given.max_patches or each * ceil(density)) for each in tokens]
    found = propose(
        model_sizes(model, size=COMPUTED_IN), find_model(model).config, gpus=given.gpus,
        limit=int(0.9 * given.memory * 2**30), rows=dict(zip(tokens, patches, strict=True)),
    )  # fmt: skip
    asked = {name: getattr(given, name) for name in ("gpus", "memory", "method")}
    return {**asked, "needed": sum(found.parts.values()), **asdict(found)}


# ---------------------------------------------------------------------- rows


def _analyze_store(given: AnalyzeOptions, console: Console) -> None:
    """Print the contents of a folder of packed rows.

    Raises:
        ConfigError: the folder is damaged, or options for data or rows are given.
    """
    from vlmpack.rows import PackedDataset

    planning = [each for each in fields(given) if each.name not in ("dataset", "processor", "rows", "as_json", "quiet")]
    if others := [each.name for each in planning if getattr(given, each.name) != each.default]:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in others)
        raise ConfigError(f"{given.dataset} is packed already, so {names} would have no effect; leave it out")
    folder = Path(given.dataset).expanduser()
    dataset = PackedDataset(folder)
    shown = range(min(given.rows, len(dataset)))
    drawn = [row_numbers(row, dataset.measured(row), dataset.tree(row)) for row in shown]
    numbers = {**store_numbers(folder, dataset.manifest), "rows": drawn}
    print_store(numbers, console)
    print_rows(drawn, console)
    given.print_json(numbers)


def _planned_rows(inputs: Inputs, data: DataOptions, table: LengthTable, capacity: int) -> Iterator[dict[str, Any]]:
    """Plan rows as `vlmpack pack` does, and describe them."""
    from vlmpack.lengths import tree_of

    limits = inputs.collator.limits
    for row, ids in enumerate(plan_rows(table, data, capacity)):
        samples = [inputs.collator.measure(inputs.dataset[at], at) for at in ids]
        tree = tree_of(samples, limits=limits, min_shared=data.min_shared) if data.min_shared else None
        yield row_numbers(row, samples, tree)


def row_numbers(row: int, samples: Sequence[Encoded], tree: PrefixTree | None) -> dict[str, Any]:
    """Describe a row, for JSON: its samples, or the nodes of its prefix tree, each after its parent.

    Args:
        row: index of the row in the plan.
        samples: samples of the row.
        tree: prefix tree of the row; None: its samples share nothing.
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
    """Print each row as a table: one line per sample, or per node of its prefix tree, indented below its parent."""
    for row in rows:
        tokens = f"{row['tokens']:,} tokens of {row['samples']:,} sample{'' if row['samples'] == 1 else 's'}"
        saved = f", {row['computed']:,} computed" if row["computed"] < row["tokens"] else ""
        console.print(f"\n[bold]Row {row['row']:,}[/]: {tokens}{saved}", highlight=False)
        columns = (text_column("sample"), *number_columns("tokens", "of media", "trained on"))
        lines = (
            (Text("  " * part["depth"] + part["name"]), *(f"{part[name]:,}" for name in COUNTED))
            for part in row["parts"]
        )
        print_table(console, columns, lines)


# ---------------------------------------------------------------------- tables


def print_analysis(numbers: Mapping[str, Any], table: LengthTable, console: Console) -> None:
    """Print tables, histograms and recipes."""
    counts = {"samples": len(table), "tokens": int(table.tokens.sum()), "images": numbers["images"]}
    counts = {**counts, "videos": numbers["videos"]}.items()
    head = ", ".join(f"{count:,} {name}" for name, count in counts if count or name in ("samples", "tokens"))
    console.print(f"[bold]{escape(numbers['source'])}[/]: {head}\n", soft_wrap=not console.is_terminal)
    for line in mix_lines(numbers["mix"]):
        print_text(console, Text(line), indent=2)
    print_refused(table, console)
    if not len(table):
        return
    rows = (
        (WORDS[name], *(f"{of[key]:,.0f}" for key in STATISTICS.values())) for name, of in numbers["columns"].items()
    )
    print_table(console, ("per sample", *number_columns(*STATISTICS)), rows)
    console.print()
    _print_layouts(numbers["padded"], numbers["packed"], len(table), console)
    for packed in numbers["packed"]:
        for sentence in packed["explained"]:
            print_text(console, Text(f"Rows of {packed['capacity']:,}: {sentence}"))
    if numbers["shared_prefixes"] is not None:
        _print_savings(numbers["shared_prefixes"], console)


def _print_layouts(
    padded: Mapping[str, Any], packed: Iterable[Mapping[str, Any]], samples: int, console: Console
) -> None:
    """Print the table of padded and packed training. The free part of a packed row is not computed."""
    titles = ("rows", "unused", "samples\nper row", "accumu-\nlation", "samples\nper\nupdate", "updates\nper\nepoch")
    update = [f"{padded[name]:,}" for name in ("accumulation", "samples_per_update", "updates")]
    rows: list[Sequence[str]] = [
        (words, f"{samples:,}", f"{padded[name]['waste']:.1%}", "1", *update, "0") for name, words in PADDED.items()
    ]
    rows.append(())
    for row in packed:
        waste = f"{1 - row['fill']:.1%}" if row["rows"] else ""
        update = [f"{row['accumulation']:,}", f"{row['samples_per_update']:,.1f}", f"{row['updates']:,}"]
        cells = [f"{row['rows']:,}", waste, f"{row['samples_per_row']:.2f}", *update, f"{len(row['dropped']):,}"]
        rows.append((f"packed in rows of {row['capacity']:,}", *cells))
    print_table(console, (text_column(""), *number_columns(*titles, "too\nlong")), rows)


def _print_proposal(proposal: Mapping[str, Any], console: Console) -> None:
    """Print the memory of each rank, the proposed mesh, and why simpler ones do not fit."""
    from vlmpack.cli.memory import MEANINGS, Mesh

    mesh, rows = Mesh(**proposal["mesh"]), f"rows of {proposal['capacity']:,} tokens"
    limit = f"{proposal['memory']:g} GiB on each of {proposal['gpus']:,} GPUs, 10 % left free, {proposal['method']}"
    console.print(f"\n[bold]Memory[/]: {limit}", highlight=False)
    cells = [(name, f"{size / 2**30:.2f}", Text(MEANINGS[name])) for name, size in proposal["parts"].items()]
    cells.append(("sum", f"{proposal['needed'] / 2**30:.2f}", Text(f"{mesh}, {rows}")))
    print_table(console, ("on each rank", *number_columns("GiB"), text_column("")), cells)
    verdict = "Use" if proposal["fits"] else "Nothing fits; the least is needed by"
    print_text(console, Text(f"{verdict} {mesh}, {rows}."))
    for name, why in proposal["rejected"].items():
        print_text(console, Text(f"{name} does not fit: {why}"), indent=2)


def _print_savings(shared: Mapping[str, Any], console: Console) -> None:
    """Print what sharing prefixes would save, or that no prefixes are shared."""
    console.print("[bold]Shared prefixes[/]", highlight=False)
    least = f"at least {shared['min_shared']:,} tokens"
    if not shared["packed"]:
        print_text(console, Text(f"No samples share a prefix of {least}."), indent=2)
        return
    found = (
        f"{shared['samples']:,} samples share a prefix of {least} with others, in {shared['groups']:,} groups. "
        'VLMCollator(layout="packed", share_prefixes=True) computes it once per row, exactly:'
    )
    print_text(console, Text(found), indent=2)
    rows: list[Sequence[str]] = []
    for each in shared["packed"]:
        for name, part in each["saved"].items():
            what = f"{each['capacity']:,}: {name.replace('_', ' ')}"
            rows.append((what, f"{each['plain'][name]:,}", f"{each['shared'][name]:,}", f"{part:.1%}"))
        rows.append(())
    print_table(console, ("rows of", *number_columns("not shared", "shared", "saved")), rows)
