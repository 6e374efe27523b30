"""Slot rules: the room that segments and rows take up."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Literal, final

from vlmpack.errors import LayoutError

PAD_PIECE = 128
"""A pad run longer than this is cut, for attention kernels, into pieces of this many tokens: n tokens of
padding then cost n * 128 pairs, not n * n."""

Precision = Literal["fp32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"]
"""What matrix products are computed in."""

ROWS_PER_BLOCK: dict[Precision, int] = {"fp32": 1, "bf16": 1, "fp16": 1, "fp8": 16, "mxfp8": 32, "nvfp4": 128}
"""Each rank's number of tokens must be a multiple of this: low-precision products read tokens in blocks."""

Layout = Literal["mirrored", "contiguous"]
"""How a row is cut over context-parallel ranks: every segment in 2 * ranks chunks, of which a rank has one from the
front and its mirror image from the back; or the row in as many pieces as there are ranks, wherever segments end."""


@final
@dataclass(frozen=True, kw_only=True)
class SlotRule:
    """The room that each segment, and the whole row, takes up."""

    multiple: int = 1
    """Each segment's slot is its length rounded up to a multiple of this. 1: no gaps at all."""
    row_multiple: int = 1
    """The row's width is rounded up to a multiple of this, on the row's tail (fp8 16, mxfp8 32, nvfp4 128)."""
    pad_to: int | None = None
    """A fixed row width in tokens (CUDA graphs); rows that need more are an error."""
    max_segments: int | None = None
    """A fixed number of segments: the final boundary is repeated up to it; more samples are an error."""
    tail_in_slot: bool = False
    """True: the row's tail belongs to the last sample's slot, so that slots cover the row (mirrored cuts)."""

    @classmethod
    def for_parallel(
        cls,
        *,
        context: int = 1,
        tensor: int = 1,
        sequence_parallel: bool = False,
        precision: Precision = "bf16",
        layout: Layout = "contiguous",
        pad_to: int | None = None,
        max_segments: int | None = None,
    ) -> SlotRule:
        """The least room under which a row can be cut over ranks.

        A contiguous cut, that of a model with packing enabled, takes slots without gaps: only the row's width is a
        multiple of context. A mirrored cut, Megatron's, needs slots that are a multiple of lcm(2 context if context >
        1, context * tensor under sequence parallel): Megatron-Bridge's rule, without its waste. What the number of
        tokens on a rank has to be a multiple of, 16 (fp8), 32 (mxfp8) or 128 (nvfp4), goes on the row's tail.

        Args:
            context: context-parallel ranks.
            tensor: tensor-parallel ranks.
            sequence_parallel: True if tensor-parallel ranks split tokens between them outside attention.
            precision: of the matrix products.
            layout: how a row is cut over context-parallel ranks: `contiguous` for `enable_packing`, `mirrored` for
                Megatron and ring attention.
            pad_to: as the field.
            max_segments: as the field.

        Raises:
            LayoutError: a number of ranks below 1, a precision or a layout that is not known, or a `pad_to` that
                cannot be cut.
        """
        _check_ranks(context=context, tensor=tensor)
        _check_choice("precision", precision, tuple(ROWS_PER_BLOCK))
        _check_choice("layout", layout, ("mirrored", "contiguous"))
        shards = context * tensor if sequence_parallel else context
        multiple = lcm(2 * context if context > 1 else 1, shards) if layout == "mirrored" else 1
        return cls(
            multiple=multiple,
            row_multiple=lcm(multiple, shards * ROWS_PER_BLOCK[precision]),
            pad_to=pad_to,
            max_segments=max_segments,
            tail_in_slot=layout == "mirrored" and context > 1,
        )

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


def _check_ranks(**ranks: int) -> None:
    for name, count in ranks.items():
        if not isinstance(count, int) or count < 1:
            raise LayoutError(f"SlotRule.for_parallel: {name} counts ranks, at least 1, got {count!r}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise LayoutError(f"SlotRule.for_parallel: {name}={value!r} is not known; use one of {', '.join(choices)}")


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
    """Number of times that the final boundary is repeated after `count` samples."""
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
