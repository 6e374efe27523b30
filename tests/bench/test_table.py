"""Numbers as people read them."""

from __future__ import annotations

import pytest

from vlmpack.bench.table import readable


@pytest.mark.parametrize(
    ("values", "unit", "expected"),
    [
        ([0.0000125], "s", "12.5 µs"),
        ([0.00152, 0.00161], "s", "1.52 to 1.61 ms"),
        ([0.9, 1.1], "s", "0.9 to 1.1 s"),
        ([512], "bytes", "512 bytes"),
        ([3 * 2**20], "bytes", "3 MiB"),
        ([0.5741], "x", "0.574 x"),
        ([61234.5], "tokens/s", "61,234 tokens/s"),
    ],
)
def test_numbers_keep_three_digits_and_one_unit(values, unit, expected):
    assert readable(values, unit) == expected
