"""Several data sets on the command line, mixed by weights: DATA --mix SOURCE=WEIGHT --mix SOURCE=WEIGHT.

vlmpack pack receipts.jsonl rows/ --mix chats.jsonl=0.5 ...     a chat for every two receipts, weights to DATA's 1
vlmpack pack receipts.jsonl rows/ --mix chats.jsonl ...         without weights every sample once
... --columns 'chats={"talk": "messages"}'                      names of columns of one of them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from vlmpack.cli.options import STOPPING
from vlmpack.errors import ConfigError

if TYPE_CHECKING:
    from vlmpack.data.mixed import MixedDataset


@final
@dataclass(frozen=True, kw_only=True)
class MixOptions:
    """Options of the command line for data sets beside the first."""

    sources: tuple[str, ...] = ()
    """SOURCE or SOURCE=WEIGHT each."""
    stopping: str = STOPPING[0]
    """End of an epoch: one of `STOPPING`."""
    epoch: int = 0
    """It goes on in every data set where the one before it stopped."""

    @classmethod
    def of(cls, sources: Sequence[str] | None, stopping: str, epoch: int) -> MixOptions:
        """Make them of what the command line has.

        Raises:
            ConfigError: settings of a mix without one.
        """
        options = cls(sources=tuple(sources or ()), stopping=stopping, epoch=epoch)
        if not options.sources and options != cls():
            option = "--epoch" if epoch else "--stopping-strategy"
            raise ConfigError(f"{option} is of a mix; name its other data sets with --mix SOURCE=WEIGHT")
        return options


@final
@dataclass(frozen=True, kw_only=True)
class MixedSource:
    """One data set of a mix."""

    source: str
    """A data set, for `open_dataset`."""
    weight: float | None
    """Share of the samples, in units of DATA's; None: every sample once."""


def mixed_sources(dataset: str, sources: Sequence[str]) -> tuple[MixedSource, ...]:
    """Read what the command line names: DATA, whose weight is 1, and the values of `--mix`.

    Raises:
        ConfigError: some have a weight and others have none, a weight is no number above 0, or a source comes twice.
    """
    others = [_source_of(text) for text in sources]
    if len({other.weight is None for other in others}) > 1:
        bare = next(other.source for other in others if other.weight is None)
        raise ConfigError(f"--mix {bare}: others have a weight; give it one too, --mix {bare}=1")
    has_weights = any(other.weight is not None for other in others)
    mixed = (MixedSource(source=dataset, weight=1.0 if has_weights else None), *others)
    names = [each.source for each in mixed]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"--mix {double}: it is in the mix already; name it once, and weigh it: {double}=2")
    return mixed


def _source_of(text: str) -> MixedSource:
    source, equals, weight = text.rpartition("=")
    if not equals or Path(text).expanduser().exists():
        return MixedSource(source=text, weight=None)
    with suppress(ValueError):
        if source and 0 < float(weight) < inf:
            return MixedSource(source=source, weight=float(weight))
    raise ConfigError(f"--mix {text}: a weight is a number above 0, in units of the first data set's: --mix {source}=2")


def columns_by_source(columns: Sequence[str], sources: Sequence[str]) -> dict[str, str | None]:
    """Read the values of `--columns`: SOURCE=MAP is of one data set, MAP of every one that has none of its own.

    Args:
        columns: the values. A MAP is JSON, or the path of a file.
        sources: DATA of the command line, and the data sets that are mixed with it.

    Returns:
        The map of each source; None: its columns have known names.

    Raises:
        ConfigError: no data set has that name; one of them, or all, get two maps; a map is of none; or a value can be
            read in two ways.
    """
    names = {**dict(zip(short_names(sources), sources, strict=True)), **dict(zip(sources, sources, strict=True))}
    maps: dict[str | None, str] = {}
    for text in columns:
        source, columns_map = _map_of(text, names)
        if source in maps:
            whose = "every data set" if source is None else source
            raise ConfigError(
                f"--columns {text}: {whose} has a map already; write all names of a data set in one, and that of one "
                f"data set of a mix as SOURCE=MAP (SOURCE: {', '.join(short_names(sources))})"
            )
        maps[source] = columns_map
    if None in maps and maps.keys() >= {*sources}:
        raise ConfigError(f"--columns {maps[None]}: every data set has a map of its own; leave this one out")
    return {source: maps.get(source, maps.get(None)) for source in sources}


def _map_of(text: str, names: Mapping[str, str]) -> tuple[str | None, str]:
    """(source, MAP) of a value of `--columns`; None: of every data set without one."""
    if text.lstrip().startswith("{"):
        return None, text
    ends = [at for at, letter in enumerate(text) if letter == "="]
    found = [(names[text[:at]], text[at + 1 :]) for at in ends if text[:at] in names]
    is_file = Path(text).expanduser().exists()
    if len(found) + is_file > 1:
        raise ConfigError(
            f"--columns {text}: it can be read in two ways, as a file and as a data set's map, or as those of two data "
            "sets; name the data set or the file by a longer path"
        )
    if ends and not found and not is_file:
        raise ConfigError(
            f"--columns {text}: no data set here is called {text[: ends[0]]}; there are {', '.join(names)}, or leave "
            "the name out for all of them"
        )
    return found[0] if found else (None, text)


def short_names(sources: Sequence[str]) -> list[str]:
    """Return names that differ: the ends of paths and hub ids, of as many parts as that takes, without suffixes."""
    parts = [[*Path(source).parts[:-1], Path(source).name.partition(".")[0] or source] for source in sources]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-depth:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return list(sources)


def open_mix(
    dataset: str, mix: MixOptions, *, num: int | None, seed: int, open_one: Callable[[str], Any]
) -> MixedDataset:
    """Open every data set of a mix.

    Args:
        dataset: DATA of the command line.
        mix: the others.
        num: samples of an epoch; None: until a data set is exhausted.
        seed: of the order in which each data set is passed.
        open_one: opens a source.

    Raises:
        ConfigError: a source cannot be read, or weights do not fit.
    """
    from vlmpack.data.mixed import mix_datasets

    sources = mixed_sources(dataset, mix.sources)
    names = short_names([each.source for each in sources])
    datasets = {name: open_one(each.source) for name, each in zip(names, sources, strict=True)}
    weights = {name: each.weight for name, each in zip(names, sources, strict=True) if each.weight is not None}
    stopping: Any = mix.stopping
    mixed = mix_datasets(datasets, weights or None, num=num, stopping_strategy=stopping, seed=seed)
    return mixed.at_epoch(mix.epoch)


def mix_numbers(dataset: Any) -> dict[str, Any] | None:
    """Return the counts of every data set of a mix, for JSON; None: it is no mix."""
    from vlmpack.data.mixed import MixedDataset

    if not isinstance(dataset, MixedDataset):
        return None
    counts, passes = dataset.counts, dataset.passes
    return {
        name: {"weight": dataset.weights[name], "size": len(part), "samples": counts[name], "passes": passes[name]}
        for name, part in dataset.datasets
    }


def mix_lines(numbers: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield a line for each data set of a mix: its samples and passes in the epoch."""
    for name, of in (numbers or {}).items():
        yield f"{of['samples']:,} of {name} ({of['size']:,} samples, {of['passes']:.2f} passes)"
