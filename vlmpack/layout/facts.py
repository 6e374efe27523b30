"""What a batch says twice, to the host and in tensors: read from the tensor where the host was not told it, otherwise
compared with it where the tensor lies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vlmpack.errors import LayoutError
from vlmpack.layout.batch import FACTS_KEY, Grid
from vlmpack.layout.device import require, to_device

_CHANGED = (
    "{} is not what the host facts ("
    + repr(FACTS_KEY)
    + ") say of this batch, so images or videos were changed behind "
    "the collator; reorder samples before it, or leave the facts out of the batch"
)
_ROUNDED = 1e-2
"""How far seconds may be from those of the host: loops that run in bfloat16 round whatever a batch holds."""


def host_grids(known: tuple[Grid, ...], tensor: torch.Tensor | None, name: str) -> tuple[Grid, ...]:
    """Grids of images or videos. Without those of the host, a device is waited for.

    Raises:
        LayoutError: the host was told others, or another number of them.
    """
    if tensor is None:
        return ()
    if not known:
        return tuple((int(t), int(h), int(w)) for t, h, w in tensor.tolist())
    if len(known) != tensor.shape[0]:
        raise LayoutError(
            f"the host knows {len(known)} grids but {name} is {list(tensor.shape)}; was the batch split or "
            "concatenated on its way (accelerate: set dispatch_batches=False)?"
        )
    told = to_device(np.asarray(known, np.int64), tensor.device)
    require((tensor == told).all(), _CHANGED.format(name), LayoutError)
    return known


def host_seconds(known: tuple[float, ...], given: torch.Tensor | Sequence[float]) -> tuple[float, ...]:
    """Seconds from one grid of each video to the next. Without those of the host, a device is waited for.

    Raises:
        LayoutError: the host was told others.
    """
    tensor = torch.as_tensor(given)
    if not known:
        return tuple(tensor.tolist())
    told = to_device(np.asarray(known, np.float32), tensor.device)
    close = torch.isclose(tensor.float(), told, rtol=_ROUNDED) if tensor.shape == told.shape else tensor.new_zeros(1)
    require(close.all(), _CHANGED.format("second_per_grid_ts"), LayoutError)
    return known
