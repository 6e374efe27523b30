"""Boundaries of a packed row (`Segments`), and the rule for padding its segments (`SlotRule`).

A slot is the span of a segment with the padding behind it. Lengths [3, 5, 2], slots a multiple of 4:

    row      a a a .  b b b b b . . .  c c . .
    real     [0, 3, 8, 10]               cu_seqlens:        cumulative real tokens
    stride   [0, 4, 12, 16]              cu_seqlens_padded: where slots start in the row

A model computes rows without gaps (`without_gaps`): all samples, then the padding that the row's width needs, as
segments that belong to no sample.

G segments, T row tokens (`total`), R real tokens (`num_tokens`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import lcm
from operator import index
from typing import Any, Literal, TypeVar, final, get_args

import numpy as np
import torch

from vlmpack.errors import LayoutError, check_choice, check_whole_number
from vlmpack.layout.device import outside_graph, to_device

Kept = TypeVar("Kept")

TAIL_PIECE = 128
"""Maximum length in tokens of the segments that padding behind the samples is split into: attention over n tokens of
padding then costs n * 128 pairs instead of n * n."""

Precision = Literal["fp32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"]
"""Number format of matrix products."""

ROWS_PER_BLOCK: dict[Precision, int] = {"fp32": 1, "bf16": 1, "fp16": 1, "fp8": 16, "mxfp8": 32, "nvfp4": 128}
"""The number of tokens on each rank must be a multiple of this: low-precision products read tokens in blocks."""

Layout = Literal["mirrored", "contiguous"]
"""How a row is split over context-parallel ranks.

mirrored      every segment is split into 2 * ranks chunks; a rank gets one from the front and its mirror image from the
              back
contiguous    the row is split into one piece per rank, wherever segments end
"""


@final
@dataclass(frozen=True, kw_only=True)
class SlotRule:
    """The rule for the padded length of each segment and of the whole row."""

    multiple: int = 1
    """Each segment is padded to a multiple of this; 1: no gaps at all."""
    row_multiple: int = 1
    """The row's width is rounded up to a multiple of this by padding at its end (fp8 16, mxfp8 32, nvfp4 128)."""
    pad_to: int | None = None
    """A fixed row width in tokens (CUDA graphs); rows that need more are an error; None: not fixed."""
    max_segments: int | None = None
    """A fixed number of segments: the final boundary is repeated to reach it; more samples are an error; None: not
    fixed."""
    tail_in_slot: bool = False
    """True: padding at the row's end belongs to the last sample's slot, so that slots cover the row (mirrored
    layout)."""

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
        """Return the rule with the least padding that lets ranks split a row evenly.

        The contiguous layout, used by models with packing enabled, needs no gaps: only the row's width is a multiple of
        `context`. The mirrored layout, used by Megatron, needs slots that are a multiple of lcm(2 * context if context
        > 1 else 1, context * tensor if sequence_parallel else context). This is Megatron-Bridge's rule without its
        waste. Low precision needs a multiple of 16 (fp8), 32 (mxfp8) or 128 (nvfp4) tokens per rank; that padding goes
        to the row's end.

        Args:
            context: number of context-parallel ranks.
            tensor: number of tensor-parallel ranks.
            sequence_parallel: True if tensor-parallel ranks split tokens between them outside attention.
            precision: number format of matrix products.
            layout: how a row is split over context-parallel ranks: `contiguous` for `enable_packing`, `mirrored` for
                Megatron and ring attention.
            pad_to: see the field.
            max_segments: see the field.

        Raises:
            LayoutError: a number of ranks is below 1, or `pad_to` cannot be split evenly.
            ConfigError: `precision` or `layout` is unknown.
        """
        check_whole_number("SlotRule.for_parallel: context", context, error=LayoutError)
        check_whole_number("SlotRule.for_parallel: tensor", tensor, error=LayoutError)
        check_choice("SlotRule.for_parallel: precision", precision, get_args(Precision))
        check_choice("SlotRule.for_parallel: layout", layout, get_args(Layout))
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
            if (value := getattr(self, name)) is not None:
                check_whole_number(f"SlotRule.{name}", value, error=LayoutError)
        if self.pad_to is not None and self.pad_to % self.row_multiple:
            raise LayoutError(
                f"SlotRule.pad_to={self.pad_to} is not a multiple of row_multiple={self.row_multiple}; "
                f"use pad_to={round_up(self.pad_to, self.row_multiple)}"
            )


NO_PADDING = SlotRule()
"""Neither gaps between samples nor a rounded width."""


