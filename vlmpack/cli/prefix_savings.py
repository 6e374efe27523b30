"""The part of `vlmpack analyze` about samples that begin alike: what computing each shared prefix once would save."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vlmpack.terminal import make_table, number_columns, print_table, print_text

if TYPE_CHECKING:
    from vlmpack.plan.prefix_groups import PrefixGroups
    from vlmpack.plan.simulation import Simulation

UNITS = ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"))
"""Of large counts, so that tables fit 80 columns."""


@final
@dataclass(frozen=True, kw_only=True)
class PrefixSavings:
    """The same samples packed with and without sharing."""

    min_shared: int
    """Tokens of the shortest prefix that counts as shared."""
    groups: PrefixGroups
    """The samples by what they share."""
    plain: tuple[Simulation, ...]
    """Packed without sharing, once for each capacity."""
    shared: tuple[Simulation, ...]
    """Packed with sharing, likewise; none where there is nothing to share."""

    @property
    def samples(self) -> int:
        """Samples that share something."""
        return int((self.groups.of_samples >= 0).sum())

    def to_dict(self) -> dict[str, Any]:
        """Return every number, for JSON."""
        packed = [
            {
                "capacity": plain.capacity,
                "plain": dict(_counts(plain)),
                "shared": dict(_counts(shared)),
                "saved": {name: share for name, _, _, share in _savings(plain, shared)},
            }
            for plain, shared in zip(self.plain, self.shared, strict=False)
        ]
        groups = {"groups": len(self.groups), "samples": self.samples}
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


def print_savings(savings: PrefixSavings, console: Console) -> None:
    """Print what sharing would save, or that there is nothing to share."""
    console.print("[bold]Shared prefixes[/]", highlight=False)
    if not savings.shared:
        nothing = f"No samples begin alike with {savings.min_shared:,} tokens or more: there is nothing to share."
        print_text(console, Text(nothing), indent=2)
        return
    found = (
        f"{savings.samples:,} samples begin like others with {savings.min_shared:,} tokens or more, in "
        f'{len(savings.groups):,} groups. VLMCollator(layout="packed", share_prefixes=True) computes what they share '
        "once a row, exactly:"
    )
    print_text(console, Text(found), indent=2)
    print_table(console, _table(savings))


def _table(savings: PrefixSavings) -> Table:
    table = make_table("rows of", *number_columns("as they are", "shared", "saved"))
    for plain, shared in zip(savings.plain, savings.shared, strict=True):
        for name, before, after, part in _savings(plain, shared):
            what = f"{plain.capacity:,}: {name.replace('_', ' ')}"
            table.add_row(what, short(before), short(after), f"{part:.1%}")
        table.add_section()
    return table


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
