"""More rows from the same samples: ranks that have to end together need a multiple of their number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vlmpack.errors import ConfigError
from vlmpack.plan.lengths import checked_capacity
from vlmpack.plan.plan import Plan


def split_rows(plan: Plan, multiple: int) -> Plan:
    """The plan with the fewest more rows that make their number a multiple: rows of many samples are cut in two.

    No sample is dropped, repeated or made up, which is what other ways to end together do. A cut row is followed by its
    second half.

    Raises:
        ConfigError: there are fewer samples than rows are needed.
    """
    missing = -len(plan) % checked_capacity(multiple, "a number of rows")
    if len(plan.sample_ids) < len(plan) + missing:
        raise ConfigError(
            f"{len(plan.sample_ids)} samples cannot fill {len(plan) + missing} rows, the next multiple of {multiple}; "
            "use fewer ranks or less accumulation, or drop what is left over"
        )
    bounds = plan.bounds
    while missing:
        samples = np.diff(bounds)
        rows = np.argsort(-samples, kind="stable")[:missing]
        rows = rows[samples[rows] > 1]
        cuts = [int(bounds[row]) + middle(plan.lengths[plan.sample_ids[bounds[row] : bounds[row + 1]]]) for row in rows]
        bounds = np.insert(bounds, rows + 1, cuts)
        missing -= len(rows)
    return replace(plan, bounds=bounds)


def middle(lengths: Sequence[int] | np.ndarray) -> int:
    """Where to cut a row of two samples or more: after this many, both parts have about as many tokens."""
    before = np.cumsum(lengths)[:-1]
    return 1 + int(np.abs(2 * before - np.sum(lengths)).argmin())
