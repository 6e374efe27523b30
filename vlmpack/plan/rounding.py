"""Rounding up in whole numbers, one or a whole array of them, without floats."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

Whole = TypeVar("Whole", int, np.ndarray)


def divided_up(number: Whole, by: int) -> Whole:
    """`number / by`, rounded up."""
    return -(-number // by)


def round_up(number: Whole, multiple: int) -> Whole:
    """The least multiple of `multiple` that is not below `number`."""
    return divided_up(number, multiple) * multiple
