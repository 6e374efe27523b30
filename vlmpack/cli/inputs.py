"""Open what the command line names: settings, data sets and mixes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from vlmpack.cli.options import DataOptions
from vlmpack.errors import ConfigError, skipped_are_reported
from vlmpack.terminal import print_text, progress_lines

if TYPE_CHECKING:
    from vlmpack.collate.collator import VLMCollator
    from vlmpack.data.mixed import MixedDataset
    from vlmpack.data.open import OpenDataset
    from vlmpack.plan.length_table import LengthTable
    from vlmpack.plan.plan import Plan

SYNTHETIC = "synthetic"
LISTED = 5
"""Number of unusable samples that are printed with details."""


class UniqueKeys(yaml.SafeLoader):
    """Reads 1e-4 as a number, and refuses a key that is written twice, of which YAML keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := [name for at, name in enumerate(names) if name in names[:at]]:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]} is written twice", node.start_mark)
        return super().construct_mapping(node, deep)


FLOAT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
UniqueKeys.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, [*"-+0123456789"])


def read_yaml(name: str, text: str | bytes) -> Any:
    """Read YAML; an error begins with `name`.

    Raises:
        ConfigError: it is no YAML, or has a key twice.
    """
    try:
        return yaml.load(text, Loader=UniqueKeys)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} cannot be read: {' '.join(str(error).split())}") from error


class Inputs(NamedTuple):
    """A data set, and the collator that makes rows of it."""

    dataset: OpenDataset | MixedDataset
    """The samples."""
    collator: VLMCollator
    """The collator; holds the processor."""


def open_inputs(data: DataOptions, *, capacity: int | None = None, **settings: Any) -> Inputs:
    """Open the data set and the processor of the command line.

    Args:
        data: names and limits.
        capacity: maximum tokens of a row, to which samples are truncated without --max-length.
        settings: more settings of `VLMCollator`.

    Raises:
        ConfigError: something is missing, or options contradict each other. FamilyError: the model's family is not
            supported.
    """
    from vlmpack.cli.models import limit_pixels, named_processor, tiny_family
    from vlmpack.collate.assemble import SharePrefixes
    from vlmpack.collate.collator import VLMCollator
    from vlmpack.data.mixed import mix_datasets
    from vlmpack.plan.lengths import TRUNCATING

    weights = mixed_sources(data.dataset, data.mix or ())
    columns = columns_by_source(data.columns or (), [*weights])

    def open_one(source: str, num: int | None = None) -> OpenDataset:
        check_source(source)
        return open_samples(
            source, split=data.split, num=num, seed=data.seed, image_root=data.image_root, branches=data.branches,
            columns=columns[source], small=data.processor is not None and tiny_family(data.processor) is not None,
        )  # fmt: skip

    if data.mix:
        names = dict(zip(weights, short_names([*weights]), strict=True))
        dataset = mix_datasets(
            {name: open_one(source) for source, name in names.items()},
            {names[source]: weight for source, weight in weights.items() if weight is not None} or None,
            num=data.num,
            seed=data.seed,
        )
    else:
        dataset = open_one(data.dataset, data.num)
    if data.processor is None:
        raise ConfigError(
            f"{data.dataset} is not packed yet, so it needs a --processor: a hub id, a folder, or a built-in one (tiny)"
        )
    if data.overlength == "own_row" and data.max_length is not None:
        raise ConfigError("--overlength own_row keeps samples whole, so --max-length has no effect; leave one out")
    truncates = data.overlength in TRUNCATING
    max_length = capacity if truncates and data.max_length is None else data.max_length
    collator = VLMCollator(
        limit_pixels(named_processor(data.processor), data.max_pixels), layout="packed", max_length=max_length,
        overlength=data.overlength if truncates or max_length else "error", add_stop=data.add_stop,
        ignored_keys=data.ignored_keys or (),
        share_prefixes=SharePrefixes(min_shared=data.min_shared) if data.min_shared else False,
        train_on=data.train_on, **settings,
    )  # fmt: skip
    return Inputs(dataset, collator)


def open_samples(source: str, *, num: int | None, seed: int, small: bool, **of_files: Any) -> OpenDataset:
    """Open a data set, or generate receipts for "synthetic"; `small` ones suit a built-in processor.

    Args:
        source: file, folder, hub id, or "synthetic".
        num: number of samples; None: all.
        seed: seed of the receipts.
        small: generate the smallest receipts that can be read.
        of_files: more settings of `open_dataset`.

    Raises:
        ConfigError: it cannot be read, or settings of files are given with "synthetic".
    """
    from vlmpack.data.open import open_dataset
    from vlmpack.testing.receipts import SMALLEST_LEGIBLE, receipt_conversations

    if source != SYNTHETIC:
        return open_dataset(source, num=num, **of_files)
    split = of_files.pop("split", "train")
    if given := [name for name, value in of_files.items() if value not in (None, "conversation")]:
        raise ConfigError(
            f"--{given[0].replace('_', '-')} does not apply to {SYNTHETIC} receipts: they have fixed columns, no paths "
            "and one question each; leave it out, or name the data set of the mix that --columns belongs to: SOURCE=MAP"
        )
    return receipt_conversations(split=split, num=num, seed=seed, scale=SMALLEST_LEGIBLE if small else 1.0)


