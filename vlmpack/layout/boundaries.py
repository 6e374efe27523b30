"""Check the boundaries of callers, cumulative counts from 0, and convert them to python ints."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import index

import numpy as np
import torch

from vlmpack.errors import LayoutError


def checked_boundaries(values: torch.Tensor | np.ndarray | Sequence[int], name: str) -> tuple[int, ...]:
    """Convert `values` to python ints, G + 1 of them for G segments; a host-device sync for a tensor on a device.

    Args:
        values: whole numbers in one dimension.
        name: what to call them in an error.

    Raises:
        LayoutError: anything else, fewer than two, not from 0, or decreasing. Names the boundary.
    """
    try:
        boundaries = tuple(index(v) for v in (values.tolist() if isinstance(values, torch.Tensor) else values))
    except TypeError:
        raise LayoutError(
            f"{name} must be whole numbers in a tensor [segments + 1], a list or a tuple; got {_seen(values)}"
        ) from None
    if len(boundaries) < 2 or boundaries[0] != 0:
        raise LayoutError(f"{name} must start at 0 and hold at least two boundaries, got {list(boundaries)[:6]}")
    for i, (a, b) in enumerate(pairwise(boundaries)):
        if b < a:
            raise LayoutError(f"{name} must never decrease, but segment {i} runs from {a} to {b}")
    return boundaries


def _seen(values: object) -> str:
    if isinstance(values, torch.Tensor | np.ndarray):
        return f"{values.dtype} {list(values.shape)}"
    return f"{type(values).__name__} {values!r}"[:80]
