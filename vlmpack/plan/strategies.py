"""The names of the ways to plan: ours, and SeqPacker's short ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from vlmpack.errors import ConfigError
from vlmpack.plan.decreasing import best_fit_decreasing, first_fit_decreasing, worst_fit_decreasing
from vlmpack.plan.exact_fill import exact_fill
from vlmpack.plan.next_fit import next_fit
from vlmpack.plan.rolling import rolling_fill

STRATEGIES: Mapping[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "exact_fill": exact_fill,
    "best_fit_decreasing": best_fit_decreasing,
    "first_fit_decreasing": first_fit_decreasing,
    "worst_fit_decreasing": worst_fit_decreasing,
    "rolling_fill": rolling_fill,
    "next_fit": next_fit,
}
"""name -> a function from lengths int64 [N] and a capacity to the bin of each sample, int64 [N]."""

ALIASES: Mapping[str, str] = {
    "obfd": "best_fit_decreasing",
    "obfdp": "best_fit_decreasing",
    "bfd": "best_fit_decreasing",
    "bf": "best_fit_decreasing",
    "ffd": "first_fit_decreasing",
    "mffd": "first_fit_decreasing",
    "ff": "first_fit_decreasing",
    "ffs": "first_fit_decreasing",
    "wf": "worst_fit_decreasing",
    "hk": "rolling_fill",
    "nf": "next_fit",
}
"""SeqPacker's short name -> ours. Where it has a variant that we have not, ours is the one that needs no more bins."""


def small_letters(name: object) -> str:
    """The name of a strategy in small letters.

    Raises:
        ConfigError: it is no name.
    """
    if not isinstance(name, str):
        raise ConfigError(f"a strategy is given by its name, got {name!r}; choose from {', '.join(STRATEGIES)}")
    return name.lower()


def strategy_name(name: str) -> str:
    """Our name for a strategy, from ours or a short one, in any case.

    Raises:
        ConfigError: there is no such strategy.
    """
    small = small_letters(name)
    found = ALIASES.get(small, small)
    if found not in STRATEGIES:
        raise ConfigError(
            f"there is no strategy {name!r}; choose from {', '.join(STRATEGIES)}, or by a short name from "
            f"{', '.join(ALIASES)}"
        )
    return found