def check_source(source: str) -> None:
    """Check that a source is not a folder of packed rows, finished or not.

    Raises:
        ConfigError: it is one.
    """
    from vlmpack.rows import WORK, is_packed

    path = Path(source).expanduser()
    if is_packed(path):
        raise ConfigError(
            f"{source} is packed already; give the data set it was made from. `vlmpack analyze {source} --rows 1` "
            "shows its first row"
        )
    if (path / WORK).is_dir():
        raise ConfigError(
            f"{source} is only partly packed: `vlmpack pack` was interrupted there, or refused a sample. Run it again "
            "to continue"
        )


def measure(inputs: Inputs, data: DataOptions, *, quiet: bool, min_shared: int | None) -> LengthTable:
    """Measure all samples, with progress, and find shared prefixes of `min_shared` tokens or more (None: none)."""
    from vlmpack.lengths import measure_lengths

    with skipped_are_reported(), progress_lines(quiet=quiet) as progress:  # `print_refused` lists them
        return measure_lengths(
            *inputs, progress=lambda done, total: progress("measuring samples", done, total), workers=data.workers,
            cache=data.cache, min_shared=min_shared,
        )  # fmt: skip


def plan_rows(table: LengthTable, data: DataOptions, capacity: int) -> Plan:
    """Plan rows; a sample that does not fit one is left out, or gets its own row."""
    from vlmpack.plan.plan import plan_bins

    return plan_bins(
        table, capacity, strategy=data.strategy, overlength=data.rows_overlength,
        budgets=table.budgets(patches=data.max_patches), groups=table.groups if data.min_shared else None,
    )  # fmt: skip


def print_refused(table: LengthTable, console: Console, *, of: str = "") -> None:
    """Print how many samples (of a data set with this name) cannot be used, why, and the first ones."""
    if not table.refused:
        return
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in table.reasons.items())
    count = f"{len(table.refused):,} of {table.measured:,} samples{f' of {escape(of)}' if of else ''}"
    console.print(f"[yellow]{count} cannot be used[/]: {escape(reasons)}", highlight=False)
    for each in table.refused[:LISTED]:
        print_text(console, Text(f"{each} ({each.reason})"), indent=2)
    more = len(table.refused) - LISTED
    console.print(f"  and {more:,} more (`vlmpack analyze --json` lists all)\n" if more > 0 else "", highlight=False)


# ---------------------------------------------------------------------- mixes


def mixed_sources(dataset: str, others: Sequence[str]) -> dict[str, float | None]:
    """Parse DATASET, whose weight is 1, and the values of `--mix` to source -> weight; None: use each sample once.

    Raises:
        ConfigError: a weight is not a number, or a source is named twice.
    """
    mixed = [_source_of(text) for text in others]
    sources: dict[str, float | None] = {dataset: 1.0 if any(weight is not None for _, weight in mixed) else None}
    for source, weight in mixed:
        if source in sources:
            raise ConfigError(f"--mix {source}: it is already in the mix; name it once, with a weight: {source}=2")
        sources[source] = weight
    return sources


def _source_of(text: str) -> tuple[str, float | None]:
    source, equals, weight = text.rpartition("=")
    if not equals or Path(text).expanduser().exists():
        return text, None
    with suppress(ValueError):
        return source, float(weight)
    raise ConfigError(f"--mix {text}: the weight must be a number, relative to the first data set: --mix {source}=2")


def columns_by_source(columns: Sequence[str], sources: Sequence[str]) -> dict[str, str | None]:
    """Parse the values of `--columns`: SOURCE=MAP is for one data set, MAP for all others.

    Args:
        columns: the values. A MAP is JSON or the path of a file.
        sources: data sets as named on the command line; SOURCE is one of them, or its short name.

    Returns:
        The map of each source; None: it has none.

    Raises:
        ConfigError: a data set gets two maps.
    """
    names = {**dict(zip(short_names(sources), sources, strict=True)), **{source: source for source in sources}}
    maps: dict[str | None, str] = {}
    for text in columns:
        name = next((name for name in names if text.startswith(f"{name}=")), None)
        source = None if name is None else names[name]
        if source in maps:
            raise ConfigError(
                f"--columns {text}: {source or 'every data set'} already has a map; write all names in one, and the "
                f"map of one data set of a mix as SOURCE=MAP (SOURCE: {', '.join(short_names(sources))})"
            )
        maps[source] = text if name is None else text.removeprefix(f"{name}=")
    return {source: maps.get(source, maps.get(None)) for source in sources}


def short_names(sources: Sequence[str]) -> list[str]:
    """Shorten paths and hub ids to their last parts, without suffixes; as many parts as make the names differ."""
    parts = [[*Path(source).parts[:-1], Path(source).name.partition(".")[0] or source] for source in sources]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-depth:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return list(sources)


def mix_numbers(dataset: Any) -> dict[str, Any] | None:
    """Return the counts of each data set of a mix, for JSON; None: it is not a mix."""
    from vlmpack.data.mixed import MixedDataset

    if not isinstance(dataset, MixedDataset):
        return None
    counts, passes = dataset.counts, dataset.passes
    return {
        name: {"weight": dataset.weights[name], "size": len(part), "samples": counts[name], "passes": passes[name]}
        for name, part in dataset.datasets
    }


def mix_lines(numbers: dict[str, Any] | None) -> Iterator[str]:
    """Yield a line for each data set of a mix: how often its samples are used in an epoch."""
    for name, of in (numbers or {}).items():
        yield f"{of['samples']:,} of {name} ({of['size']:,} samples, {of['passes']:.2f} passes)"
