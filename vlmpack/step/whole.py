"""One rank has the whole row: the questions that the rest of this room asks, and the answers where nothing is shared.

`Shared` gives the others. T row tokens, t of them on this rank, D features, L targets of the row, l of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from vlmpack.families import Family, FeatureForm
from vlmpack.layout import HostMetadata, PackedRow, Segments
from vlmpack.parallel import Attend

OnRow = Callable[[nn.Module, torch.Tensor], torch.Tensor]
"""A layer and [1, T, D] to [1, T, D']."""

OnTensors = Callable[..., torch.Tensor]
"""[1, T, D], and further tensors [1, T, ...], to [1, T, D']."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class MediaCall:
    """The media of one row, and what computes them."""

    family: Family
    """The model's family."""
    model: nn.Module
    """The model with its head."""
    row: PackedRow
    """The whole row, on the model's device."""
    metadata: HostMetadata
    """What the host knows of it."""
    types: torch.Tensor
    """[1, T]: 0 text, 1 image, 2 video."""
    backend: str
    """Name of the attention back-end, or "auto"."""


@final
@dataclass(frozen=True, kw_only=True)
class MediaInputs:
    """How the model without its head gets images and videos."""

    inputs: dict[str, torch.Tensor]
    """Keyword arguments."""
    form: FeatureForm | None = None
    """The form of features that stand in them in place of pixels; None: they are pixels."""


@final
class Whole:
    """One rank has the whole row: nothing is cut, nothing is sent."""

    def __init__(self, segments: Segments) -> None:
        self.segments = segments
        """The boundaries of what this rank has."""
        self.real = slice(0, segments.num_tokens)
        """Which of the row's real tokens this rank has."""
        self.has_all = True
        """Whether no other rank has a part of the row."""

    def own(self, row: torch.Tensor, *, dim: int = -1) -> torch.Tensor:
        """T entries of the whole row along `dim` to those of this rank."""
        return row

    def media(self, call: MediaCall) -> MediaInputs:
        """How the model without its head gets images and videos."""
        return MediaInputs(inputs=call.row.media.to_hf())

    def attention(
        self, attend: Attend, q_tNH: torch.Tensor, k_tKH: torch.Tensor, v_tKH: torch.Tensor, segments: Segments
    ) -> torch.Tensor:
        """[t, N, H], by a back-end that takes a whole row, with these boundaries."""
        return attend(q_tNH, k_tKH, v_tKH, segments)

    def delta(self, on_row: OnRow, layer: nn.Module, hidden_1tD: torch.Tensor) -> torch.Tensor:
        """[1, t, D] through a gated delta layer, by a function that takes it, or a stand-in, and the whole row."""
        return on_row(layer, hidden_1tD)

    def by_row(self, on_row: OnTensors, hidden_1tD: torch.Tensor, *beside_1t: torch.Tensor) -> torch.Tensor:
        """[1, t, D] through a layer that has to see the whole row, and further tensors that have no gradient."""
        return on_row(hidden_1tD, *beside_1t)

    def sum(self, own: torch.Tensor) -> torch.Tensor:
        """Sum over ranks; every rank continues with the identical value, so the backward pass sends nothing."""
        return own

    def same(self, own_t: torch.Tensor) -> torch.Tensor:
        """Gather over ranks, [t, ...] to [T, ...]; every rank continues with the identical value, so the backward pass
        sends nothing."""
        return own_t

    def targets(self, index_L: torch.Tensor) -> torch.Tensor:
        """int64 [l]: of places of the row (rising) those of this rank, counted from its first token."""
        return index_L

    def all_targets(self, own_l: torch.Tensor, own_index_l: torch.Tensor, index_L: torch.Tensor) -> torch.Tensor:
        """What this rank found for its targets, [l] at `targets(index_L)`, to what all ranks found for all, [L]."""
        return own_l
