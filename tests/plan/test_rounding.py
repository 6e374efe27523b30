"""Whole numbers are rounded up without a float, however large they are."""

from __future__ import annotations

import numpy as np

from vlmpack.plan.lengths import divided_up, round_up


def test_a_quotient_is_rounded_up() -> None:
    assert [divided_up(number, 3) for number in range(5)] == [0, 1, 1, 1, 2]


def test_so_it_is_where_a_float_would_lose_the_last_digit() -> None:
    assert divided_up(2**60 + 1, 2) == 2**59 + 1


def test_a_number_becomes_the_next_multiple_and_a_multiple_stays() -> None:
    assert [round_up(number, 4) for number in (0, 1, 4, 5)] == [0, 4, 4, 8]


def test_an_array_is_rounded_number_by_number() -> None:
    rounded = round_up(np.array([1, 8, 9]), 8)
    assert rounded.tolist() == [8, 8, 16]
    assert rounded.dtype == np.int64
