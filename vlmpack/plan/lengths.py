"""Lengths and budgets: validated here once, so that packing algorithms can trust them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, final, get_args

import numpy as np

from vlmpack.errors import ConfigError, SampleError, check_choice, check_whole_number

Whole = TypeVar("Whole", int, np.ndarray)


def divided_up(number: Whole, by: int) -> Whole:
    """`number / by`, rounded up."""
    return -(-number // by)


def round_up(number: Whole, multiple: int) -> Whole:
    """Return the smallest multiple of `multiple` that is at least `number`."""
    return divided_up(number, multiple) * multiple


Overlength = Literal["error", "drop", "truncate", "truncate_start", "own_row"]
"""What to do with a sample that is too long, for `max_length` or for a row: refuse it; leave it out and count it; keep
its first or its last tokens; or keep it whole, in its own row."""
TRUNCATING = ("truncate", "truncate_start")
OVERLENGTH = "overlength"
"""The reason under which samples that are too long are counted."""

LARGEST = 2**31 - 1
"""Limit of lengths, capacities and sample counts: two such numbers fit one int64, which sorts fast."""

SHOWN = 10
"""How many samples an error message lists."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Budget:
    """A limit of a row besides tokens, such as vision patches or images."""

    name: str
    """What is counted, for messages and the manifest."""
    costs: np.ndarray
    """int64 [N]: cost of each sample, 0 or more."""
    limit: int
    """Maximum sum of the costs in a row."""
    shared: np.ndarray | None = None
    """int64 [K]: cost of each group's prefix; None: samples share none of the cost."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "limit", checked_capacity(self.limit, f"the limit of budget {self.name!r}"))
        costs = whole_numbers(self.costs, f"{self.name} of a sample")
        _refuse(costs < 0, costs, f"{self.name} of a sample", "are negative", "bad_cost")
        object.__setattr__(self, "costs", costs)
        if self.shared is not None:
            object.__setattr__(self, "shared", whole_numbers(self.shared, f"{self.name} of a prefix"))

    def of_groups(self, count: int) -> np.ndarray:
        """Return the cost of the prefix of each of `count` groups, int64 [K].

        Raises:
            ConfigError: the budget has shared costs for another number of groups.
        """
        shared = np.zeros(count, np.int64) if self.shared is None else self.shared
        if len(shared) != count:
            raise ConfigError(f"budget {self.name!r} has shared costs of {len(shared)} groups, and there are {count}")
        return shared


def checked_lengths(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the lengths as int64 [N], each at least 1.

    Raises:
        ConfigError: the lengths are not one-dimensional, empty, or not numbers.
        SampleError: a length is not finite, not whole, zero or negative; names the first such sample.
    """
    checked = whole_numbers(lengths, "length of a sample")
    if not len(checked):
        raise ConfigError("there is nothing to plan: the list of lengths is empty")
    if (bad := checked < 1).any():
        at = int(bad.argmax())
        fault = f"has length {checked[at]}; a sample needs at least one token. Leave empty samples out before planning"
        raise SampleError(fault, index=at, reason="empty")
    return checked


def whole_numbers(values: Sequence[int] | np.ndarray, what: str) -> np.ndarray:
    """Return `values` as an int64 vector of numbers below 2^31.

    Raises:
        ConfigError: the values are not one-dimensional, or not numbers.
        SampleError: a value is not finite, not whole or too large; names the first such sample.
    """
    try:
        numbers = np.asarray(values) if len(values) else np.zeros(0, np.int64)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists; a tensor on a device, or with a gradient
        raise ConfigError(
            f"the {what} must be one whole number: expected a list or vector of integers, got a "
            f"{type(values).__name__} ({error})"
        ) from error
    if numbers.ndim != 1 or numbers.dtype.kind not in "iuf":
        raise ConfigError(
            f"the {what} must be one whole number: expected a vector of integers, got "
            f"{numbers.ndim} dimensions of {numbers.dtype}"
        )
    if numbers.dtype.kind == "f":
        _refuse(~np.isfinite(numbers), numbers, what, "is not finite", "not_finite")
        _refuse(numbers != np.rint(numbers), numbers, what, "is not a whole number", "not_whole")
    _refuse(numbers > LARGEST, numbers, what, f"is above {LARGEST}", "too_large")
    return numbers.astype(np.int64)


def checked_capacity(capacity: int, what: str = "the capacity of a row") -> int:
    """Return `capacity` as an int.

    Raises:
        ConfigError: it is not a whole number of at least 1 and below 2^31.
    """
    return check_whole_number(what, capacity, at_most=LARGEST)


def check_seed(seed: int | None) -> None:
    """Check that `seed` is None or a whole number of at least 0.

    Raises:
        ConfigError: it is something else.
    """
    if seed is not None:
        check_whole_number("the seed", seed, at_least=0, remedy="or None for no shuffle")


def check_overlength(overlength: Overlength) -> None:
    """Check what to do with samples that are too long for a row. Rows are made of lengths, which nothing can truncate.

    Raises:
        ConfigError: there is no such choice, or it truncates.
    """
    check_choice("overlength", overlength, get_args(Overlength))
    if overlength in TRUNCATING:
        raise ConfigError(
            f"overlength={overlength!r}: rows are planned from lengths, so the collator has to truncate: "
            f"VLMCollator(max_length=capacity, overlength={overlength!r})"
        )


def _refuse(bad: np.ndarray, values: np.ndarray, what: str, fault: str, reason: str) -> None:
    if bad.any():
        at = int(bad.argmax())
        raise SampleError(f"the {what} {fault}: {values[at]}", index=at, reason=reason)
