"""Ceilings: what a step would take if the machine did nothing but multiply, or nothing but copy."""

from __future__ import annotations

import pytest
from torch import nn

from vlmpack.bench.ceilings import COPY, PRODUCT, Ceilings
from vlmpack.bench.timing import Timings, alternate

TOKENS, HIDDEN = 6, 4
MODEL = nn.Linear(5, 3, bias=False)  # 60 bytes


def timings(**seconds: float) -> Timings:
    found = {"step": (seconds["step"],), PRODUCT: (seconds["product"],), COPY: (seconds["copy"],)}
    return Timings(seconds={"wall": found, "cpu": found})


@pytest.fixture
def ceilings() -> Ceilings:
    return Ceilings.of(MODEL, tokens=TOKENS, hidden=HIDDEN)


def test_the_product_and_the_copy_are_of_the_model_s_size(ceilings: Ceilings) -> None:
    assert ceilings.product_flops == 2 * 6 * 4 * 12
    assert ceilings.step_bytes == 3 * 60


def test_a_step_of_many_products_is_held_to_products(ceilings: Ceilings) -> None:
    found = timings(step=24.0, product=2.0, copy=1e-9)
    assert ceilings.over_roofline(4 * ceilings.product_flops, found, "step", "wall").median == 3.0


def test_a_step_of_few_products_is_held_to_copies(ceilings: Ceilings) -> None:
    found = timings(step=6.0, product=1e-9, copy=2.0)  # a copy reads and writes: 120 bytes; the step moves 180
    assert ceilings.over_roofline(1, found, "step", "wall").median == 2.0


def test_utilisation_is_the_share_of_the_product_s_speed(ceilings: Ceilings) -> None:
    found = timings(step=8.0, product=1.0, copy=1.0)
    assert ceilings.utilisation(4 * ceilings.product_flops, found, "step", "wall").median == 0.5


def test_they_can_be_timed(ceilings: Ceilings) -> None:
    found = alternate({"step": lambda: None, **ceilings.callables}, seconds=0.0)
    assert found.of(PRODUCT, "wall").median > 0
    assert found.of(COPY, "wall").median > 0
