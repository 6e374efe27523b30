"""Run cases one after the other and gather what they find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from vlmpack.bench.cases import CASES
from vlmpack.bench.environment import environment
from vlmpack.bench.figure import Report
from vlmpack.bench.settings import BenchSettings
from vlmpack.errors import ConfigError


def run_cases(
    names: Sequence[str] = (),
    settings: BenchSettings | None = None,
    *,
    before: Callable[[str], None] = lambda name: None,
) -> Report:
    """Run the named cases, or all of them.

    Args:
        names: keys of `CASES`; none: all, in its order.
        settings: of the run; None: the defaults.
        before: told the name of each case before it starts.

    Raises:
        ConfigError: there is no such case.
    """
    settings = settings or BenchSettings()
    if unknown := [name for name in names if name not in CASES]:
        raise ConfigError(f"there is no case {', '.join(map(repr, unknown))}; choose from {', '.join(CASES)}")
    figures = []
    for name in (chosen := names or list(CASES)):
        before(name)
        figures += CASES[name].run(settings, CASES[name].shapes)
    return Report(
        figures=tuple(figures),
        environment=environment(settings.device),
        settings=asdict(settings),
        shapes={name: asdict(CASES[name].shapes) for name in chosen},
    )
