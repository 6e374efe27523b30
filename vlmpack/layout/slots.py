"""How much room segments and rows take up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from vlmpack.errors import LayoutError

PAD_PIECE = 128
"""A pad run longer than this is cut, for attention kernels, into pieces of this many tokens: n tokens of
padding then cost n * 128 pairs, not n * n."""


@final
@dataclass(frozen=True, kw_only=True)
class SlotRule:
    """How much room each segment, and the whole row, takes up."""

    multiple: int = 1
    """Each segment's slot is its length rounded up to a multiple of this. 1: no gaps at all."""
    row_multiple: int = 1
    """The row's width is rounded up to a multiple of this, on the row's tail (tensor parallel, fp8 16, mxfp8 32)."""
    pad_to: int | None = None
    """A fixed row width in tokens (CUDA graphs); rows that need more are an error."""
    max_segments: int | None = None
    """A fixed number of segments: the final boundary is repeated up to it; more samples are an error."""

    def __post_init__(self) -> None:
        for name in ("multiple", "row_multiple", "pad_to", "max_segments"):
            value = self.__dict__[name]
            if value is not None and (not isinstance(value, int) or value < 1):
                raise LayoutError(f"SlotRule.{name} must be a whole number of at least 1, got {value!r}")
        if self.pad_to is not None and self.pad_to % self.row_multiple:
            raise LayoutError(
                f"SlotRule.pad_to={self.pad_to} is not a multiple of row_multiple={self.row_multiple}; "
                f"use pad_to={round_up(self.pad_to, self.row_multiple)}"
            )


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `n`."""
    return -(-n // multiple) * multiple


def row_width(needed: int, rule: SlotRule) -> int:
    """T: the row's width in tokens when its slots take up `needed`."""
    if rule.pad_to is None:
        return round_up(needed, rule.row_multiple)
    if needed > rule.pad_to:
        raise LayoutError(
            f"the samples take {needed} tokens of row but pad_to={rule.pad_to}; "
            "raise pad_to, or put fewer or shorter samples into the batch"
        )
    return rule.pad_to


def missing_segments(count: int, rule: SlotRule) -> int:
    """How many times the final boundary is repeated after `count` samples."""
    if rule.max_segments is None:
        return 0
    if count > rule.max_segments:
        raise LayoutError(
            f"{count} samples but max_segments={rule.max_segments}; raise max_segments or use smaller batches"
        )
    return rule.max_segments - count


def kernel_bound(total: int, rule: SlotRule) -> int | None:
    """The most boundaries that `kernel` can have under `rule`, so that its tensor keeps one shape."""
    if rule.max_segments is None:
        return None
    tails = round_up(rule.multiple - 1, PAD_PIECE) // PAD_PIECE
    return 1 + rule.max_segments * (1 + tails) + round_up(total, PAD_PIECE) // PAD_PIECE
