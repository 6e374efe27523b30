"""Shift labels inside each segment of a row, and back: no target crosses a boundary."""

from __future__ import annotations

import torch

from vlmpack.layout.segments import Segments

IGNORE = -100
"""The label that cross-entropy leaves out."""


def shift_labels(labels: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Targets of a row: `out[..., i] = labels[..., i + 1]` inside a segment, -100 on last tokens and padding.

    Args:
        labels: [1, T] int64, not shifted.
        segments: the row's boundaries.
    """
    shifted = torch.roll(labels, -1, dims=-1)
    shifted[..., segments.last_tokens(labels.device)] = IGNORE
    return shifted.masked_fill_(segments.padding_mask(labels.device), IGNORE) if segments.has_gaps else shifted


def unshift_labels(shifted: torch.Tensor, segments: Segments) -> torch.Tensor:
    """The inverse of `shift_labels`; each segment's first label, which predicts nothing, becomes -100."""
    first = (segments.position_in_segment(shifted.device) == 0) | segments.padding_mask(shifted.device)
    return torch.roll(shifted, 1, dims=-1).masked_fill_(first, IGNORE)