def round_up(n: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `n`."""
    return -(-n // multiple) * multiple


def checked_boundaries(values: torch.Tensor | np.ndarray | Sequence[int], name: str) -> tuple[int, ...]:
    """Convert boundaries to Python ints and check them; a tensor on a device costs a host-device sync.

    Args:
        values: G + 1 whole numbers in one dimension, for G segments.
        name: name of the boundaries, for the message.

    Raises:
        LayoutError: `values` are anything else, fewer than two, do not start at 0, or decrease. Names the boundary.
    """
    try:
        boundaries = tuple(index(v) for v in (values.tolist() if isinstance(values, torch.Tensor) else values))
    except TypeError:
        is_array = isinstance(values, torch.Tensor | np.ndarray)
        seen = f"{values.dtype} {list(values.shape)}" if is_array else f"{type(values).__name__} {values!r}"
        raise LayoutError(
            f"{name} must be whole numbers in a tensor [segments + 1], a list or a tuple; got {seen:.80}"
        ) from None
    if len(boundaries) < 2 or boundaries[0] != 0:
        raise LayoutError(
            f"{name} must start at 0 and hold at least two boundaries, got {list(boundaries)[:6]}; was the batch split "
            "on its way (accelerate: set dispatch_batches=False)?"
        )
    for i, (a, b) in enumerate(pairwise(boundaries)):
        if b < a:
            raise LayoutError(f"{name} must never decrease, but segment {i} runs from {a} to {b}")
    return boundaries


@final
@dataclass(frozen=True, kw_only=True)
class Segments:
    """The boundaries of one packed row: Python ints on the host, and index tensors derived from them once per device.

    No property reads a device tensor, so none needs a host-device sync.
    """

    lengths: tuple[int, ...]
    """Number of real tokens of each segment."""
    slots: tuple[int, ...]
    """Padded length of each segment, `slots[i] >= lengths[i]`."""
    total: int
    """Width T of the row, at least `sum(slots)`; the rest is the row's tail and belongs to no sample."""
    num_samples: int
    """Number of leading segments that are samples; later ones are repeated final boundaries, or padding."""

    # ------------------------------------------------------------------ constructors

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], rule: SlotRule | None = None) -> Segments:
        """Place samples of these lengths (tokens) in a row, padded by `rule`.

        Raises:
            LayoutError: there are no lengths, a length is negative or not a whole number, or there are more samples
                than `max_segments` or more tokens than `pad_to`.
        """
        rule = rule or NO_PADDING
        try:
            lengths = tuple(index(n) for n in lengths)
        except TypeError:
            raise LayoutError(f"lengths are whole numbers of tokens, got {lengths!r:.80}") from None
        if not lengths:
            raise LayoutError("a row needs at least one sample, got an empty list of lengths")
        if (least := min(lengths)) < 0:
            raise LayoutError(f"row {lengths.index(least)}: a length cannot be negative, got {least}")
        slots = tuple(round_up(n, rule.multiple) for n in lengths)
        needed, count = sum(slots), len(lengths)
        if rule.pad_to is not None and needed > rule.pad_to:
            raise LayoutError(
                f"the samples take {needed} tokens of row but pad_to={rule.pad_to}; "
                "raise pad_to, or put fewer or shorter samples into the batch"
            )
        if rule.max_segments is not None and count > rule.max_segments:
            raise LayoutError(
                f"{count} samples but max_segments={rule.max_segments}; raise max_segments or use smaller batches"
            )
        total = rule.pad_to or round_up(needed, rule.row_multiple)
        repeated = (0,) * ((rule.max_segments or count) - count)
        segments = cls(lengths=lengths + repeated, slots=slots + repeated, total=total, num_samples=count)
        return segments.without_tail() if rule.tail_in_slot else segments

    @classmethod
    def from_boundaries(
        cls,
        real: Sequence[int] | torch.Tensor,
        stride: Sequence[int] | torch.Tensor | None = None,
        *,
        total: int | None = None,
        num_samples: int | None = None,
    ) -> Segments:
        """Read segments from cumulative boundaries (`cu_seqlens_q`, `cu_seqlens_q_padded`).

        Reading tensors on a device costs a host-device sync, the only one in this class.

        Args:
            real: cumulative real tokens, G + 1 values from 0.
            stride: cumulative padded lengths; None: the same as `real` (no gaps).
            total: row width T; None: `stride[-1]`.
            num_samples: number of leading segments that are samples; None: all but trailing repeated boundaries.

        Raises:
            LayoutError: boundaries are not whole numbers, do not start at 0, decrease, differ in number, or exceed a
                slot or the row.
        """
        real = checked_boundaries(real, "cu_seqlens_q")
        stride = real if stride is None else checked_boundaries(stride, "cu_seqlens_q_padded")
        if len(real) != len(stride):
            raise LayoutError(
                f"cu_seqlens_q has {len(real)} boundaries but cu_seqlens_q_padded has {len(stride)}; "
                "both need one more than there are segments"
            )
        lengths = tuple(b - a for a, b in pairwise(real))
        slots = tuple(b - a for a, b in pairwise(stride))
        for i, (length, slot) in enumerate(zip(lengths, slots, strict=True)):
            if length > slot:
                raise LayoutError(f"segment {i}: {length} real tokens do not fit its slot of {slot}")
        total = stride[-1] if total is None else total
        if total < stride[-1]:
            raise LayoutError(f"boundaries end at {stride[-1]} but the row is only {total} tokens wide")
        if num_samples is None:
            num_samples = max((i + 1 for i, slot in enumerate(slots) if slot), default=len(slots))
        return cls(lengths=lengths, slots=slots, total=total, num_samples=num_samples)

    def without_tail(self) -> Segments:
        """Return the same row with its tail moved into the last sample's slot, so that slots cover the row."""
        tail, last = self.total - sum(self.slots), max(self.num_samples, 1) - 1
        slots = (*self.slots[:last], self.slots[last] + tail, *self.slots[last + 1 :])
        return replace(self, slots=slots) if tail else self

    def without_gaps(self, rule: SlotRule | None = None) -> Segments:
        """Return the boundaries with which a model computes these samples: all samples without gaps, then the padding.

        A row without gaps keeps its width, and so does a row of the fixed width `rule.pad_to`. Otherwise, the padding
        between samples is dropped, and the width is rounded up to `rule.row_multiple`. The padding that remains is
        split into segments of at most `TAIL_PIECE` tokens. If the number of segments is fixed (`max_segments`), the
        number of padding segments depends on the row's width alone, not on its samples.
        """
        rule, total = rule or NO_PADDING, self.total
        if self.slots != self.lengths and total != rule.pad_to:
            total = min(total, round_up(max(self.num_tokens, 1), rule.row_multiple))
        tail = total - self.num_tokens
        is_fixed = rule.max_segments is not None or len(self.lengths) > self.num_samples
        if not tail and not is_fixed and self.slots == self.lengths:
            return self
        pieces = -(-total // TAIL_PIECE) if is_fixed else -(-tail // TAIL_PIECE)
        cut = tuple(min(max(tail - at * TAIL_PIECE, 0), TAIL_PIECE) for at in range(pieces))
        covered = self.lengths + cut
        # Kept, with its tensors: a row that goes through a model again is not copied again.
        return self.kept(("covered", covered), lambda: replace(self, lengths=covered, slots=covered, total=total))

    # ------------------------------------------------------------------ on the host

    @cached_property
    def real(self) -> tuple[int, ...]:
        """Cumulative real tokens, G + 1 values: the values of `cu_seqlens`."""
        return (0, *accumulate(self.lengths))

    @cached_property
    def stride(self) -> tuple[int, ...]:
        """Start of each slot in the row, G + 1 values: the values of `cu_seqlens_padded`."""
        return (0, *accumulate(self.slots))

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) in the row of each segment's real tokens, G pairs."""
        return tuple((start, start + n) for start, n in zip(self.stride, self.lengths, strict=False))

    def where(self, place: int) -> str:
        """Name a token of the row in words, for messages."""
        sample = bisect_right(self.stride, place) - 1
        is_real = sample < self.num_samples and place < self.spans[sample][1]
        return f"sample {sample}, token {place - self.stride[sample]}" if is_real else f"padding at place {place}"

    @property
    def max_length(self) -> int:
        """Length of the longest segment in real tokens."""
        return max(self.lengths)

    @property
    def longest(self) -> int:
        """A limit of `max_length` for kernels. If `SlotRule` fixes the number of segments, it is the row's width: the
        same in every row, because a CUDA graph keeps it."""
        is_fixed = len(self.lengths) - self.num_samples >= -(-self.total // TAIL_PIECE)
        return self.total if is_fixed else self.max_length

    @property
    def sample_lengths(self) -> tuple[int, ...]:
        """Number of tokens of each sample."""
        return self.lengths[: self.num_samples]

    @cached_property
    def num_tokens(self) -> int:
        """Number R of real tokens: the tokens of all samples."""
        return sum(self.sample_lengths)

    @property
    def has_padding(self) -> bool:
        """True if any position of the row belongs to no sample."""
        return self.num_tokens != self.total

    @property
    def fill(self) -> float:
        """Fraction of the row's tokens that are real, 0 to 1."""
        return self.num_tokens / self.total if self.total else 0.0

    def in_chunks(self, size: int) -> Segments:
        """Return the same row split into chunks of `size` tokens, counted from the start of each segment.

        The last chunk of a segment may be shorter.

        size 2    a a | a .   b b | b b | b . . .   c c . .        padding is in the last chunk's slot
        """
        return self if self.max_length <= size else self.kept(("chunks", size), lambda: self._cut(size))

    def _cut(self, size: int) -> Segments:
        wholes = [max(length - 1, 0) // size for length in self.lengths]
        rows = list(zip(wholes, self.lengths, self.slots, strict=True))
        return Segments(
            lengths=tuple(n for whole, length, _ in rows for n in (*(size,) * whole, length - whole * size)),
            slots=tuple(n for whole, _, slot in rows for n in (*(size,) * whole, slot - whole * size)),
            total=self.total,
            num_samples=sum(wholes[: self.num_samples]) + self.num_samples,
        )

    @property
    def attended_pairs(self) -> int:
        """Number of query-key pairs of causal attention inside the samples: the sum of n (n + 1) / 2."""
        return sum(n * (n + 1) // 2 for n in self.sample_lengths)

    @property
    def slots_and_tail(self) -> tuple[int, ...]:
        """Length of each slot, then of the row's tail: G + 1 values that cover the row."""
        return (*self.slots, self.total - sum(self.slots))

    # ------------------------------------------------------------------ the same on a device

    def cu_seqlens(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return `real` as int32 [G + 1]."""
        return self.derived("real", device, lambda: np.asarray(self.real, np.int32))

    def cu_seqlens_padded(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return `stride` as int32 [G + 1]."""
        return self.derived("stride", device, lambda: np.asarray(self.stride, np.int32))

    def seq_idx(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """int32 [T]: the segment of each token, padding behind a segment included; G on the row's tail."""
        return self.derived("seq_idx", device, self._seq_idx)

    def padding_mask(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """bool [T]: True on padding."""
        return self.derived("padding", device, self._padding)

    def real_index(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """int64 [R]: positions of the real tokens in the row, in order."""
        return self.derived("real_index", device, self._real_index)

    def position_in_segment(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """int64 [T]: 0, 1, 2, ... from each segment's start; 0 on padding outside segments."""
        return self.derived("position", device, self._position)

    def first_tokens(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """int64 [at most G]: position of each segment's first real token in the row; empty segments are left out."""
        return self.derived("first", device, lambda: np.asarray([a for a, b in self.spans if b > a], np.int64))

    def last_tokens(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """int64 [at most G]: position of each segment's last real token in the row; empty segments are left out."""
        return self.derived("last", device, lambda: np.asarray([b - 1 for a, b in self.spans if b > a], np.int64))

    def _seq_idx(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.lengths) + 1, dtype=np.int32), self.slots_and_tail)

    def _padding(self) -> np.ndarray:
        mask = np.full(self.total, self.has_padding)
        for start, stop in self.spans[: self.num_samples] if self.has_padding else ():
            mask[start:stop] = False
        return mask

    def _real_index(self) -> np.ndarray:
        return ranges(np.asarray(self.stride[: self.num_samples], np.int64), np.asarray(self.sample_lengths, np.int64))

    def _position(self) -> np.ndarray:
        if self.real[-1] == self.total:  # copies of one range touch less memory than `ranges` does
            longest = np.arange(self.max_length)
            return np.concatenate([longest[:n] for n in self.lengths])
        return np.where(self._padding(), 0, ranges(0, np.asarray(self.slots_and_tail, np.int64)))

    @cached_property
    def _kept(self) -> dict[Hashable, Any]:
        """Cache; not a field, so that a dataclass rebuilt field by field (FSDP's mixed precision) starts empty."""
        return {}

    @outside_graph
    def kept(self, key: Hashable, make: Callable[[], Kept]) -> Kept:
        """Return the result of `make`, which depends on the boundaries alone; cached by key."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def derived(self, key: Hashable, device: torch.device | str, make: Callable[[], np.ndarray]) -> torch.Tensor:
        """Return the index array of `make`, which depends on the boundaries alone, on `device`; cached by key."""
        place = torch.device(device)
        return self.kept((key, place), lambda: to_device(make(), place))

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the fields only: a DataLoader worker sends a few ints, and derived tensors are recomputed."""
        return {field.name: self.__dict__[field.name] for field in fields(self)}


def ranges(starts: np.ndarray | int, lengths: np.ndarray, dtype: type[np.integer] = np.int64) -> np.ndarray:
    """Concatenate the ranges [start, start + length) into one array of type `dtype`."""
    before = np.cumsum(lengths) - lengths
    numbers = np.arange(lengths.sum(), dtype=dtype)
    numbers += np.repeat((starts - before).astype(dtype), lengths)
    return numbers
