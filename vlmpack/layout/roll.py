"""Roll tokens to the left inside each segment of a row, shift labels so, and back: nothing crosses a boundary.

Lengths [3, 5, 2], slots a multiple of 4, fill 0:

    row        1 2 3 .  4 5 6 7 8 . . .  9 10 . .
    depth 1    2 3 0 0  5 6 7 8 0 0 0 0  10 0 0 0
    depth 2    3 0 0 0  6 7 8 0 0 0 0 0  0  0 0 0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import torch

from vlmpack.errors import LayoutError
from vlmpack.layout import arrays
from vlmpack.layout.device import outside_graph, require
from vlmpack.layout.segments import Segments

IGNORE = -100
"""The label that cross-entropy leaves out."""


def roll_left(
    row_tensor: torch.Tensor, segments: Segments, *, depth: int = 1, fill: float, token_dim: int = -1
) -> torch.Tensor:
    """`out[..., i] = row_tensor[..., i + depth]` inside a segment's real tokens, `fill` on every other place.

    Rolling by 1 twice is rolling by 2. Differentiable; no host-device sync.

    Args:
        row_tensor: [1, T], [k, 1, T], or any other shape with the row's T tokens along `token_dim`; any type.
        segments: the row's boundaries: gaps, a tail and repeated boundaries included.
        depth: tokens to move by, at least 1.
        fill: what the last `depth` tokens of a segment and padding get: 0, True for a padding mask, -100 for labels.
        token_dim: the dimension of length T.

    Raises:
        LayoutError: the tensor is not a row of these segments, or a depth below 1.
    """
    if row_tensor.shape[token_dim] != segments.total:
        raise LayoutError(
            f"roll_left: the row is {segments.total} tokens wide by its boundaries, the tensor "
            f"{list(row_tensor.shape)} has {row_tensor.shape[token_dim]} at dimension {token_dim}; "
            "a part of a row is rolled with its halo"
        )
    ends = without_successor(segments, depth, row_tensor.device)
    return torch.roll(row_tensor, -depth, dims=token_dim).index_fill_(token_dim, ends, fill)


@outside_graph
def without_successor(segments: Segments, depth: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """int64 [n]: where in the row no token of the same segment comes `depth` places later; all padding is there.

    Raises:
        LayoutError: a depth below 1.
    """
    if depth < 1:
        raise LayoutError(f"a row is rolled left by at least 1 token, got depth={depth}; the row itself is depth 0")
    return segments.derived(("without_successor", depth), device, lambda: _without_successor(segments, depth))


def shift_labels(labels: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Targets of a row: `out[..., i] = labels[..., i + 1]` inside a segment, -100 on last tokens and padding.

    Args:
        labels: [1, T] int64, not shifted.
        segments: the row's boundaries.
    """
    return roll_left(labels, segments, depth=1, fill=IGNORE)


def unshift_labels(shifted: torch.Tensor, segments: Segments) -> torch.Tensor:
    """The inverse of `shift_labels`; each segment's first label, which predicts nothing, becomes -100."""
    return torch.roll(shifted, 1, dims=-1).index_fill_(-1, _without_predecessor(segments, shifted.device), IGNORE)


def check_none_on_padding(labels: torch.Tensor, segments: Segments, message: str) -> None:
    """Raise if padding of a row has a label, shifted or not, [1, T]: it belongs to no sample.

    Raises:
        LayoutError: some has (an accelerator asserts the same, asynchronously).
    """
    if segments.has_gaps:
        stray = (labels != IGNORE) & segments.padding_mask(labels.device)
        require(~stray.any(), message, LayoutError)


@outside_graph
def _without_predecessor(segments: Segments, device: torch.device | str) -> torch.Tensor:
    """int64 [n]: first tokens, and all padding."""
    if not segments.has_gaps:
        return segments.first_tokens(device)
    return segments.derived("without_predecessor", device, lambda: np.flatnonzero(arrays.position(segments) == 0))


def stops_of_tokens(segments: Segments) -> np.ndarray:
    """int64 [T]: where the real tokens end of the segment in whose slot each token is; 0 on the row's tail."""
    return np.repeat([*(stop for _, stop in segments.spans), 0], arrays.slots_and_tail(segments))


def _without_successor(segments: Segments, depth: int) -> np.ndarray:
    if depth == 1 and not segments.has_gaps:
        return arrays.last_tokens(segments)
    starts = np.asarray((*segments.stride, segments.total), np.int64)
    stops = starts[:-1] + np.asarray((*segments.lengths, 0))
    firsts = np.maximum(starts[:-1], stops - depth)
    return arrays.ranges(firsts, starts[1:] - firsts)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class DepthTargets:
    """The targets of each depth, and their number in the whole row."""

    targets: torch.Tensor
    """[K, 1, T] int64: -100 where a depth has none."""
    counts: torch.Tensor
    """[K] int64: targets of each depth in the whole row, also where `targets` are cut to a part of it."""

    @classmethod
    def of(cls, shift_labels: torch.Tensor, segments: Segments, *, depths: int) -> DepthTargets:
        """Compute those of a whole row, without a host-device sync.

        Args:
            shift_labels: [1, T] targets of the main head.
            segments: the row's boundaries.
            depths: K, at least 1.

        Raises:
            LayoutError: labels of another width, or no depth.
        """
        if depths < 1:
            raise LayoutError(f"multi-token prediction has at least 1 depth beside the main head, got depths={depths}")
        rolled = [roll_left(shift_labels, segments, depth=depth, fill=IGNORE) for depth in range(1, depths + 1)]
        targets = torch.stack(rolled)
        return cls(targets=targets, counts=(targets != IGNORE).sum((1, 2)))

    def sums(self, token_losses: torch.Tensor) -> torch.Tensor:
        """[K] losses summed over `targets`; 0 where a depth has none, whatever its losses are.

        Args:
            token_losses: [K, 1, T], not reduced.

        Raises:
            LayoutError: losses of another shape than the targets.
        """
        if token_losses.shape != self.targets.shape:
            raise LayoutError(
                f"every target has one loss: expected {list(self.targets.shape)}, got {list(token_losses.shape)}"
            )
        return token_losses.where(self.targets != IGNORE, 0).sum((1, 2))

    def losses(self, token_losses: torch.Tensor) -> torch.Tensor:
        """[K] mean losses of the row: summed over `targets`, over the counts of the whole row.

        Those of all parts of a row add up to those of the row, exactly; a part without a target adds 0, never NaN.
        """
        return self.sums(token_losses) / self.counts.clamp(min=1)
