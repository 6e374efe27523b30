"""Targets of multi-token prediction: heads that predict the token 1, 2, ... places behind that of the main head.

One sample of 5 tokens, labels a b c d e, 2 depths:

    main head    b c d e .      shift_labels
    depth 1      c d e . .
    depth 2      d e . . .      counts [3, 2]

K depths, T tokens of the row, or t of a rank's part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from vlmpack.errors import LayoutError
from vlmpack.layout.roll import IGNORE, roll_left
from vlmpack.layout.segments import Segments


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
