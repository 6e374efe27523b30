"""The short tier has every pair of values of a product, in few of its cases, and the same ones in every run."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest
from tiers import mark_products

SIZES = (9, 5, 3, 2)


class Item(SimpleNamespace):
    """What `mark_products` reads of a test, and the marks that it adds."""

    def get_closest_marker(self, name: str) -> bool:
        return name == "pairwise"  # and not each_value

    def add_marker(self, mark: Any) -> None:
        self.marks.append(mark)


def marked() -> list[Item]:
    cases = product(*map(range, SIZES))
    items = [
        Item(nodeid=f"test.py::test[{case}]", marks=[], callspec=SimpleNamespace(params=dict(enumerate(case))))
        for case in cases
    ]
    mark_products(items)  # pyright: ignore[reportArgumentType]
    return items


def test_every_pair_is_in_the_short_tier_and_few_cases_are() -> None:
    items = marked()
    short = [item for item in items if not item.marks]
    others = [item for item in items if item.marks]
    assert all(pytest.mark.full in item.marks for item in others)
    full = sum(item.marks == [pytest.mark.full] for item in others)
    assert len(others) / 8 < full < len(others) / 4
    pairs = {pair for item in short for pair in combinations(item.callspec.params.items(), 2)}
    sizes = dict(enumerate(SIZES))
    assert len(pairs) == sum(a * b for a, b in combinations(sizes.values(), 2))
    assert len(short) < 2 * 9 * 5
    assert [item.marks for item in items] == [item.marks for item in marked()]
