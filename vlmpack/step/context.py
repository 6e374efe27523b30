"""What layers must know of the row they are computing: handed down to them with every call.

It travels as one keyword argument through the model's own `**kwargs`, so gradient checkpointing, which calls a layer
again during the backward pass, hands each layer the row it saw before, and any number of models and rows can be
alive at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, final

import torch

from vlmpack.families import FeatureForm
from vlmpack.layout import Buckets, Segments, Spaced
from vlmpack.step.whole import Whole

if TYPE_CHECKING:
    from vlmpack.step.shared import Share

CONTEXT = "vlmpack_row"
"""The keyword under which a `RowContext` reaches attention layers."""


@final
class VisionSegments:
    """Host boundaries of every vision-tower call of a step, found again by what the call shows of itself.

    A vision block knows its boundaries as a device tensor. Its length and the number of patches are known without
    waiting for the device, and in all but contrived batches they name the boundaries; where they do not, the tensor is
    read.
    """

    def __init__(self, layouts: Iterable[Segments]) -> None:
        self._by_shape: dict[tuple[int, int], Segments | None] = {}
        for segments in layouts:
            shape = (len(segments.lengths) + 1, segments.total)
            known = self._by_shape.setdefault(shape, segments)
            if known != segments:
                self._by_shape[shape] = None

    def find(self, cu_seqlens: torch.Tensor, num_patches: int) -> Segments:
        """The segments whose boundaries are `cu_seqlens`, int32 [G + 1] on any device."""
        known = self._by_shape.get((cu_seqlens.numel(), num_patches))
        return known if known is not None else Segments.from_boundaries(cu_seqlens.tolist(), total=num_patches)


@final
class RowContext:
    """One row, as its layers see it.

    No dataclass: FSDP's mixed precision rebuilds those, for every layer, and the tensors of the boundaries with them.
    """

    def __init__(
        self,
        *,
        segments: Segments,
        share: Share | None = None,
        vision: VisionSegments,
        backend: str,
        experts: torch.Tensor | None = None,
        delta: Buckets | Spaced | None = None,
        by_sample: Buckets | None = None,
        features: FeatureForm | None = None,
    ) -> None:
        self.segments = segments
        """The text row's boundaries."""
        self.share: Share = share or Whole(segments)
        """How much of it this rank has; all of it, if nothing else is said."""
        self.vision = vision
        """The vision tower's boundaries."""
        self.backend = backend
        """Name of the attention back-end, or "auto"."""
        self.experts = experts
        """int64 [R]: places of the tokens that go to experts; None: all of them go, or there are no experts."""
        self.delta = delta
        """How gated delta layers are to compute the row; None: there are none."""
        self.by_sample = by_sample
        """How layers are to compute the row that are given each sample by itself; None: there are none."""
        self.features = features
        """The form of what comes in place of pixels, the features of this rank's tokens; None: pixels come."""
        self.attended = 0
        """Calls of packed attention in the text model so far."""

    def __deepcopy__(self, memo: dict[int, Any]) -> RowContext:
        """Of one call: a copy is itself."""
        return self


@final
class InRow:
    """A tensor and the row that it lies along, for a layer that is given no keywords."""

    def __init__(self, tensor_1T: torch.Tensor, row: RowContext) -> None:
        self.tensor_1T = tensor_1T
        """The tensor, [1, T]."""
        self.row = row
        """The row."""
