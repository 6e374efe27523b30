"""Features that were computed elsewhere reach the model where it would compute them itself.

The model without its head is given features in place of pixels, and its class becomes a subclass of itself whose
`get_image_features` and `get_video_features` hand them on when the row says so. The model goes on as ever: it puts them
on their tokens, and adds deepstack features after its first layers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from vlmpack.step.context import CONTEXT, RowContext
from vlmpack.step.subclass import subclass


@functools.cache
def given_class(base: Any) -> type[nn.Module]:
    """A subclass of the class of a model without its head that takes features; one a base class."""

    def handing_on(name: str) -> Any:
        own = vars(base)[name]

        @functools.wraps(own)
        def features(self: Any, pixels: torch.Tensor, grids: torch.Tensor | None = None, **kwargs: Any) -> Any:
            row: RowContext | None = kwargs.get(CONTEXT)
            if row is None or row.features is None:
                return own(self, pixels, grids, **kwargs)
            return row.features.split(pixels)

        return features

    names = ("get_image_features", "get_video_features")
    return subclass(base, {name: handing_on(name) for name in names}, given_class)
