"""Run cases one after the other and gather what they find."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import final

from vlmpack.bench.cases import CASES
from vlmpack.bench.environment import environment
from vlmpack.bench.figure import Figure, Report, Skipped
from vlmpack.bench.settings import BenchSettings
from vlmpack.errors import ConfigError
from vlmpack.families import FAMILIES

HANDED_OUT = 0.91
"""Share of the time that units get; the rest is for what they set up before they look at a clock."""
OUT_OF_TIME = "the time was used up before its turn; give a larger --budget, or name it alone"


@final
@dataclass(frozen=True, kw_only=True)
class Unit:
    """What is measured in one go: a case, of one family if it measures families."""

    case: str
    """A key of `CASES`."""
    family: str | None
    """A key of `FAMILIES`; None: the case is about none."""
    first: bool = True
    """The first of its case, which is measured whether there is time left or not."""

    def __str__(self) -> str:
        return self.case if self.family is None else f"{self.case} {self.family}"


def run_cases(
    names: Sequence[str] = (),
    settings: BenchSettings | None = None,
    *,
    families: Sequence[str] = (),
    before: Callable[[Unit], None] = lambda unit: None,
) -> Report:
    """Run the named cases, or all of them, each for every family if it measures families.

    A unit gets its share (`Case.weight`) of the time that is left when its turn comes. The first unit of every case is
    always measured. After it, units whose turn comes when `settings.seconds` for each unit have passed are skipped, and
    the report says so.

    Args:
        names: keys of `CASES`; none: all, in its order.
        settings: of the run, `seconds` for each unit; None: the defaults.
        families: keys of `FAMILIES`; none: that of `settings`.
        before: told each unit before it starts.

    Raises:
        ConfigError: there is no such case or family.
    """
    settings = settings or BenchSettings()
    names, families = names or list(CASES), families or [settings.family]
    units = units_of(names, families)
    figures, skipped = [], []
    ends = time.perf_counter() + HANDED_OUT * settings.seconds * len(units)
    for turn, unit in enumerate(units):
        left = ends - time.perf_counter()
        if not unit.first and left < 0:
            skipped.append(Skipped(case=unit.case, name=unit.family or unit.case, why=OUT_OF_TIME, owed=True))
            continue
        before(unit)
        case, waiting = CASES[unit.case], sum(CASES[one.case].weight for one in units[turn:])
        seconds = max(left, 0.0) * case.weight / waiting
        its_own = replace(settings, family=unit.family or settings.family, seconds=seconds)
        for found in case.run(its_own, case.shapes):
            (figures if isinstance(found, Figure) else skipped).append(found)
    return Report(
        figures=tuple(figures),
        environment=environment(settings.device),
        settings={**asdict(settings), "family": list(families)},
        shapes={name: asdict(CASES[name].shapes) for name in names},
        skipped=tuple(skipped),
    )


def units_of(names: Sequence[str], families: Sequence[str]) -> list[Unit]:
    """The units of a run in their order.

    Raises:
        ConfigError: there is no such case or family.
    """
    for kind, asked, known in (("case", names, list(CASES)), ("family", families, list(FAMILIES))):
        if unknown := [name for name in asked if name not in known]:
            raise ConfigError(f"there is no {kind} {', '.join(map(repr, unknown))}; choose from {', '.join(known)}")
    return [
        Unit(case=name, family=family, first=i == 0)
        for name in names
        for i, family in enumerate(families if CASES[name].by_family else [None])
    ]
