"""Two checkouts are run in turn, and a figure that is worse is seen."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.compare_commits import compare


def figures(value: float, unit: str = "s", target: str | None = None) -> dict[Any, Any]:
    limit = None if target is None else {"limit": 1.0, "better": target}
    return {("case", None, "name"): {"value": value, "unit": unit, "target": limit}}


@pytest.mark.parametrize(
    ("earlier", "later", "unit", "target", "verdict"),
    [
        (1.0, 1.02, "s", None, "same"),
        (1.0, 1.1, "s", None, "worse"),
        (1.0, 0.9, "s", None, "better"),
        (1.0, 0.9, "tokens/s", None, "worse"),
        (1.0, 0.9, "x", None, "other"),
        (1.0, 0.9, "x", "higher", "worse"),
        (0.0, 0.0, "s", None, "same"),
        (0.0, 1.0, "s", None, "worse"),
    ],
)
def test_a_verdict_depends_on_which_side_is_better(earlier, later, unit, target, verdict):
    rounds = [[figures(value, unit, target)] * 3 for value in (earlier, later)]
    ((_, _, found),) = compare(*rounds, tolerance=0.03)
    assert found == verdict
